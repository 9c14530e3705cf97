"""Encodings of the positions of sent coefficients, and the choice of the smallest one.

The choice depends on counts alone, never on values, so all ranks choose the same.
"""

from __future__ import annotations

import enum
from types import ModuleType
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.types import Array


class Layout(enum.IntEnum):
    """Encoding of the positions in the body of a payload."""

    RAW = 0  # no positions: all elements of the tensor, in float32
    ALL = 1  # no positions: every coefficient, or none
    BITMAP = 2  # one bit for each coefficient
    OFFSETS = 3  # fixed-width offsets in blocks, and the blocks' counts in unary


class Positions(NamedTuple):
    """Layout of ``k`` of ``n`` positions in ``nbytes`` bytes.

    ``low_bits``: the width of an offset, 0 in other layouts than OFFSETS.
    """

    layout: Layout
    n: int
    k: int
    low_bits: int
    nbytes: int


def cheapest(n: int, k: int) -> Positions:
    """Return the smallest encoding of ``k`` of ``n`` positions; of equal sizes the simplest."""
    if k in (0, n):
        return Positions(Layout.ALL, n, k, 0, 0)
    choices = [((n + 7) // 8, Layout.BITMAP, 0)]
    for low_bits in range(1, 17):
        nbytes = (unary_bits(n, k, low_bits) + 7) // 8 + (k * low_bits + 7) // 8
        choices.append((nbytes, Layout.OFFSETS, low_bits))
    nbytes, layout, low_bits = min(choices)
    return Positions(layout, n, k, low_bits, nbytes)


def unary_bits(n: int, k: int, low_bits: int) -> int:
    """Return the size in bits of the unary part of ``pack_offsets``."""
    return k + ((n + (1 << low_bits) - 1) >> low_bits)


def pack(bitmap: Array, how: Positions, kernels: ModuleType) -> Array:
    """Return the positions of the ones of ``bitmap``, encoded, uint8 ``[how.nbytes]``."""
    if how.layout is Layout.BITMAP:
        return kernels.pack_bitmap(bitmap, how.n)
    if how.layout is Layout.OFFSETS:
        return kernels.pack_offsets(bitmap, how.n, how.k, how.low_bits)
    return bitmap[:0].view(np.uint8)


def unpack(packed: Array, how: Positions, kernels: ModuleType) -> Array:
    """Return the bitmap that ``pack`` encoded; ValueError for bytes that it never writes."""
    if how.layout is Layout.BITMAP:
        return kernels.unpack_bitmap(packed, how.n, how.k)
    if how.layout is Layout.OFFSETS:
        return kernels.unpack_offsets(packed, how.n, how.k, how.low_bits)
    return first_ones(how.n, how.k)


def first_ones(n: int, k: int) -> Array:
    """Return the bitmap of ``n`` bits with ones at the first ``k``, uint64."""
    ones = np.zeros(-(-n // 64), np.uint64)
    ones[: k // 64] = ~np.uint64(0)
    if k % 64:
        ones[k // 64] = (1 << k % 64) - 1
    return ones
