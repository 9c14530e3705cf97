"""Sums in a fixed order, such that a GPU can add in the same order."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.radix import GROUP, LANES


def sums_of_rows(values: Array, row_of: Array, n_rows: int) -> Array:
    """Return the sum of the ``values`` of each row, float64 ``[n_rows]``.

    ``row_of``: the row of each value, ascending. Value i of a row is added to partial sum i mod
    64, then the partial sums are added in order. A GPU can add in the same order.
    """
    counts = np.bincount(row_of, minlength=n_rows)
    if counts.max(initial=0) <= LANES:
        return np.bincount(row_of, values, n_rows)
    place = np.arange(values.size) - np.repeat(np.cumsum(counts) - counts, counts)
    partial = np.bincount(row_of * LANES + place % LANES, values, n_rows * LANES)
    return np.add.accumulate(partial.reshape(n_rows, LANES), 1)[:, -1]


def ordered_sum(values: Array) -> float:
    """Return the sum of ``values`` in the order of ``sums_of_rows``."""
    return float(sums_of_rows(values, np.zeros(values.size, np.int64), 1)[0])


def rows_of(values: Array, length: int) -> Array:
    """Return ``values`` in rows of this length, with zeros at the end."""
    padded = np.zeros(-(-values.size // length) * length, values.dtype)
    padded[: values.size] = values
    return padded.reshape(-1, length)


def lane_sums(values: Array, length: int) -> Array:
    """Return the sums of consecutive pieces of ``length`` float64 values, in a fixed order.

    Value i of a piece is added to partial sum i mod 64; then the upper half of the partial sums is
    added to the lower half until one remains. ``length`` is a multiple of 64; the last piece may be
    shorter.
    """
    rows = rows_of(values, length)
    lanes = np.zeros((len(rows), LANES))
    for row in rows.reshape(len(rows), length // LANES, LANES).swapaxes(0, 1):
        lanes += row
    width = LANES // 2
    while width:
        lanes[:, :width] += lanes[:, width : 2 * width]
        width //= 2
    return lanes[:, 0].copy()


def peak_bits(values: Array) -> int:
    """Return the largest bit pattern of any magnitude; 0x7F800000 or more with Inf or NaN."""
    return int((values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(initial=0))


def moments(values: Array) -> tuple[int, Array, Array]:
    """Return (bits of the largest magnitude, sums and sums of squares of groups, float64)."""
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return peak_bits(values), lane_sums(wide, GROUP), lane_sums(wide * wide, GROUP)
