"""Uncompressed steps between compressed ones on an emulated GPU; see tests/test_dense_steps.py."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.emulator import Emulator
from tests.gpu.steps import assert_same_step, make_engines, random_grads
from tests.loops import each


@each("recipe", ["topk", "fft", "scalecom", "powersgd", "hard_threshold"])
@pytest.mark.parametrize("dense_by", ["bf16", "none", "qsgd"])
def test_dense_steps_of_an_emulated_gpu_are_the_cpus(recipe, dense_by):
    options = {
        "dense_every": 2,
        "dense_by": dense_by,
        **({"threshold": 0.5} if recipe == "hard_threshold" else {}),
    }
    cpu, gpu = (make_engines(on, recipe, **options) for on in (None, Emulator()))
    rng = np.random.default_rng(2)
    tolerance = 1e-5 if recipe in ("fft", "powersgd") else 0.0
    for step in range(5):
        grads = random_grads(rng)
        if step == 3:  # a dense step
            grads[1][0][0][7] = np.nan
        assert_same_step(cpu, gpu, grads, tolerance)
    for engine in (*cpu, *gpu):
        engine.read_device()
        assert engine.costs.skipped_steps == 1
