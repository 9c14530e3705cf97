"""Starts ``tests/parallel`` under horovodrun, over MPI and over Gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.torch]

HERE = Path(__file__).parent
CONTROLLERS = ("mpi", "gloo")


def run_ranks(n: int, controller: str, *command: str, timeout_s: int = 300) -> tuple[int, str]:
    """Run a command on ``n`` local ranks; return (exit code, output). A hang is killed."""
    pytest.importorskip("horovod")
    environment = os.environ | {
        "FFTCOMP_TEST_RANKS": str(n),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    launcher = ["horovodrun", "-np", str(n), f"--{controller}"]
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
    return process.returncode, output


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_torch_on_two_ranks(controller):
    code, output = run_ranks(
        2, controller, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider",
        str(HERE / "parallel" / "torch_cases.py"),
    )  # fmt: skip
    assert code == 0, output[-8000:]
    assert output.count(" passed") == 2, output[-8000:]
