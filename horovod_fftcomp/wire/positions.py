"""How the positions of chosen coefficients travel: which layout is cheapest, and its bytes.

A layout is chosen from counts alone, never from values, so all ranks choose alike.
"""

from __future__ import annotations

import enum
from types import ModuleType
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import rans

_WORTH_CODING_PERCENT = 95


class Layout(enum.IntEnum):
    """How the body of a payload tells which coefficients follow."""

    RAW = 0  # no coefficients: the elements themselves, float32
    ALL = 1  # every coefficient or none, no positions
    BITMAP = 2  # one bit for each coefficient
    OFFSETS = 3  # fixed-width offsets in blocks whose counts are written in unary
    ENTROPY = 4  # a bitmap's bytes in an entropy code of bounded size


class Positions(NamedTuple):
    """``k`` of ``n`` positions in ``nbytes`` bytes; ``low_bits``: of an offset."""

    layout: Layout
    n: int
    k: int
    low_bits: int
    nbytes: int


def cheapest(n: int, k: int) -> Positions:
    """Return how ``k`` of ``n`` positions travel in the fewest bytes; ties: the simpler.

    The entropy code takes more work and has to save enough to be worth it.
    """
    if k in (0, n):
        return Positions(Layout.ALL, n, k, 0, 0)
    choices = [((n + 7) // 8, Layout.BITMAP, 0)]
    for low_bits in range(1, 17):
        nbytes = (unary_bits(n, k, low_bits) + 7) // 8 + (k * low_bits + 7) // 8
        choices.append((nbytes, Layout.OFFSETS, low_bits))
    nbytes, layout, low_bits = min(choices)
    coded = rans.coded_nbytes(n, k) if rans.can_code(n, k) else nbytes
    if 100 * coded < _WORTH_CODING_PERCENT * nbytes:
        return Positions(Layout.ENTROPY, n, k, 0, coded)
    return Positions(layout, n, k, low_bits, nbytes)


def unary_bits(n: int, k: int, low_bits: int) -> int:
    """Return the length in bits of the unary part of ``pack_offsets``."""
    return k + ((n + (1 << low_bits) - 1) >> low_bits)


def pack(bitmap: Array, how: Positions, kernels: ModuleType) -> Array:
    """Return the positions at which ``bitmap`` has ones, uint8 ``[how.nbytes]``."""
    if how.layout is Layout.BITMAP:
        return kernels.pack_bitmap(bitmap, how.n)
    if how.layout is Layout.ENTROPY:
        return kernels.pack_entropy(bitmap, how.n, how.k)
    if how.layout is Layout.OFFSETS:
        return kernels.pack_offsets(bitmap, how.n, how.k, how.low_bits)
    return bitmap[:0].view(np.uint8)


def unpack(packed: Array, how: Positions, kernels: ModuleType) -> Array:
    """Return the bitmap that ``pack`` packed; ValueError for bytes that it cannot have made."""
    if how.layout is Layout.BITMAP:
        return kernels.unpack_bitmap(packed, how.n, how.k)
    if how.layout is Layout.ENTROPY:
        return kernels.unpack_entropy(packed, how.n, how.k)
    if how.layout is Layout.OFFSETS:
        return kernels.unpack_offsets(packed, how.n, how.k, how.low_bits)
    return first_ones(how.n, how.k)


def first_ones(n: int, k: int) -> Array:
    """Return the bitmap of ``n`` places that has ones at the first ``k``."""
    ones = np.zeros(-(-n // 64), np.uint64)
    ones[: k // 64] = ~np.uint64(0)
    if k % 64:
        ones[k // 64] = (1 << k % 64) - 1
    return ones
