"""CPU kernels of momentum schemes: velocity, residual and selection keys in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.sparse import NO_KEYS, NOTHING, counted, limits_of, sampled_places
from horovod_fftcomp.kernels.cpu.topk import GROUP, LEAST_GROUPS, SAMPLES, count_keys, fill_keys
from horovod_fftcomp.kernels.cpu.vector_values import trailing_zeros
from horovod_fftcomp.types import Array, Coefficients


def momentum_accumulate(
    flat: Array,
    velocity: Array | None,
    residual: Array | None,
    momentum: float,
    nesterov: bool,
    factor: float,
    k: int,
) -> tuple[Coefficients, Array]:
    """Return (the new residual, with its top-k threshold; the new velocity)."""
    n = flat.size
    options = (np.float32(momentum), nesterov, np.float32(factor))
    u = NOTHING if velocity is None else velocity
    v = NOTHING if residual is None else residual
    new_u, new_v = empty(n), empty(n)
    limits = None
    if k and n > 2 * SAMPLES:
        places = sampled_places(n)
        sample = np.empty(places.size, np.float32)
        few = (array[places] if array.size else array for array in (flat, u, v))
        _accumulate(*few, *options, np.empty_like(sample), sample, 0, 0, NO_KEYS)
        limits = limits_of(sample, k, n)

    def accumulate(begin: int, end: int, *counting: Any) -> tuple[int, int, int, int]:
        here = slice(begin * GROUP, end * GROUP)
        new = new_u[here], new_v[here]
        return _accumulate(flat[here], u[here], v[here], *options, *new, *counting)

    ranges = threads.ranges(-(-n // GROUP), LEAST_GROUPS)
    return counted(new_v, k, 1, limits, accumulate, ranges), new_u


@kernel
def _accumulate(g, u, v, momentum, nesterov, factor, new_u, new_v, low, high, found):
    """Write velocity and residual; return as ``add_groups``."""
    above, between, kept = 0, 0, 0
    keys, nothing = np.empty(GROUP, np.int32), np.zeros(GROUP, np.float32)
    peak = np.int32(0)
    for begin in range(0, g.size, GROUP):
        end = min(begin + GROUP, g.size)
        a = g[begin:end]
        b = u[begin:end] if u.size else nothing[: a.size]
        c = v[begin:end] if v.size else nothing[: a.size]
        x, y = new_u[begin:end], new_v[begin:end]
        if nesterov:
            for i in range(a.size):
                scaled = factor * a[i]
                moved = momentum * (b[i] + scaled)
                x[i] = moved
                y[i] = c[i] + (moved + scaled)
        else:
            for i in range(a.size):
                moved = momentum * b[i] + factor * a[i]
                x[i] = moved
                y[i] = c[i] + moved
        fill_keys(y, False, 1, np.float32(1), keys)
        for key in keys:
            peak = max(peak, key)
        if found.size:
            more, inside, kept = count_keys(keys, low, high, found, kept)
            above += more
            between += inside
    return np.int64(peak), above, between, kept


def zero_at(values: Array, bitmap: Array) -> None:
    """Set ``values`` to 0 where the bitmap has ones, in place."""
    _clear(values, bitmap)


@kernel
def _clear(values, bitmap):
    for i in range(bitmap.size):
        word = np.int64(bitmap[i])
        while word != 0:
            values[64 * i + trailing_zeros(word)] = np.float32(0)
            word &= word - 1
