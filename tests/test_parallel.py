"""Starts ``tests/parallel`` under horovodrun, over MPI and over Gloo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel import JOBS

pytestmark = [pytest.mark.parallel, pytest.mark.torch]

HERE = Path(__file__).parent
CONTROLLERS = ("mpi", "gloo")


def run_ranks(
    n: int,
    controller: str,
    *command: str,
    timeout_s: int = 600,
    framework: str = "torch",
) -> tuple[int, str]:
    """Run a command on ``n`` local ranks; return (exit code, output). A hang is killed."""
    pytest.importorskip("horovod")
    environment = os.environ | {
        "FFTCOMP_TEST_FRAMEWORK": framework,
        "FFTCOMP_TEST_RANKS": str(n),
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # there may be more ranks than cores
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment.pop("COLUMNS", None)  # of a worker of pytest-xdist
    launcher = [sys.executable, "-m", "tests.launch", "-np", str(n), f"--{controller}"]
    if controller == "mpi":
        launcher += ["--mpi-args=--oversubscribe"]
    process = subprocess.Popen(
        [*launcher, sys.executable, *command],
        env=environment,
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{n} ranks over {controller} did not end in {timeout_s} s:\n{output[-8000:]}")
    # What a rank writes in pieces gets a tag before each of them, in the midst of a line too.
    return process.returncode, re.sub(r"(?<=.)\[\d+(?:,\d+)?\]<std(?:out|err)>:", "", output)


def test_every_file_of_cases_is_run():
    run = {name for _, files in JOBS.values() for name in files.split()}
    assert run == {path.stem for path in (HERE / "parallel").glob("*_cases.py")}


def launches():
    """Yield (job, controller, cases): over Gloo those that depend on it, over MPI all.

    ``make test`` starts few of them, CI some more. PyTorch's cases that do not depend on the
    transport run there on threads, TensorFlow's in CI.
    """
    often = [("torch", "gloo", "transport"), ("tensorflow", "mpi", "few")]
    in_ci = [("tensorflow", "mpi", "all"), ("torch", "mpi", "transport"),
             ("torch_on_three", "mpi", "transport"), ("torch_on_four", "gloo", "transport"),
             ("tensorflow_keras3", "gloo", "transport")]  # fmt: skip
    every = [(job, "mpi", "all") for job in JOBS]
    # No case of a GPU is for both.
    every += [(job, "gloo", "transport") for job in JOBS if not job.endswith("_device")]
    for launch in dict.fromkeys(often + in_ci + every):
        marks = [pytest.mark.smoke] if launch in often else []
        marks += [pytest.mark.more] if launch in in_ci else []
        marks += [pytest.mark.tf] if "tensorflow" in launch[0] else []
        yield pytest.param(*launch, marks=marks)


CHOSEN = {"all": [], "transport": ["-m", "transport"], "few": ["-m", "transport and not more"]}


@pytest.mark.parametrize(("job", "controller", "cases"), list(launches()))
def test_on_ranks(job, controller, cases):
    run_cases(job, controller, *CHOSEN[cases])


def run_cases(job: str, controller: str, *options: str) -> None:
    ranks, files = JOBS[job]
    code, output = run_ranks(
        ranks, controller, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no",
        "-o", "faulthandler_timeout=300",  # a case that hangs shows where each thread is
        *options,
        *(str(HERE / "parallel" / f"{name}.py") for name in files.split()),
        framework=job.partition("_")[0],
        timeout_s=1200,
    )  # fmt: skip
    assert code == 0, output[-8000:]
    assert output.count(" passed") == ranks, output[-8000:]


@pytest.mark.gpu
def test_two_ranks_share_a_gpu():
    torch = pytest.importorskip("torch")
    hvd = pytest.importorskip("horovod.torch", exc_type=ImportError)
    if not (torch.cuda.is_available() and hvd.cuda_built()):
        pytest.skip("no GPU is available, or Horovod is built without CUDA")
    if hvd.nccl_built():
        pytest.skip("NCCL takes one rank on a GPU: scripts/horovod_cuda.py --operations host")
    run_cases("torch_device", "gloo")


JOIN = """
import horovod.torch as hvd
from tests.parallel.models import distributed, make_model, small_buckets, train
hvd.init()
model = make_model()
optimizer = distributed(model, small_buckets(model, "topk"))
train(model, optimizer, 3 - hvd.rank())
hvd.join()
"""


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_join_ends_with_a_message(controller):
    code, output = run_ranks(2, controller, "-c", JOIN)
    assert code != 0
    assert "a rank has called hvd.join(), after which Horovod supports allreduces only" in output
    assert "same number of batches" in output


TF_JOIN = """
import horovod.tensorflow as hvd
from tests.parallel.tensorflow_models import Layers, batches, small_buckets, stepper
hvd.init()
model = Layers()
step = stepper(model, small_buckets(model, "topk"))
for x, y in batches(3 - hvd.rank()):
    step(x, y)
hvd.join()
"""

TF_ABSENT = """
import time
import horovod.tensorflow as hvd
from tests.parallel.tensorflow_models import Layers, small_buckets, train
hvd.init()
model = Layers()
compression = small_buckets(model, "topk", timeout_s=3)
if hvd.rank() == 0:
    train(model, compression, 1)
time.sleep(20)
"""


@pytest.mark.tf
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_tensorflow_join_ends_with_a_message(controller):
    code, output = run_ranks(2, controller, "-c", TF_JOIN, framework="tensorflow")
    assert code != 0
    assert "a rank has called hvd.join(), after which Horovod supports allreduces only" in output


@pytest.mark.tf
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_rank_that_never_compresses_ends_tensorflows_wait_with_a_message(controller):
    code, output = run_ranks(2, controller, "-c", TF_ABSENT, framework="tensorflow")
    assert code != 0
    assert "the barrier of a step' got no answer from all ranks in 3 s: a rank has died" in output


ABSENT = """
import time
import horovod.torch as hvd
from tests.parallel.models import distributed, make_model, train
from horovod_fftcomp.torch import Compression
hvd.init()
model = make_model()
optimizer = distributed(model, Compression.topk(model, timeout_s=2))
if hvd.rank() == 0:
    train(model, optimizer, 1)
time.sleep(20)
"""


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_rank_that_never_compresses_ends_the_wait_with_a_message(controller):
    code, output = run_ranks(2, controller, "-c", ABSENT)
    assert code != 0
    assert "handshake.1' got no answer from all ranks in 2 s: a rank has died, runs with" in output


BREAKING = """
import sys
import time
import horovod.torch as hvd
from horovod_fftcomp.kernels.host import coder
from tests.parallel.models import batches, distributed, loss_of, make_model, small_buckets, train
def told(*error):
    sys.__excepthook__(*error)
    time.sleep(1)  # mpirun may drop what a rank has written just before it ends
sys.excepthook = told
hvd.init()
model = make_model()
optimizer = distributed(model, small_buckets(model, "topk"))
train(model, optimizer, 2)
plain = coder.zeros
def zeros(*arguments):  # an encoding begins with the memory of its message
    time.sleep(0.2)
    {broken}
    return plain(*arguments)
coder.zeros = zeros
optimizer.zero_grad()
loss_of(model, *next(batches(1))).backward()
{end}
"""


@pytest.mark.parametrize(
    ("controller", "setting"),
    [
        ("mpi", ""),
        ("gloo", ""),
        ("mpi", "from horovod_fftcomp.torch import steps; steps.GRACE_S = 0.0"),
    ],
)
def test_an_error_in_one_ranks_worker_ends_the_job_with_its_message(controller, setting):
    """The time for which an error waits is a courtesy: the job ends without it too."""
    broken = "if hvd.rank() == 1: raise BufferError('encoding broke on rank 1')"
    script = BREAKING.format(broken=broken, end=f"{setting}\noptimizer.step()")
    code, output = run_ranks(2, controller, "-c", script)
    assert code != 0
    assert "BufferError: encoding broke on rank 1" in output, output[-8000:]


# The first rank to end shuts Horovod down: not while the other one hands gradients over.
LEAVING = """
from pathlib import Path
Path(sys.argv[1], str(hvd.rank())).touch()
while len(list(Path(sys.argv[1]).iterdir())) < hvd.size():
    time.sleep(0.01)
print(f"ends at {time.time()}")
"""


@pytest.mark.parametrize(
    ("controller", "end"), [("mpi", "sys.exit()"), ("gloo", ""), ("gloo", "del model, optimizer")]
)
def test_processes_that_end_in_the_midst_of_a_step_end_soon(tmp_path, controller, end):
    script = BREAKING.format(broken="pass", end=LEAVING + end)
    code, output = run_ranks(2, controller, "-c", script, str(tmp_path))
    assert code == 0, output[-4000:]
    begin = min(float(text) for text in re.findall(r"ends at ([\d.]+)", output))
    assert time.time() - begin < 40, output[-4000:]


RESIZE = """
import sys
import horovod.torch as hvd
import torch
from tests.parallel.models import compressed_names, distributed, make_model, small_buckets, train
hvd.init()
torch.set_num_threads(1)
path, recipe, exchange = sys.argv[1:]
model = make_model()
compression = small_buckets(model, recipe, exchange=exchange, warmup_steps=0)
optimizer = distributed(model, compression)
try:
    compression.load_state_dict(torch.load(path, weights_only=True))
except FileNotFoundError:
    train(model, optimizer, 6)
names = compressed_names(compression)
mass = [hvd.allreduce(compression.residual(n).double(), op=hvd.Sum, name=n) for n in names]
if hvd.rank() == 0:
    torch.save(torch.cat([m.reshape(-1) for m in mass]), f"{path}.{hvd.size()}.mass")
state = compression.gathered_state_dict()
hvd.barrier()
if hvd.rank() == 0:
    torch.save(state, path)
"""


@pytest.mark.parametrize(
    ("controller", "recipe", "exchange", "sizes"),
    [
        ("mpi", "topk", "gather", (2, 1, 2)),
        ("gloo", "fft", "gather", (2, 1, 2)),
        ("mpi", "fft", "sharded", (4, 2, 4)),
        ("gloo", "topk", "sharded", (4, 2, 4)),
    ],
)
def test_residual_mass_survives_other_numbers_of_ranks(
    controller, recipe, exchange, sizes, tmp_path
):
    torch = pytest.importorskip("torch")
    path, masses = tmp_path / "state.pt", []
    for ranks in sizes:
        code, output = run_ranks(ranks, controller, "-c", RESIZE, str(path), recipe, exchange)
        assert code == 0, output[-4000:]
        masses.append(torch.load(f"{path}.{ranks}.mass"))
    scale = masses[0].abs().max()
    assert scale > 0
    for mass in masses[1:]:
        assert (mass - masses[0]).abs().max() <= 1e-6 * scale
