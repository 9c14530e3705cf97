"""CPU kernels of low-rank schemes; all ranks compute the same bits."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.arrays import copy_into
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.dense import fold
from horovod_fftcomp.kernels.cpu.inlining import allocating
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.types import Array

_COLUMNS = 2048  # of a row at a time: they stay in the L1 cache while all products are added
_LEAST_VALUES = 1 << 15  # per thread, at least
_LANES = 256  # partial sums, as many as a GPU's block has threads


def orthonormal(matrix: Array) -> Array:
    """Return ``matrix``, finite float32 ``[rows, columns]``, with its columns orthonormalized."""
    columns = matrix.T.astype(np.float64, order="C")
    orthonormalize(columns)
    return np.ascontiguousarray(columns.T, np.float32)


@kernel
def orthonormalize(columns):
    """Make rows orthonormal in place, one after another."""
    for k in range(columns.shape[0]):
        column = columns[k]
        before = np.sqrt(_dot(column, column))
        for _ in range(2):
            for j in range(k):
                projection = _dot(column, columns[j])
                for i in range(column.size):
                    column[i] -= projection * columns[j, i]
        norm = np.sqrt(_dot(column, column))
        if norm > 1e-10 * before:
            for i in range(column.size):
                column[i] /= norm
        else:
            column[:] = 0.0


@allocating
def _dot(a, b):
    lanes, whole = np.zeros(_LANES), a.size // _LANES * _LANES
    for begin in range(0, whole, _LANES):
        for i in range(_LANES):
            lanes[i] += a[begin + i] * b[begin + i]
    for i in range(a.size - whole):
        lanes[i] += a[whole + i] * b[whole + i]
    return fold(lanes)


def low_rank(left: Array, right: Array, minuend: Array | None) -> Array:
    """Return ``left`` ``[rows, r]`` times the transpose of ``right`` ``[columns, r]``, float32."""
    subtracts = minuend is not None
    out = minuend
    if out is None:
        out = empty(left.shape[0] * right.shape[0]).reshape(left.shape[0], right.shape[0])
    rows = np.ascontiguousarray(right.T)
    target = out

    def work(begin: int, end: int) -> None:
        _low_rank(left[begin:end], rows, subtracts, target[begin:end])

    least = max(1, _LEAST_VALUES // max(1, right.shape[0]))
    threads.each(work, threads.ranges(left.shape[0], least))
    return out


@kernel
def _low_rank(left, right, subtracts, out):
    buffer = np.empty(_COLUMNS, np.float32)
    for begin in range(0, right.shape[1], _COLUMNS):
        end = min(begin + _COLUMNS, right.shape[1])
        sums = buffer[: end - begin]
        for i in range(left.shape[0]):
            target = out[i, begin:end]
            sums[:] = np.float32(0)
            for k in range(left.shape[1]):
                factor, row = left[i, k], right[k, begin:end]
                for j in range(sums.size):
                    sums[j] += factor * row[j]
            if subtracts:
                for j in range(sums.size):
                    target[j] -= sums[j]
            else:
                copy_into(target, sums)
