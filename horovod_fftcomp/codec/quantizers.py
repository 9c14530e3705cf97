"""Quantizers: float32, bfloat16, or a float of 2 to 16 bits fitted to the range of the values.

A quantizer defines the codes, of ``bits`` bits, of finite float32 values; kernels compute them.
The scale of a payload is the largest magnitude of any component, sent or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.types import Array, Coding

MIN_NORMAL_BITS = 0x00800000  # 2^-126 as float32
LARGEST_FINITE_BITS = 0x7F7FFFFF
LARGEST_BFLOAT16_BITS = 0x7F7F0000
ZERO_CODE = 1 << 31  # bit of a header's grid: code 0 is zero


def is_whole(value: object) -> bool:
    """Return whether ``value`` is a built-in int: 8.0, True and NumPy's have another ``repr``."""
    return type(value) is int


RANGE, FLOAT32, BFLOAT16, STEPS = range(4)


@dataclass(frozen=True)
class RangeFloat:
    """Float of ``bits`` bits whose grid is fitted to the values sent (Wang et al., HPDC 2020).

    A float32's bit pattern is monotone in its magnitude. Magnitudes with a code are equally far
    apart as patterns, from the largest down; see ``fitted_grid`` and ``range_coding``.
    """

    spec_name = "RangeFloat"
    bits: int = 8

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or self.bits not in range(2, 17):
            raise ValueError(
                f"bits must be a whole number from 2 to 16, or 32 for plain float32 where a "
                f"recipe offers it; got {self.bits!r}"
            )

    def grid(self, key: int, peak: int, is_complex: bool) -> int:
        """Return the header's field for values ranked ``key`` or higher; see ``fitted_grid``."""
        return fitted_grid(self.bits, key, peak, is_complex)

    def coding(self, scale: float, grid: int = 0) -> Coding:
        """Return the encoding of values whose largest magnitude is ``scale``."""
        return Coding(RANGE, self.bits, *range_coding(self.bits, pattern_of(scale), grid))


def key_exponent(peak: int) -> int:
    """Return the exponent e such that complex coefficients are scaled by 2^-e before squaring.

    ``peak``: float32 bits of the largest |component|. Keys are squares: without the scaling they
    would overflow, or underflow for coefficients that still matter.
    """
    exponent = (peak >> 23) - 127
    return 0 if -40 <= exponent < 60 else min(max(exponent, -126), 126)


# Kernels compile the next two functions.


def fitted_grid(bits: int, key: int, peak: int, is_complex: bool) -> int:
    """Return the grid between the smallest and the largest value sent, as headers have it.

    It is the distance between neighbouring magnitudes, in float32 patterns, plus ``ZERO_CODE`` if
    code 0 is zero. ``key``: the smallest selection key that is sent, or one below; 0 if unknown.
    ``peak``: float32 bits of the largest magnitude. Components of complex coefficients may be
    smaller than any of their magnitudes: their grid begins bits / 2 octaves below the smallest.
    Where it would be too coarse, it spans about 8 octaves and smaller values become zero.
    """
    zero = 1 if is_complex else 0
    low = (key >> 1) + (127 + 2 * key_exponent(peak) - bits) * (1 << 22) if is_complex else key
    n = (1 << (bits - 1)) - zero
    step = max(1, -((2 * (low - peak)) // (2 * n - 1)))  # the lowest cell ends at ``low``
    widest = 1 << min(23, 27 - bits)
    coarsest = 4 * widest // 5 if is_complex else 1 << 24 if bits < 4 else max(widest, 1 << 21)
    if key >= MIN_NORMAL_BITS and step <= coarsest:
        return step + zero * ZERO_CODE
    return widest + ZERO_CODE


def range_coding(bits: int, peak: int, grid: int) -> tuple[int, int, int, int, int]:
    """Return (step, base, levels, zero, largest) of a ``Coding`` from the header's fields.

    The largest magnitude has a code of its own; where the grid is not fitted it is rounded to a
    multiple of ``step``. No code stands for a denormal number.
    """
    zero, step = grid // ZERO_CODE, max(1, grid % ZERO_CODE)
    if peak < MIN_NORMAL_BITS:
        return step, MIN_NORMAL_BITS + step, 0, 1, 0
    top = peak
    if zero and step == 1 << min(23, 27 - bits):
        top = min((peak + step // 2) // step, LARGEST_FINITE_BITS // step) * step
    levels = min((1 << (bits - 1)) - zero, (top - MIN_NORMAL_BITS) // step + 1)
    return step, top - (levels - 1) * step, levels, zero, 2 * levels + zero - 1


@dataclass(frozen=True)
class Float32:
    """Send values as float32, unchanged."""

    spec_name = "Float32"
    bits = 32

    def coding(self, scale: float) -> Coding:
        """Return the encoding of values whose largest magnitude is ``scale``."""
        return Coding(FLOAT32, self.bits, 0, 0, 0, 0, pattern_of(scale))


@dataclass(frozen=True)
class BFloat16:
    """Send values as bfloat16, rounded to nearest even; the largest finite value is the limit."""

    spec_name = "BFloat16"
    bits = 16

    def coding(self, scale: float) -> Coding:
        """Return the encoding of values whose largest magnitude is ``scale``."""
        rounded = (pattern_of(scale) + 0x8000) & 0x7FFF0000
        return Coding(BFLOAT16, self.bits, 0, 0, 0, 0, min(rounded, LARGEST_BFLOAT16_BITS))


def encode_range(values: Array, coding: Coding) -> Array:
    """Return the code of each float32 value by a ``Coding`` of range floats, uint32.

    The fields of ``coding`` may be arrays that broadcast.
    """
    patterns = values.view(np.uint32)
    above = (patterns & np.uint32(0x7FFFFFFF)).astype(np.int64) - coding.base + coding.step // 2
    cells = np.clip(above // coding.step, -coding.zero, coding.levels - 1)
    codes = cells + coding.zero + np.where(patterns >> 31, coding.levels, 0)
    return np.where(cells < 0, 0, codes).astype(np.uint32)


def decode_range(codes: Array, coding: Coding) -> Array:
    """Return the float32 value of each code of ``encode_range``."""
    codes = codes.astype(np.int64)
    negative = codes >= coding.levels + coding.zero
    levels = np.where(negative, codes - coding.levels, codes) - coding.zero
    patterns = coding.base + levels * coding.step | negative.astype(np.int64) << 31
    return np.where(levels < 0, 0, patterns).astype(np.uint32).view(np.float32)


def steps_coding(step: float, most: int, largest: int) -> Coding:
    """Return the encoding of values as multiples of ``step``, 1 to ``most`` of either sign.

    Code 2 (l - 1) + s is l steps, negative if s is 1; l = floor(abs(value) / step), clipped to
    [1, most]. ``largest``: the most steps in a valid payload.
    """
    bits = 1 + (most - 1).bit_length()
    return Coding(STEPS, bits, 0, pattern_of(step), most, 0, 2 * largest - 1)


def pattern_of(value: float | np.floating) -> int:
    """Return the float32 bit pattern of a number; patterns of numbers >= 0 sort as the numbers."""
    return int(np.float32(value).view(np.uint32))


def float_of(pattern: int | np.integer) -> float:
    """Return the number with this float32 bit pattern."""
    return float(np.uint32(pattern).view(np.float32))


Quantizer = RangeFloat | Float32 | BFloat16
