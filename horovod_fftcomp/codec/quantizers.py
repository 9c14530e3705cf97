"""Quantizers: float32, bfloat16, or a float of 3 to 16 bits fitted to the range of the values.

A quantizer defines the codes, of ``bits`` bits, of finite float32 values; kernels compute them.
The scale of a payload is the largest magnitude of any component, sent or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.types import Coding

MIN_NORMAL_BITS = 0x00800000  # 2^-126 as float32
LARGEST_FINITE_BITS = 0x7F7FFFFF
LARGEST_BFLOAT16_BITS = 0x7F7F0000


def is_whole(value: object) -> bool:
    """Return whether ``value`` is a built-in int: 8.0, True and NumPy's have another ``repr``."""
    return type(value) is int


RANGE, FLOAT32, BFLOAT16, STEPS = range(4)


class RangeGrid(NamedTuple):
    """Grid of a ``RangeFloat``: cells are float32 bit patterns shifted right by ``shift``.

    Codes 1..positives are the positive cells from ``base`` up, the next ``negatives`` codes the
    negative ones; code 0 is zero. ``base << shift`` is the smallest magnitude that has a code.
    """

    shift: int
    base: int
    positives: int
    negatives: int


@dataclass(frozen=True)
class RangeFloat:
    """Float of ``bits`` bits whose grid ends at the largest value (Wang et al., HPDC 2020).

    A float32's bit pattern is monotone in its magnitude, so ``pattern >> shift`` numbers the cells
    of a logarithmic grid with 2^mantissa cells in an octave; the 2^bits - 2 cells next to the
    largest magnitudes have codes. The relative error is at most 1 / (2^(mantissa+1) + 1) from the
    smallest coded magnitude (eps) up; smaller values become 0, an error below eps.
    """

    spec_name = "RangeFloat"
    bits: int = 8
    mantissa: int | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or self.bits not in range(3, 17):
            raise ValueError(
                f"bits must be a whole number from 3 to 16, or 32 for plain float32 where a "
                f"recipe offers it; got {self.bits!r}"
            )
        if self.mantissa is not None and not (
            is_whole(self.mantissa) and self.mantissa in range(min(23, self.bits + 5))
        ):
            raise ValueError(
                f"mantissa must be a whole number from 0 to bits + 4 (22 at most), "
                f"got {self.mantissa!r} with bits={self.bits}"
            )

    def grid(self, low: float, high: float) -> RangeGrid:
        """Return the grid for values in ``[low, high]``; the top cell is rounded to nearest."""
        mantissa = max(0, self.bits - 4) if self.mantissa is None else self.mantissa
        shift = 23 - mantissa
        top, bottom = _cell(high, shift), _cell(-low, shift)
        codes = 1 << self.bits
        if top is not None and bottom is not None:
            base = -(-(top + bottom + 4 - codes) // 2)
            bottom = None if bottom < base else bottom
            top = None if top < base else top
        if top is None or bottom is None:
            one_sided = top if top is not None else bottom
            if one_sided is None:
                return RangeGrid(shift, 1 << mantissa, 0, 0)
            base = one_sided - codes + 3
        base = max(base, 1 << mantissa)  # never decode to a denormal
        return RangeGrid(
            shift,
            base,
            0 if top is None else top - base + 1,
            0 if bottom is None else bottom - base + 1,
        )

    def coding(self, scale: float) -> Coding:
        """Return the encoding of values whose largest magnitude is ``scale``."""
        grid = self.grid(-scale, scale)
        return Coding(RANGE, self.bits, *grid, grid.positives + grid.negatives)


def _cell(limit: float, shift: int) -> int | None:
    """Return the cell of ``limit``, rounded; None unless it is a positive normal float32."""
    pattern = int(np.float32(limit).view(np.uint32)) if limit > 0 else 0
    if pattern < MIN_NORMAL_BITS:
        return None
    return min((pattern + (1 << (shift - 1))) >> shift, LARGEST_FINITE_BITS >> shift)


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


def steps_coding(step: float, most: int, largest: int) -> Coding:
    """Return the encoding of values as multiples of ``step``, 1 to ``most`` of either sign.

    Code 2 (l - 1) + s is l steps, negative if s is 1; l = floor(abs(value) / step), clipped to
    [1, most]. ``largest``: the most steps in a valid payload.
    """
    bits = 1 + (most - 1).bit_length()
    return Coding(STEPS, bits, 0, pattern_of(step), most, most, 2 * largest - 1)


def pattern_of(value: float | np.floating) -> int:
    """Return the float32 bit pattern of a number; patterns of numbers >= 0 sort as the numbers."""
    return int(np.float32(value).view(np.uint32))


def float_of(pattern: int | np.integer) -> float:
    """Return the number with this float32 bit pattern."""
    return float(np.uint32(pattern).view(np.float32))


Quantizer = RangeFloat | Float32 | BFloat16
