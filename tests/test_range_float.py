"""The range float against its closed form, its vectors and its bounds (methods 1.5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_fftcomp.codec.backend import BACKENDS, load_backend
from horovod_fftcomp.codec.quantizers import RANGE, RangeFloat, RangeGrid
from horovod_fftcomp.types import Coding
from tests.contracts import dequantize, quantize

VECTORS = [  # bits, mantissa, shift, base, P, eps, codes of (1, .5, -.5, .3), decode(.3), bytes
    (8, 3, 20, 890, 127, 1.9073486e-05, [127, 119, 246, 113], 0.3125, "7f77f671"),
    (8, 4, 19, 1906, 127, 4.3945312e-03, [127, 111, 238, 98], 0.296875, "7f6fee62"),
    (10, 5, 18, 3554, 511, 1.6212463e-05, [511, 479, 990, 453], 0.296875, "ff7de77d71"),
    (10, 6, 17, 7618, 511, 4.0283203e-03, [511, 447, 958, 396], 0.30078125, "fffde63b63"),
]
RANGES = [  # bits, mantissa, low, high, base, P, Q
    (8, 4, -0.25, 1.0, 1890, 143, 111),
    (8, 4, -1.0, 0.25, 1890, 111, 143),
    (8, 4, -0.3, 0.7, 1887, 136, 117),
    (8, 4, -1.0, 0.9, 1905, 125, 128),
    (8, 4, 0.0, 1.0, 1779, 254, 0),
    (8, 4, -1e-9, 1.0, 1779, 254, 0),
    (8, 4, -3e38, 3.4e38, 3952, 128, 125),
    (10, 5, -0.25, 1.0, 3522, 543, 479),
    (16, 10, -1.0, 1.0, 97282, 32767, 32767),
]


def coding_of(bits: int, grid: RangeGrid) -> Coding:
    return Coding(RANGE, bits, *grid, grid.positives + grid.negatives)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vector", VECTORS)
def test_published_vectors(vector, backend):
    bits, mantissa, shift, base, positives, eps, codes, decoded, packed = vector
    kernels = load_backend(backend)
    grid = RangeFloat(bits, mantissa).grid(-1.0, 1.0)
    assert grid == (shift, base, positives, positives)
    assert np.uint32(base << shift).view(np.float32) == pytest.approx(eps, rel=1e-6)
    values = np.array([1, 0.5, -0.5, 0.3], np.float32)
    coding = coding_of(bits, grid)
    quantized = quantize(kernels, values, coding)
    assert quantized.tolist() == codes
    assert dequantize(kernels, quantized, coding)[3] == np.float32(decoded)
    assert load_backend("reference").pack_bits(quantized, bits).tobytes().hex() == packed


@pytest.mark.parametrize(
    ("bits", "mantissa", "low", "high", "base", "positives", "negatives"), RANGES
)
def test_ranges_of_two_unequal_sides(bits, mantissa, low, high, base, positives, negatives):
    grid = RangeFloat(bits, mantissa).grid(low, high)
    assert (grid.base, grid.positives, grid.negatives) == (base, positives, negatives)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("peak", "base", "decoded"), [(0.7, 1896, 0.6875), (3.0, 1930, 3.0), (1e-3, 1746, 9.765625e-4)]
)
def test_symmetric_ranges(peak, base, decoded, backend):
    kernels = load_backend(backend)
    grid = RangeFloat(8, 4).grid(-peak, peak)
    assert grid.base == base
    coding = coding_of(8, grid)
    codes = quantize(kernels, np.array([peak], np.float32), coding)
    assert dequantize(kernels, codes, coding)[0] == np.float32(decoded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values(backend):
    kernels = load_backend(backend)
    grid = RangeFloat(8, 4).grid(-1.0, 1.0)
    eps = np.uint32(grid.base << grid.shift).view(np.float32)
    inputs = np.array([2, -2, -0.0, 1e-45, -1e-45, eps, 0.0043, 0.97 * eps], np.float32)
    coding = coding_of(8, grid)
    assert quantize(kernels, inputs, coding).tolist() == [127, 254, 0, 0, 0, 1, 1, 0]
    grid = RangeFloat(8, 4).grid(-1e-39, 1e-39)
    assert (grid.positives, grid.negatives) == (0, 0)
    assert quantize(kernels, inputs, coding_of(8, grid)).tolist() == [0] * 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", range(3, 17))
def test_error_bound_is_exact(bits, backend):
    kernels = load_backend(backend)
    quantizer = RangeFloat(bits)
    mantissa = max(0, bits - 4)
    peak = np.float32(1.7)
    grid = quantizer.grid(-float(peak), float(peak))
    coding = quantizer.coding(float(peak))
    assert coding == coding_of(bits, grid)
    eps = np.uint32(grid.base << grid.shift).view(np.float32)
    values = np.geomspace(1e-3 * float(eps), float(peak), 40_001).astype(np.float32)
    values = np.concatenate([values, -values])
    decoded = dequantize(kernels, quantize(kernels, values, coding), coding)
    error = np.abs(values.astype(np.float64) - decoded)
    coded = np.abs(values) >= eps
    assert (error[coded] <= np.abs(values[coded]) / (2 ** (mantissa + 1) + 1) * (1 + 1e-6)).all()
    assert (error[~coded] < eps).all()
    assert (decoded[: len(values) // 2] == -decoded[len(values) // 2 :]).all()
    assert (np.diff(decoded[: len(values) // 2]) >= 0).all()


@given(
    bits=st.integers(3, 12),
    mantissa=st.integers(0, 8),
    low=st.floats(-(2.0**127), 0, width=32),
    high=st.floats(0, 2.0**127, width=32),
)
def test_every_code_encodes_to_itself(bits, mantissa, low, high):
    kernels = load_backend("reference")
    grid = RangeFloat(bits, min(mantissa, bits + 4)).grid(low, high)
    coding = coding_of(bits, grid)
    assert coding.largest <= 2**bits - 2
    codes = np.arange(coding.largest + 1, dtype=np.uint32)
    values = dequantize(kernels, codes, coding)
    assert quantize(kernels, values, coding).tolist() == codes.tolist()


@given(st.integers(-60, 60))
def test_powers_of_two_leave_the_codes_alone(exponent):
    kernels = load_backend("cpu")
    values = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    scaled = values * np.float32(2.0**exponent)
    codes = [
        quantize(kernels, x, RangeFloat(8).coding(float(np.abs(x).max()))).tolist()
        for x in (values, scaled)
    ]
    assert codes[0] == codes[1]


@pytest.mark.parametrize("bits", [0, 1, 2, 17, 31, 40, 8.5, True, "8"])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match="bits must be a whole number from 3 to 16"):
        RangeFloat(bits)


def test_a_mantissa_wider_than_the_bits_is_refused():
    with pytest.raises(ValueError, match="mantissa"):
        RangeFloat(8, 13)
