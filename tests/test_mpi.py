"""Starts ``mpi_cases.py`` and the example under mpirun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import patient_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.mpi]

ROOT = Path(__file__).parents[1]


def mpirun(n: int, *command: str) -> str:
    """Run a command on ``n`` ranks; return its output, whose failure is an error."""
    pytest.importorskip("mpi4py")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with patient_ranks(environment):
        run = subprocess.run(
            ["mpirun", "--oversubscribe", "-np", str(n), sys.executable, "-m", "mpi4py", *command],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.smoke), 4])
def test_on_ranks(ranks):
    output = mpirun(
        ranks, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no",
        "tests/mpi_cases.py",
    )  # fmt: skip
    assert len(re.findall(r"\d+ passed", output)) == ranks, output


def test_the_example_prints_a_table():
    output = mpirun(
        2, "examples/mpi_sum.py", "--numel", "20000", "--steps", "5", "--compression",
        "none,topk(density=0.1),scalecom",
    )  # fmt: skip
    rows = re.findall(r"^(\w+)\S* +([\d.e-]+) +([\d.]+) ", output, re.M)
    assert [name for name, _, _ in rows] == ["none", "topk", "scalecom"], output
    assert float(rows[0][1]) < 1e-5
    assert float(rows[0][2]) == 80.0
    assert float(rows[1][1]) < 0.7
