"""Energies of gradients of any magnitude, for which float32 has no squares."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import get_scheme
from horovod_fftcomp.codec.transforms import energy_of
from horovod_fftcomp.schemes import Tensor
from tests.test_shared import alone

RECIPES = {
    "topk": {},
    "fft": {},
    "dct": {},
    "onebit": {},
    "dgc": {"density": 0.01},
    "random_k": {},
    "scalecom": {},
    "arctopk": {"bits": 32, "scope": "tensor"},
    "powersgd": {},
    "gtopk": {},
    "sketchsgd": {},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("power", [-80, 70, 90])
def test_energies_grow_as_the_square(recipe, power):
    scheme, tensor = get_scheme(recipe, **RECIPES[recipe]), Tensor("w", (80, 90))
    grad = np.random.default_rng(0).standard_normal(7200).astype(np.float32)
    plain, scaled = (
        alone(scheme, [tensor], [np.ldexp(grad, by)]).measured().energies["w"] for by in (0, power)
    )
    assert plain.wanted > 0
    assert scaled == pytest.approx(tuple(energy * 4.0**power for energy in plain))


@pytest.mark.parametrize("n", [0, 1, 7, 100_001])
def test_sums_of_squares_are_exact_in_float64(n):
    values = (1e30 * np.random.default_rng(n).standard_normal((2, n))).astype(np.float32)
    expected = np.square(values.astype(float)).sum()
    assert energy_of(values.reshape(-1)) == pytest.approx(expected, rel=1e-12)
    assert energy_of((values[0] + 1j * values[1]).astype(np.complex64)) == pytest.approx(expected)
    assert energy_of(None) == 0.0
