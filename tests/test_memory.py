"""The peak of memory that exchanges take, residuals included, as docs/methods.md states it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_fftcomp import list_compressors

# Multiples of the gradient's float32 size, in exchanges of two ranks' payloads.
STEPS = """
import random, re, sys
import numpy as np
from horovod_fftcomp import get_scheme
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.schemes import Round, Tensor

N = 8_000_000

def memory(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def step(engine, n):
    grad = np.random.default_rng(0).standard_normal(n, np.float32)
    made = engine.resume(0, [grad])
    while isinstance(made, Round):
        gathers = made.collective == "allgather"
        output = np.concatenate([made.data] * 2) if gathers else made.data
        made = engine.resume(0, output)
    engine.sums(0)
    engine.settle()

def engine(n, recipe):
    bucket = Bucket((Tensor("w", (n // 8, 8)),), always(get_scheme(recipe)))
    return Engine([bucket], 0, 2)
"""

# Some kernels serve large tensors alone, and compilers take memory too.
COMPILE = """
step(engine(N, sys.argv[1]), N)
"""

MEASURE = """
recipe = sys.argv[1]
warm = engine(1 << 19, recipe)
for _ in range(2):
    step(warm, 1 << 19)
measured = engine(N, recipe)
measured.step = 1  # not a step that measures errors
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
for _ in range(3):
    step(measured, N)
grad = 4 * N
print((memory("VmHWM") - before - grad) / grad)
"""


def _stated() -> dict[str, float]:
    """Return the figures of the table in docs/methods.md."""
    text = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
    section = text.split("## Memory")[1]
    return {
        name: float(value) for name, value in re.findall(r"\| `(\w+)` \|.*\| ([\d.]+) \|", section)
    }


def _run(script: str, recipe: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", STEPS + script, recipe],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # freed arrays go back at once
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout


def peak(recipe: str) -> float:
    """Return the peak of memory of an exchange, in multiples of the gradient's float32 size."""
    _run(COMPILE, recipe)
    return float(_run(MEASURE, recipe))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list_compressors())
def test_peak_of_an_exchange_is_as_stated(recipe):
    stated = _stated()
    assert recipe in stated, "no row in docs/methods.md, Memory; run: make recipe"
    measured = peak(recipe)
    mend = f"docs/methods.md, Memory, says {stated[recipe]:.2f}: write {measured:.2f} there"
    assert stated[recipe] - 1.0 <= measured <= stated[recipe] + 0.25, mend
