"""CPU kernels of count sketches: one row at a time, so that its columns stay in the cache."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.inlining import inlined
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.radix import sketch_bits

_GROUP = 1024  # elements whose estimates from all rows fit into the L1 cache
_LEAST_VALUES = 1 << 15  # per thread, at least


def sketch(values: Array, hashes: Array, columns: int, peak: int) -> Array:
    """Return the count sketch of finite ``values``, float32 ``[rows, columns]``."""
    bits = sketch_bits(values.size, peak)
    table = np.empty((len(hashes), columns), np.float32)

    def work(begin: int, end: int) -> None:
        sums = np.empty(columns, np.int64)
        for row in range(begin, end):
            sums.fill(0)
            _sketch(values, *hashes[row], np.uint64(columns), 2.0**bits, sums)
            with np.errstate(over="ignore"):
                np.multiply(sums, 2.0**-bits, out=table[row], casting="same_kind")

    least = 1 if values.size >= _LEAST_VALUES else len(hashes)
    threads.each(work, threads.ranges(len(hashes), least))
    return table


@kernel
def _sketch(values, factor, addend, columns, unit, row):
    state = addend
    for i in range(values.size):
        word = state >> np.uint64(32)
        state += factor
        column = ((word >> np.uint64(1)) * columns) >> np.uint64(31)
        steps = np.int64(np.rint(np.float64(values[i]) * unit))
        row[column] += -steps if word & np.uint64(1) else steps


def estimate(table: Array, hashes: Array, n: int) -> Array:
    """Return the estimates of ``n`` elements from a finite sketch, float32: medians over rows."""
    out = empty(n)

    def work(begin: int, end: int) -> None:
        _estimate(table, hashes, begin, out[begin:end])

    threads.each(work, threads.ranges(n, _LEAST_VALUES))
    return out


@kernel
def _estimate(table, hashes, first, out):
    rows, columns = table.shape[0], np.uint64(table.shape[1])
    found = np.empty((rows, _GROUP), np.float32)
    for begin in range(0, out.size, _GROUP):
        target = out[begin : begin + _GROUP]
        for r in range(rows):
            factor, row = hashes[r, 0], table[r]
            state = factor * np.uint64(first + begin) + hashes[r, 1]
            for i in range(target.size):
                word = state >> np.uint64(32)
                state += factor
                value = row[((word >> np.uint64(1)) * columns) >> np.uint64(31)]
                found[r, i] = -value if word & np.uint64(1) else value
        for phase in range(rows):  # odd-even transposition sort of the rows
            for r in range(phase % 2, rows - 1, 2):
                _order(found[r], found[r + 1])
        target[:] = found[rows // 2, : target.size]


@inlined
def _order(low, high):
    for i in range(low.size):
        a, b = low[i], high[i]
        low[i] = a if a < b else b
        high[i] = b if a < b else a
