"""The range float against its formulas, its vectors and its bounds (docs/wire-format.md)."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from horovod_fftcomp import get_codec, wire
from horovod_fftcomp.codec.quantizers import ZERO_CODE, RangeFloat, float_of, pattern_of
from tests.backends import BACKENDS, load_backend
from tests.contracts import dequantize, quantize

VECTORS = [  # bits, base, P, eps, codes of (1, .5, -.5, .3), decode(.3), bytes
    (8, 1906 << 19, 127, 4.3945312e-03, [127, 111, 238, 98], 0.296875, "7f6fee62"),
    (10, 7618 << 17, 511, 4.0283203e-03, [511, 447, 958, 396], 0.30078125, "fffde63b63"),
]
PATTERNS = st.integers(0, 0x7F7FFFFF)


def wide(bits: int, peak: float):
    """Return the coding of a grid that is not fitted: about 8 octaves and a code for 0."""
    quantizer = RangeFloat(bits)
    return quantizer.coding(peak, quantizer.grid(0, pattern_of(peak), False))


def fitted(bits: int, least: float, peak: float):
    quantizer = RangeFloat(bits)
    return quantizer.coding(peak, quantizer.grid(pattern_of(least), pattern_of(peak), False))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vector", VECTORS)
def test_published_vectors(vector, backend):
    bits, base, positives, eps, codes, decoded, packed = vector
    kernels, coding = load_backend(backend), wide(bits, 1.0)
    assert (coding.base, coding.levels, coding.zero) == (base, positives, 1)
    assert float_of(coding.base) == pytest.approx(eps, rel=1e-6)
    values = np.array([1, 0.5, -0.5, 0.3], np.float32)
    quantized = quantize(kernels, values, coding)
    assert quantized.tolist() == codes
    assert dequantize(kernels, quantized, coding)[3] == np.float32(decoded)
    assert load_backend("reference").pack_bits(quantized, bits).tobytes().hex() == packed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("peak", "base", "decoded"), [(0.7, 1896, 0.6875), (3.0, 1930, 3.0), (1e-3, 1746, 9.765625e-4)]
)
def test_the_largest_is_rounded_where_the_grid_is_wide(peak, base, decoded, backend):
    kernels, coding = load_backend(backend), wide(8, peak)
    assert coding.base == base << 19
    codes = quantize(kernels, np.array([peak], np.float32), coding)
    assert dequantize(kernels, codes, coding)[0] == np.float32(decoded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values(backend):
    kernels, coding = load_backend(backend), wide(8, 1.0)
    eps = float_of(coding.base)
    inputs = np.array([2, -2, -0.0, 1e-45, -1e-45, eps, 0.0043, 0.97 * eps], np.float32)
    assert quantize(kernels, inputs, coding).tolist() == [127, 254, 0, 0, 0, 1, 1, 0]
    for coding in (wide(8, 1e-39), RangeFloat(8).coding(1e-39, 5)):
        assert (coding.levels, coding.largest) == (0, 0)
        assert quantize(kernels, inputs, coding).tolist() == [0] * 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", range(2, 17))
def test_error_bound_of_the_wide_grid_is_exact(bits, backend):
    kernels, peak = load_backend(backend), np.float32(1.7)
    mantissa, coding = max(0, bits - 4), wide(bits, float(peak))
    eps = np.float32(float_of(coding.base))
    values = np.geomspace(1e-3 * float(eps), float(min(peak, 2 * eps)), 20_001)
    values = np.concatenate([values, np.geomspace(eps, peak, 20_001)]).astype(np.float32)
    values = np.concatenate([values, -values])
    decoded = dequantize(kernels, quantize(kernels, values, coding), coding)
    error = np.abs(values.astype(np.float64) - decoded)
    coded = np.abs(values) >= eps
    assert (error[coded] <= np.abs(values[coded]) / (2 ** (mantissa + 1) + 1) * (1 + 1e-6)).all()
    assert (error[~coded] < eps).all()
    assert (decoded[: len(values) // 2] == -decoded[len(values) // 2 :]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", range(2, 17))
@pytest.mark.parametrize("octaves", [0, 0.3, 1.2, 2.9])
def test_a_fitted_grid_has_a_code_for_all_from_the_smallest_to_the_largest(bits, octaves, backend):
    """The error is at most half a step, the largest arrives exactly, and nothing becomes 0."""
    kernels, peak = load_backend(backend), np.float32(0.7)
    least = np.float32(float(peak) / 2**octaves)
    coding = fitted(bits, float(least), float(peak))
    assert coding.zero == 0
    values = np.clip(np.geomspace(least, peak, 20_001).astype(np.float32), least, peak)
    decoded = dequantize(kernels, quantize(kernels, values, coding), coding)
    # From a pattern to one d * 2^23 further a value grows by d of itself, at most.
    apart = (pattern_of(peak) - pattern_of(least)) / 2**23
    bound = apart / (2 ** (bits - 1) - 0.5) / 2 + 2.0**-22
    assert (np.abs(values.astype(np.float64) - decoded) <= bound * values).all()
    assert decoded[-1] == peak
    assert (np.diff(decoded) >= 0).all()
    assert np.unique(decoded).size <= 2 ** (bits - 1)
    negated = dequantize(kernels, quantize(kernels, -values, coding), coding)
    assert (negated == -decoded).all()


def by_the_book(bits: int, key: int, peak: int, is_complex: bool) -> tuple[int, int]:
    """Return (distance, zero) as docs/wire-format.md has them."""
    low, zero = key, int(is_complex)
    if is_complex:
        exponent = (peak >> 23) - 127
        exponent = 0 if -40 <= exponent <= 59 else max(-126, min(126, exponent))
        low = key // 2 + (127 + 2 * exponent - bits) * 2**22
    n = 2 ** (bits - 1) - zero
    distance = max(1, math.ceil(Fraction(peak - low) / (n - Fraction(1, 2))))
    widest = 2 ** min(23, 27 - bits)
    most = Fraction(4, 5) * widest if is_complex else 2**24 if bits < 4 else max(widest, 2**21)
    if key < 0x00800000 or distance > most:
        return widest, 1
    return distance, zero


def values_by_the_book(bits: int, peak: int, distance: int, zero: int) -> list[float]:
    """Return the value of each code, as docs/wire-format.md has them."""
    if peak < 0x00800000:
        return [0.0]
    top = peak
    if zero and distance == 2 ** min(23, 27 - bits):
        top = min((peak + distance // 2) // distance, 0x7F7FFFFF // distance) * distance
    count = min(2 ** (bits - 1) - zero, (top - 0x00800000) // distance + 1)
    base = top - (count - 1) * distance
    sizes = [struct.unpack("<f", struct.pack("<I", base + i * distance))[0] for i in range(count)]
    return [0.0] * zero + sizes + [-size for size in sizes]


@given(bits=st.integers(2, 9), key=PATTERNS, peak=PATTERNS, is_complex=st.booleans())
@example(bits=4, key=0x00800000, peak=0x04400001, is_complex=False)  # the least that is too coarse
@example(bits=4, key=0x00800000, peak=0x04400000, is_complex=False)  # and what is not
def test_grids_and_codes_are_those_of_the_formula(bits, key, peak, is_complex):
    quantizer = RangeFloat(bits)
    grid = quantizer.grid(key, peak, is_complex)
    distance, zero = by_the_book(bits, key, peak, is_complex)
    assert grid == distance + zero * ZERO_CODE
    coding = quantizer.coding(float_of(peak), grid)
    wanted = np.array(values_by_the_book(bits, peak, distance, zero), np.float32)
    assert coding.largest == wanted.size - 1
    codes = np.arange(wanted.size, dtype=np.uint32)
    for backend in BACKENDS:
        kernels = load_backend(backend)
        values = dequantize(kernels, codes, coding)
        assert values.tobytes() == wanted.tobytes()
        assert quantize(kernels, values, coding).tolist() == codes.tolist()


@given(
    bits=st.integers(2, 16),
    key=PATTERNS,
    peak=PATTERNS,
    is_complex=st.booleans(),
    seed=st.integers(0, 99),
)
def test_backends_encode_alike_and_nothing_grows(bits, key, peak, is_complex, seed):
    """The error of a value that is sent is at most the value: what feedback needs."""
    coding = RangeFloat(bits).coding(float_of(peak), RangeFloat(bits).grid(key, peak, is_complex))
    low = 0 if coding.zero else min(key, peak)
    sizes = np.random.default_rng(seed).integers(low, peak, 200, np.int64, endpoint=True)
    steps = [coding.base + i * coding.step + coding.step // 2 for i in range(-1, 2)]
    sizes = np.concatenate([sizes, np.clip([s + i for s in steps for i in (-1, 0, 1)], low, peak)])
    values = sizes.astype(np.uint32).view(np.float32) * np.where(np.arange(sizes.size) % 2, 1, -1)
    values = values.astype(np.float32)
    codes = [quantize(load_backend(name), values, coding).tolist() for name in BACKENDS]
    assert codes[0] == codes[1]
    sent = [dequantize(load_backend(name), np.uint32(codes[0]), coding) for name in BACKENDS]
    assert sent[0].tobytes() == sent[1].tobytes()
    wanted = values.astype(np.float64)
    assert (np.abs(wanted - sent[0]) <= np.abs(wanted) * (1 + 1e-6)).all()


@given(st.integers(-60, 60))
def test_powers_of_two_leave_the_codes_alone(exponent):
    kernels = load_backend("cpu")
    values = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    values = values[np.abs(values) > 0.5]
    codes = [
        quantize(kernels, x, fitted(6, np.abs(x).min(), float(np.abs(x).max()))).tolist()
        for x in (values, values * np.float32(2.0**exponent))
    ]
    assert codes[0] == codes[1]


def error_of_sent(bits: int) -> float:
    x = np.random.default_rng(0).standard_normal(65536).astype(np.float32)
    codec = get_codec("topk", density=0.038, bits=bits)
    sent = codec.decode(codec.encode(x))
    chosen = np.argsort(-np.abs(x))[: int(0.038 * x.size)]
    return float(np.linalg.norm((x - sent)[chosen]) / np.linalg.norm(x[chosen]))


def test_four_bits_are_enough_for_what_top_k_sends():
    """0.194 with a grid of 7 octaves, where the values span 1.2."""
    assert error_of_sent(4) < 0.04
    assert error_of_sent(3) < 2.6 * error_of_sent(4)
    assert error_of_sent(2) < 2.6 * error_of_sent(3) + 0.05


def test_nothing_is_lost_beside_an_outlier():
    x = np.random.default_rng(0).standard_normal(65536).astype(np.float32)
    x[7] = 1000 * np.abs(x).max()
    codec = get_codec("topk", density=0.01, bits=8)
    sent = codec.decode(codec.encode(x))
    assert np.count_nonzero(sent) == codec.plan(x.shape).k == 655
    assert sent[7] == x[7]


def test_few_values_that_are_not_zero_are_sent_as_in_a_wide_grid():
    x = np.zeros(65536, np.float32)
    x[:40] = np.linspace(-1, 1, 40)
    codec = get_codec("topk", density=0.01, bits=8)
    payload = codec.encode(x)
    assert wire.read_header(payload).grid == ZERO_CODE + (1 << 19)
    np.testing.assert_allclose(codec.decode(payload), x, rtol=1 / 33, atol=0.005)


@pytest.mark.parametrize("bits", [0, 1, 17, 31, 40, 8.5, True, "8"])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match="bits"):
        RangeFloat(bits)
