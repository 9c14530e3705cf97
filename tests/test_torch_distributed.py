"""Starts ``ddp_cases.py`` and ``hsdp_cases.py`` on ranks that are connected by Gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_parallel import run_ranks as horovod_ranks

torch = pytest.importorskip("torch")

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
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment | {"FFTCOMP_TEST_RANK": str(rank)},
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        for rank, file in enumerate(files)
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


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.smoke), 3])
def test_on_ranks(ranks, tmp_path):
    cases = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no"]
    codes, outputs = run_ranks(ranks, tmp_path, *cases, "tests/ddp_cases.py")
    assert codes == [0] * ranks, "\n".join(output[-4000:] for output in outputs)
    assert all(" passed" in output for output in outputs)


def test_fsdp2_on_two_replicas_of_two_shards(tmp_path):
    cases = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no"]
    codes, outputs = run_ranks(4, tmp_path, *cases, "tests/hsdp_cases.py", timeout_s=400)
    assert codes == [0] * 4, "\n".join(output[-4000:] for output in outputs)
    assert all(" passed" in output for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "message"),
    [("dies", "a rank has ended or cannot be reached"), ("sleeps", "Rank 1 is late: it has not")],
)
def test_a_rank_that_fails_ends_the_others_with_the_reason(failure, message, tmp_path):
    codes, outputs = run_ranks(2, tmp_path, "tests/scripts/ddp_failure.py", failure, timeout_s=60)
    assert codes == [1, 9 if failure == "dies" else 1]
    assert "ConfigMismatchError: " in outputs[0]
    assert message in outputs[0]


def same(one, other):
    """Tell whether nested dicts and lists are equal, tensors to the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_averages_and_state_are_those_of_the_horovod_adapter(tmp_path):
    script = "tests/scripts/two_launchers.py"
    code, output = horovod_ranks(2, "mpi", script, "horovod", str(tmp_path))
    assert code == 0, output[-4000:]
    codes, outputs = run_ranks(2, tmp_path, script, "ddp", str(tmp_path))
    assert codes == [0, 0], outputs[0][-4000:] + outputs[1][-4000:]
    for rank in range(2):
        one, other = (
            torch.load(tmp_path / f"{launcher}-{rank}.pt", weights_only=True)
            for launcher in ("horovod", "ddp")
        )
        assert one.keys() == other.keys()
        assert [recipe for recipe in one if not same(one[recipe], other[recipe])] == []


def test_the_example_trains_and_reports_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "examples/ddp_digits.py", "--epochs", "4", "--compressor", "none", "topk",
               "--density", "0.1", "--out", str(tmp_path)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    report = json.loads((tmp_path / "ddp_digits.json").read_text())
    assert report["ranks"] == 2
    dense, sparse = report["runs"]
    assert dense["sent_nbytes_per_step"] == 4 * 151_306
    assert sparse["ratio"] > 25
    for each in (dense, sparse):
        assert each["accuracy"] > 0.6
        assert min(each["ms_per_step"].values()) >= 0


def test_the_example_of_fsdp2_prints_the_bytes_between_replicas():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4",
               "examples/fsdp2_hsdp.py", "--epochs", "3"]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    pattern = r"(\w+) +accuracy ([\d.]+), ([\d,]+) bytes a step between replicas, ratio ([\d.]+)"
    lines = re.findall(pattern, run.stdout)
    assert [line[0] for line in lines] == ["none", "topk", "fft"]
    assert all(float(line[1]) > 0.4 for line in lines)  # 0.1 by chance
    nbytes = [int(line[2].replace(",", "")) for line in lines]
    assert max(nbytes[1:]) < nbytes[0] / 5
