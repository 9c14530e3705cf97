"""Starts ``ddp_cases.py`` and ``hsdp_cases.py`` on ranks that are connected by Gloo."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_fftcomp import get_scheme
from tests.test_parallel import run_ranks as horovod_ranks

torch = pytest.importorskip("torch")
from horovod_fftcomp.torch_distributed.meeting import MeetingPlaces  # noqa: E402

pytestmark = [pytest.mark.parallel, pytest.mark.torch]

ROOT = Path(__file__).parents[1]


def run_ranks(
    n: int, folder: Path, *command: str, timeout_s: int = 200
) -> tuple[list[int], list[str]]:
    """Run Python with ``command`` on ``n`` ranks; return their exit codes and outputs."""
    environment = os.environ | {
        "FFTCOMP_TEST_RANKS": str(n),
        "FFTCOMP_TEST_STORE": str(folder / "store"),
        "OMP_NUM_THREADS": "1",
    }
    files = [(folder / f"rank-{rank}.txt").open("w+") for rank in range(n)]
    # Ranks that shared a folder of temporary files would clean up under each other's hands.
    temporary = [folder / f"temporary-{rank}" for rank in range(n)]
    for own in temporary:
        own.mkdir(exist_ok=True)
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment | {"FFTCOMP_TEST_RANK": str(rank), "PYTEST_DEBUG_TEMPROOT": str(own)},
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        for rank, (file, own) in enumerate(zip(files, temporary, strict=True))
    ]
    try:
        codes = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
            file.close()
    return codes, outputs


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [pytest.param(2, "", marks=pytest.mark.smoke), (3, ""), (4, "ranks_per_node")],
)
def test_on_ranks(ranks, cases, tmp_path):
    run_cases(ranks, tmp_path, "-m", "not slow", "-k", cases)


@pytest.mark.slow
def test_long_trainings_on_ranks(tmp_path):
    run_cases(2, tmp_path, "-m", "slow")


def run_cases(ranks: int, folder: Path, *chosen: str, file: str = "tests/ddp_cases.py") -> None:
    cases = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no", *chosen]
    codes, outputs = run_ranks(ranks, folder, *cases, file, timeout_s=400)
    assert codes == [0] * ranks, "\n".join(output[-4000:] for output in outputs)
    assert all(" passed" in output for output in outputs)


@pytest.mark.more
def test_an_emulated_gpu_on_ranks(tmp_path):
    run_cases(2, tmp_path, file="tests/ddp_device_cases.py")


@pytest.mark.gpu
def test_two_ranks_share_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU is available")
    run_cases(2, tmp_path, file="tests/ddp_device_cases.py")


@pytest.mark.slow
def test_fsdp2_on_two_replicas_of_two_shards(tmp_path):
    run_cases(4, tmp_path, file="tests/hsdp_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("dies", "a rank has ended or cannot be reached"),
        ("sleeps", "Rank 1 is late: it has not"),
        ("stalls", "Rank 1 is late: it has not"),
        ("discards", "discard()"),
        ("lacks", "s for ranks 1. Make the same compressors"),
        ("gathers", "Rank 1 waits in gathered_state_dict() for all ranks, but rank 0 did not"),
    ],
)
def test_a_rank_that_fails_ends_the_others_with_the_reason(failure, message, tmp_path):
    codes, outputs = run_ranks(2, tmp_path, "tests/scripts/ddp_failure.py", failure, timeout_s=60)
    assert codes == [1, 9 if failure == "dies" else 1]
    assert "ConfigMismatchError: " in outputs[0]
    assert message in outputs[0]
    if failure == "stalls":
        assert "the first one runs: False" in outputs[1]
    if failure == "lacks":
        assert re.search(r"rank 0: a new compressor has waited \d+ s for ranks 1, and", outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("dies", "a rank has ended or cannot be reached"),
        ("sleeps", "Rank 1 is late: it has not"),
        ("differs", "on ranks 0, 2, 3 but 0.33 on rank 1"),
    ],
)
def test_a_rank_that_fails_ends_those_of_all_nodes_with_the_reason(failure, message, tmp_path):
    codes, outputs = run_ranks(4, tmp_path, "tests/scripts/ddp_failure.py", failure, timeout_s=120)
    assert codes == [1, 9 if failure == "dies" else 1, 1, 1], "\n".join(outputs)
    assert message in outputs[0]
    for rank in (0, 2, 3):
        assert "ConfigMismatchError: " in outputs[rank]


@pytest.mark.slow
def test_states_are_gathered_while_the_interpreter_exits(tmp_path):
    outputs = run_ranks(2, tmp_path, "tests/scripts/ddp_exit.py", timeout_s=60)[1]
    assert all("2 states" in output for output in outputs), outputs


def same(one, other):
    """Tell whether nested dicts and lists are equal, tensors to the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("ranks", [2, 3])
def test_averages_and_state_are_those_of_the_horovod_adapter(ranks, tmp_path):
    """Of every recipe on two ranks, of what is gathered or sharded on more."""
    script = "tests/scripts/two_launchers.py"
    code, output = horovod_ranks(ranks, "mpi", script, "horovod", str(tmp_path))
    assert code == 0, output[-4000:]
    codes, outputs = run_ranks(ranks, tmp_path, script, "ddp", str(tmp_path))
    assert codes == [0] * ranks, "".join(output[-4000:] for output in outputs)
    for rank in range(ranks):
        one, other = (
            torch.load(tmp_path / f"{launcher}-{rank}.pt", weights_only=True)
            for launcher in ("horovod", "ddp")
        )
        if ranks > 2:
            one, other = gathered(one), gathered(other)
        assert one.keys() == other.keys()
        assert len(one) > 20
        assert [recipe for recipe in one if not same(one[recipe], other[recipe])] == []


def gathered(results):
    """Return the results without what is summed by an allreduce: some recipes, and all biases."""
    return {
        choice: result["state"] | {"averages": [each["0.weight"] for each in result["averages"]]}
        for choice, result in results.items()
        if "averages" in result  # of local steps, whose biases are allreduced, there are none
        if not any("allreduce" in each for each in get_scheme(choice.split()[0]).possible_rounds())
    }


def torchrun(*command: object, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a script, or with "-m" a module, on ``ranks`` ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, f"--nproc-per-node={ranks}", *map(str, command)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_training_continues_exactly_under_another_launcher(tmp_path):
    """50 steps under one launcher and 50 under the other are 100 under either."""

    def horovodrun(*parts):
        code, output = horovod_ranks(2, "mpi", script, "horovod", str(tmp_path), *parts)
        assert code == 0, output[-4000:]

    script = "tests/scripts/changes_launcher.py"
    horovodrun("0:50::horovod-50", "0:100::horovod-100")
    run = torchrun(script, "ddp", tmp_path, "0:50::ddp-50", "50:100:horovod-50:to-ddp")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    horovodrun("50:100:ddp-50:to-horovod")
    for rank in range(2):
        expected, to_ddp, to_horovod = (
            torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            for name in ("horovod-100", "to-ddp", "to-horovod")
        )
        assert [recipe for recipe in expected if not same(to_ddp[recipe], expected[recipe])] == []
        assert same(to_horovod, expected)


def test_the_example_trains_and_reports_under_torchrun(tmp_path):
    run = torchrun(
        "examples/ddp_digits.py", "--epochs", 4, "--compression", "none,topk:density=0.1",
        "--out", tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    printed = " ".join(run.stdout.split())  # lines end between words
    assert f"wrote {tmp_path}/ddp_digits.png and .json" in printed
    assert "On a machine with other work, or with fewer cores than ranks, times tell" in printed
    report = json.loads((tmp_path / "ddp_digits.json").read_text())
    assert report["ranks"] == 2
    dense, sparse = report["runs"]
    assert dense["sent_nbytes_per_step"] == 4 * 151_306
    assert sparse["ratio"] > 25
    for each in (dense, sparse):
        assert each["accuracy"] > 0.6
        assert min(each["ms_per_step"].values()) >= 0


def test_the_job_is_checked_under_torchrun():
    run = torchrun("-m", "horovod_fftcomp", "check", "--timeout", 150)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    for found in (
        "2 ranks over Gloo, 2 on this machine",
        "the same bits on all ranks",
        "ms for an allreduce of one number",
        "ms for an allgather of 16.8 MB from each)",
        "Gbit/s received by a rank (",
        "none has failed",
        "0 failed, ",
    ):
        assert found in " ".join(run.stdout.split()), run.stdout[-4000:]
    assert "horovod.torch" not in run.stdout


# A script that knows nothing of this package; its second argument is the hook to register.
UNEDITED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(100, 100))
if "hook" in sys.argv:
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
try:
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 100)).square().mean().backward()
        optimizer.step()
    sys.stdout.write(f"ran to its end, {'horovod' in sys.modules}\\n")  # one write
finally:
    dist.destroy_process_group()
"""


@pytest.fixture
def unedited(tmp_path):
    path = tmp_path / "unedited.py"
    path.write_text(UNEDITED)
    return path


def test_an_unedited_script_runs_with_compression(unedited):
    recipe = "topk:density=0.1,warmup_steps=0"
    run = torchrun("-m", "horovod_fftcomp", "run", "--compression", recipe, unedited)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.splitlines() == ["ran to its end, False"] * 2
    [report] = re.findall(r"horovod-fftcomp run: .*", run.stderr)
    assert re.search(r"topk\(density=0.1.*\): 8 steps on 2 ranks", report)
    assert float(re.search(r"([\d.]+) times less than float32", report)[1]) > 5


def test_a_hook_of_an_unedited_scripts_own_is_refused(unedited):
    run = torchrun("-m", "horovod_fftcomp", "run", "--compression", "topk", unedited, "hook")
    assert run.returncode != 0
    assert "registers a communication hook with DDP" in run.stderr
    assert "fp16_compress_hook" in run.stderr


def test_recipes_are_compared_under_torchrun(unedited, tmp_path, no_launcher):
    launcher = Path(sys.executable).with_name("torchrun")
    command = ["run", "--compare", "none,topk", "--steps", "5", "--repeat", "1",
               "--json", f"{tmp_path}/rows.json", "--launcher", f"{launcher} --standalone",
               str(unedited)]  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-m", "horovod_fftcomp", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["trouble"] for row in rows] == ["", ""]
    assert [row["ranks"][rank]["steps"] for row in rows for rank in range(2)] == [5] * 4
    assert "ran to its end" not in run.stdout


@pytest.fixture
def no_horovod(tmp_path, monkeypatch):
    """Let Python find no Horovod, in processes that this one starts."""
    hide = tmp_path / "hide" / "sitecustomize.py"
    hide.parent.mkdir()
    hide.write_text("import sys\nsys.modules['horovod'] = None\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hide.parent), str(ROOT)]))


def test_processes_of_all_ranks_meet_at_a_place_of_their_own_each_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(MeetingPlaces())
    first, second = ([rank.next() for rank in ranks] for _ in range(2))
    assert first[0] == first[1] != second[0] == second[1]
    ports = [int(found[0][1].removeprefix("MASTER_PORT=")) for found in (first, second)]
    assert port not in ports
    for found, own in zip((first, second), ports, strict=True):
        assert found[0][0] == "MASTER_ADDR=127.0.0.1"
        assert found[0][2] == "TORCHELASTIC_USE_AGENT_STORE=False"
        socket.create_server(("127.0.0.1", own)).close()  # nobody else has it


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_recipe_is_advised_without_horovod(
    is_launched, unedited, tmp_path, no_launcher, no_horovod
):
    """By ranks of torchrun, and by jobs that are started."""
    path = tmp_path / "advice.json"
    command = ["advise", "--compression", "topk", "--steps", 8, "--json", path, unedited]
    if is_launched:
        run = torchrun("-m", "horovod_fftcomp", *command)
    else:
        run = subprocess.run(
            [sys.executable, "-m", "horovod_fftcomp", *map(str, command)],
            cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert path.exists(), run.stdout[-4000:] + run.stderr[-4000:]
    found = json.loads(path.read_text())
    assert found["ranks"] == 2
    assert found["overhead_s"] == 0  # there is no cycle of Horovod
    none, topk = found["recipes"]
    assert none["sent_nbytes"] == 4 * 10_100
    assert topk["sent_nbytes"] < none["sent_nbytes"] / 10
    assert {each[0] for each in found["probe"]} == {"allreduce", "allgather"}
    assert min(found["measured_step_s"].values()) > 0
    assert run.stdout.count("The script's step without compression took") == 1
    assert run.stdout.count("Other processes used") >= 1
    assert "ran to its end" not in run.stdout


# Starts tasks here with the variables that Slurm gives those of a step; ``-n`` counts.
SRUN = """#!{python}
import os, subprocess, sys
command, n = sys.argv[1:], 1
while command[0].startswith("-"):
    if command.pop(0) == "-n":
        n = int(command.pop(0))
step = str(int(os.environ.get("SLURM_STEP_ID", -1)) + 1)
all_tasks = dict.fromkeys("NTASKS NPROCS STEP_NUM_TASKS TASKS_PER_NODE".split(), str(n))
job = {{"JOB_ID": "7", "STEP_ID": step, "STEPID": step, "NNODES": "1", "NODEID": "0"}}
job |= {{"STEP_TASKS_PER_NODE": f"{{n}}(x1)", "NODELIST": "here", "STEP_NODELIST": "here"}}
tasks = []
for rank in map(str, range(n)):
    own = {{"PROCID": rank, "LOCALID": rank, "GTIDS": rank}}
    own = {{f"SLURM_{{name}}": value for name, value in (all_tasks | job | own).items()}}
    tasks.append(subprocess.Popen(command, env=os.environ | own))
sys.exit(max(abs(task.wait()) for task in tasks))
"""


@pytest.fixture
def srun(tmp_path, monkeypatch, no_launcher, no_horovod):
    """Return a function that runs a command of ours on two ranks by a stand-in for ``srun``."""
    path = tmp_path / "bin" / "srun"
    path.parent.mkdir()
    path.write_text(SRUN.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(path.parent), os.environ["PATH"]]))
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(*command):
        ours = ["srun", "-n", "2", sys.executable, "-m", "horovod_fftcomp", *map(str, command)]
        return subprocess.run(ours, cwd=ROOT, capture_output=True, text=True, timeout=300)

    return start


@pytest.fixture
def for_slurm(unedited):
    """Return a script that takes its rank from Slurm."""
    ranks = "{'RANK': os.environ['SLURM_PROCID'], 'WORLD_SIZE': os.environ['SLURM_NTASKS']}"
    unedited.write_text(f"import os\nos.environ |= {ranks}\n{UNEDITED}")
    return unedited


def test_the_first_task_of_srun_advises_by_further_steps(srun, for_slurm, tmp_path):
    path = tmp_path / "advice.json"
    run = srun("advise", "--compression", "topk", "--steps", 8, "--json", path, for_slurm)
    assert path.exists(), run.stdout[-4000:] + run.stderr[-4000:]
    found = json.loads(path.read_text())
    assert found["ranks"] == 2
    assert min(found["measured_step_s"].values()) > 0
    assert {each[0] for each in found["probe"]} == {"allreduce", "allgather"}
    assert run.stdout.count("The script's step without compression took") == 1


def test_a_job_of_srun_is_checked_without_horovod(srun):
    run = srun("check", "--timeout", 150)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    joined = " ".join(run.stdout.split())
    for found in ("2 ranks over Gloo, 2 on this machine", "none has failed", "0 failed, "):
        assert found in joined, joined


def test_a_script_runs_with_compression_under_srun(srun, for_slurm):
    run = srun("run", "--compression", "topk(warmup_steps=0)", for_slurm)
    assert run.returncode == 0, run.stderr[-4000:]
    [report] = re.findall(r"horovod-fftcomp run: .*", run.stderr)
    assert "topk(warmup_steps=0): 8 steps on 2 ranks" in report


def test_the_report_of_torchrun_ends_with_the_reason():
    run = torchrun("-m", "horovod_fftcomp", "advise", "--gbit-per-s", 1)
    assert run.returncode
    *_, last, line = run.stderr.splitlines()
    assert set(line) == {"="}
    assert last.startswith(
        "  traceback : none, as nothing has crashed: horovod-fftcomp advise ends"
    )
    assert last.endswith("with status 2: --gbit-per-s needs --ranks P, at least 2")


@pytest.mark.slow
def test_the_example_of_fsdp2_prints_the_bytes_between_replicas():
    run = torchrun("examples/fsdp2_hsdp.py", "--epochs", 3, ranks=4)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    pattern = r"(\w+) +accuracy ([\d.]+), ([\d,]+) bytes a step between replicas, ratio ([\d.]+)"
    lines = re.findall(pattern, run.stdout)
    assert [line[0] for line in lines] == ["none", "topk", "fft"]
    assert all(float(line[1]) > 0.4 for line in lines)  # 0.1 by chance
    nbytes = [int(line[2].replace(",", "")) for line in lines]
    assert max(nbytes[1:]) < nbytes[0] / 5
