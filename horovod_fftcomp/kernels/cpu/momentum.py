"""CPU kernels of momentum schemes: velocity and residual in one pass."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.arrays import as_int32
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.positions import positions_of
from horovod_fftcomp.kernels.cpu.sparse import NOTHING, peak_bits
from horovod_fftcomp.kernels.cpu.topk import GROUP, LEAST_GROUPS
from horovod_fftcomp.types import Array, Coefficients


def momentum_accumulate(
    flat: Array,
    velocity: Array | None,
    residual: Array | None,
    momentum: float,
    nesterov: bool,
    factor: float,
) -> tuple[Coefficients, Array]:
    """Return (the new residual, with its peak; the new velocity)."""
    n = flat.size
    options = (np.float32(momentum), nesterov, np.float32(factor))
    u = NOTHING if velocity is None else velocity
    v = NOTHING if residual is None else residual
    new_u, new_v = empty(n), empty(n)

    def accumulate(begin: int, end: int) -> int:
        here = slice(begin * GROUP, end * GROUP)
        return _accumulate(flat[here], u[here], v[here], *options, new_u[here], new_v[here])

    ranges = threads.ranges(-(-n // GROUP), LEAST_GROUPS)
    return Coefficients(new_v, max(threads.each(accumulate, ranges)), 0, n), new_u


@kernel
def _accumulate(g, u, v, momentum, nesterov, factor, new_u, new_v):
    """Write velocity and residual; return the bits of the residual's peak."""
    nothing = np.zeros(GROUP, np.float32)
    peak = np.int64(0)
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
        peak = max(peak, peak_bits(as_int32(y)))
    return peak


def zero_at(values: Array, bitmap: Array) -> None:
    """Set ``values`` to 0 where the bitmap has ones, in place."""
    values[positions_of(bitmap)] = np.float32(0)
