"""Count sketches on a CPU: one row at a time, so that its table stays in the caches."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp import threads
from horovod_fftcomp.backends import Array
from horovod_fftcomp.backends.cpu.jit import inlined, kernel
from horovod_fftcomp.backends.cpu.memory import empty

_GROUP = 1024  # elements whose estimates of all rows lie in the L1 cache
_LEAST_VALUES = 1 << 15  # for a thread of its own


def sketch(values: Array, hashes: Array, columns: int) -> Array:
    """See ``reference.sketch``."""
    table = np.zeros((len(hashes), columns), np.float32)

    def work(begin: int, end: int) -> None:
        for row in range(begin, end):
            _sketch(values, *hashes[row], np.uint64(columns), table[row])

    least = 1 if values.size >= _LEAST_VALUES else len(hashes)
    threads.each(work, threads.ranges(len(hashes), least))
    return table


@kernel
def _sketch(values, factor, addend, columns, row):
    state = addend
    for i in range(values.size):
        word = state >> np.uint64(32)
        state += factor
        column = ((word >> np.uint64(1)) * columns) >> np.uint64(31)
        value = values[i]
        row[column] += -value if word & np.uint64(1) else value


def estimate(table: Array, hashes: Array, n: int) -> Array:
    """See ``reference.estimate``."""
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
        for turn in range(rows):  # neighbours change places until all are in order
            for r in range(turn % 2, rows - 1, 2):
                _order(found[r], found[r + 1])
        target[:] = found[rows // 2, : target.size]


@inlined
def _order(low, high):
    for i in range(low.size):
        a, b = low[i], high[i]
        low[i] = a if a < b else b
        high[i] = b if a < b else a
