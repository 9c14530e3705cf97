"""Starts ``ddp_cases.py`` on ranks that are connected by Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.torch]

ROOT = Path(__file__).parents[1]


def run_ranks(
    n: int, folder: Path, *command: str, timeout_s: int = 200
) -> tuple[list[int], list[str]]:
    """Run Python with ``command`` on ``n`` ranks; return their exit codes and outputs."""
    pytest.importorskip("torch")
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
