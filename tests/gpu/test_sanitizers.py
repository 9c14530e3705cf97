"""The kernels under sanitizers: no races between threads, no undefined behaviour."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_fftcomp.kernels import cuda
from tests.gpu.emulator import FORWARD, Emulator
from tests.gpu.race_cases import BARRIER, CASES, run_steps


def races(barrier: int) -> tuple[int, str]:
    """Return (exit status, report) of the cases without a barrier."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing: no emulated kernels")
    found = subprocess.run(
        ["g++", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=True
    )
    if not Path(found.stdout.strip()).is_absolute():
        pytest.skip("g++ came without ThreadSanitizer")
    environment = os.environ | {
        "LD_PRELOAD": found.stdout.strip(),
        "TSAN_OPTIONS": "exitcode=66 report_signal_unsafe=0",
        "NUMBA_DISABLE_JIT": "1",  # what it compiles is not the sanitizer's
        "OPENBLAS_NUM_THREADS": "1",
    }
    # Randomized addresses may collide with the sanitizer's own map; some containers insist on them.
    fixed = ["setarch", "-R"]
    if subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode:
        fixed = []
    ran = subprocess.run(
        [*fixed, sys.executable, "-m", "tests.gpu.race_cases", str(barrier)],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    if "unexpected memory mapping" in ran.stderr:
        pytest.skip("ThreadSanitizer cannot run where addresses are randomized")
    return ran.returncode, ran.stderr


@pytest.mark.slow
def test_there_are_no_races():
    status, report = races(-1)
    assert status == 0, report[-5000:]


@pytest.mark.slow
def test_a_barrier_that_is_left_out_is_reported():
    in_tally = cuda.source()[: cuda.source().index("flush_counts(found, tally.digits")]
    status, report = races(len(re.findall(re.escape(BARRIER), in_tally)) - 1)
    assert status == 66, report[-5000:]
    assert "data race" in report


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "options"), CASES)
def test_nothing_is_undefined(recipe, options):
    device = Emulator(FORWARD, 1, "-fsanitize=undefined", "-fno-sanitize-recover=all")
    run_steps(device, recipe, options)
