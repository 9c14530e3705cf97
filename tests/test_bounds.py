"""The compiled kernels once more with every index checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_no_kernel_reads_or_writes_out_of_bounds(tmp_path):
    environment = os.environ | {
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(tmp_path),  # the cache does not tell checked code from unchecked
    }
    here = Path(__file__).parent
    files = ["test_contracts.py", "test_selection.py", "test_wire.py", "test_golden.py"]
    chosen = "not large and not 5-d and not reference-"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen]
    run = subprocess.run(
        [*command, *(str(here / file) for file in files)],
        env=environment,
        cwd=here.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
