"""Starts ``ddp_cases.py`` on ranks that are connected by Gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.torch]

ROOT = Path(__file__).parents[1]


def run_ranks(n: int, folder: Path, *command: str, timeout_s: int = 200) -> list[str]:
    """Run Python with ``command`` on ``n`` ranks; return their outputs. A failure is an error."""
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
    assert codes == [0] * n, "\n".join(output[-4000:] for output in outputs)
    return outputs


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.smoke), 3])
def test_on_ranks(ranks, tmp_path):
    cases = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--color=no"]
    outputs = run_ranks(ranks, tmp_path, *cases, "tests/ddp_cases.py")
    assert all(" passed" in output for output in outputs)
