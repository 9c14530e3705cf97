"""How a value is written: float32, bfloat16, or a float of 3 to 16 bits fitted to the range.

A quantizer turns finite float32 values into codes of ``bits`` bits and back. The scale of a
payload is the largest magnitude among its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.backends import Array

MIN_NORMAL_BITS = 0x00800000  # 2^-126 as float32
LARGEST_FINITE_BITS = 0x7F7FFFFF
LARGEST_BFLOAT16_BITS = 0x7F7F0000


def is_whole(value: object) -> bool:
    """Tell whether ``value`` is a built-in integer; 8.0, True and NumPy's do not repr as one."""
    return type(value) is int


class RangeGrid(NamedTuple):
    """The cells of a range float: a slice of the float32 bit patterns shifted right.

    Codes 1..positives are the positive cells from ``base`` up, the next ``negatives`` codes the
    negative ones; 0 is zero. ``base << shift`` is the smallest magnitude that has a code.
    """

    shift: int
    base: int
    positives: int
    negatives: int


@dataclass(frozen=True)
class RangeFloat:
    """Float of ``bits`` bits whose grid ends at the largest value (Wang et al., HPDC 2020).

    A float32's bit pattern is monotone in its magnitude, so ``pattern >> shift`` counts cells of
    a logarithmic grid with 2^mantissa cells to the octave; the 2^bits - 2 cells next to the
    largest magnitudes get codes. Relative error at most 1 / (2^(mantissa+1) + 1) from the
    smallest coded magnitude (eps) up; smaller values become 0, an error below eps.
    """

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
        """Return the cells for values in ``[low, high]`` (methods 1.5, rounded top cell)."""
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

    def encode(self, values: Array, kernels: ModuleType) -> tuple[Array, float, Array]:
        """Return (packed codes uint8, scale, the float32 values that the codes decode to)."""
        scale = _peak(values, kernels)
        grid = self.grid(-scale, scale)
        codes = kernels.quantize_range_float(values, grid)
        packed = kernels.pack_bits(codes, self.bits)
        return packed, scale, kernels.dequantize_range_float(codes, grid)

    def decode(self, packed: Array, count: int, scale: float, kernels: ModuleType) -> Array:
        """Return ``count`` float32 values; ValueError for a code that no value has."""
        grid = self.grid(-scale, scale)
        codes = kernels.unpack_bits(packed, count, self.bits)
        if codes.max(initial=0) > grid.positives + grid.negatives:
            raise ValueError("a code lies beyond the range that the scale allows")
        return kernels.dequantize_range_float(codes, grid)


def _cell(limit: float, shift: int) -> int | None:
    """Return the rounded cell of ``limit``; None if it is not a normal positive float32."""
    pattern = int(np.float32(limit).view(np.uint32)) if limit > 0 else 0
    if pattern < MIN_NORMAL_BITS:
        return None
    return min((pattern + (1 << (shift - 1))) >> shift, LARGEST_FINITE_BITS >> shift)


@dataclass(frozen=True)
class Float32:
    """Send values as they are."""

    bits = 32

    def encode(self, values: Array, kernels: ModuleType) -> tuple[Array, float, Array]:
        """Return (the values' bytes, scale, the values)."""
        return values.view(np.uint8), _peak(values, kernels), values

    def decode(self, packed: Array, count: int, scale: float, kernels: ModuleType) -> Array:
        """Return ``count`` float32 values; ValueError for one beyond the scale."""
        values = packed[: 4 * count].view(np.float32)
        return _check_peak(values, scale, kernels)


@dataclass(frozen=True)
class BFloat16:
    """Send the upper half of a float32, rounded to nearest even; saturates below infinity."""

    bits = 16

    def encode(self, values: Array, kernels: ModuleType) -> tuple[Array, float, Array]:
        """Return (two bytes a value, scale, the float32 values that they decode to)."""
        pattern = values.view(np.uint32)
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) & np.uint32(0xFFFF0000)
        sign, magnitude = rounded & np.uint32(0x80000000), rounded & np.uint32(0x7FFFFFFF)
        sent = (sign | np.minimum(magnitude, np.uint32(LARGEST_BFLOAT16_BITS))).view(np.float32)
        upper = (sent.view(np.uint32) >> 16).astype(np.uint16)
        return upper.view(np.uint8), _peak(sent, kernels), sent

    def decode(self, packed: Array, count: int, scale: float, kernels: ModuleType) -> Array:
        """Return ``count`` float32 values; ValueError for one beyond the scale."""
        upper = packed[: 2 * count].view(np.uint16).astype(np.uint32)
        return _check_peak((upper << 16).view(np.float32), scale, kernels)


def _peak(values: Array, kernels: ModuleType) -> float:
    return float(np.uint32(kernels.peak_bits(values)).view(np.float32))


def _check_peak(values: Array, scale: float, kernels: ModuleType) -> Array:
    if kernels.peak_bits(values) > int(np.float32(scale).view(np.uint32)):
        raise ValueError("a value lies beyond the scale of the header")
    return values


Quantizer = RangeFloat | Float32 | BFloat16
