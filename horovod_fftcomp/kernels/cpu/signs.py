"""CPU kernels of sign methods: signs are packed, and values of either sign summed, in one pass."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.arrays import copy_into
from horovod_fftcomp.kernels.cpu.dense import fold
from horovod_fftcomp.kernels.cpu.inlining import optimized
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.radix import GROUP, LANES

_DIGITS = 32
_LEAST_VALUES = 1 << 15  # per thread, at least
_ZERO = np.float32(0)  # a plain 0 would compare in 64 bits
SIGNS = (np.float32(1), np.float32(-1))  # of zeros; see ``_below``
_U = np.uint32


@optimized
def encode_sign_groups(a, b, decay, values, starts, words, sums, counts, zero):
    """Write signs, sums and counts of consecutive groups, of a + decay b unless ``a`` is empty.

    ``zero``: the sign of zeros, of ``SIGNS``.
    """
    up, down = np.empty(LANES), np.empty(LANES)
    rest = np.ones(GROUP, np.float32)
    piece, to = 0, 0
    for begin in range(0, values.size, GROUP):
        part = values[begin : begin + GROUP]
        if a.size:
            grad, addend = a[begin : begin + GROUP], b[begin : begin + GROUP]
            for i in range(part.size):
                part[i] = grad[i] + addend[i] * decay
        while piece < sums.shape[0] and starts[piece] < begin + GROUP:
            here = part[starts[piece] - begin : starts[piece + 1] - begin]
            _sides(here, up, down)
            sums[piece, 0], sums[piece, 1] = up[0], down[0]
            counts[piece] = _count_negative(here, zero)
            piece += 1
        # After the sums, while the group is in the cache: ``_pack`` reads it at 32 places at once.
        width = (part.size + _DIGITS - 1) // _DIGITS
        if part.size < GROUP:
            copy_into(rest[: part.size], part)
            _pack(rest, words[to : to + width], zero)
        else:
            _pack(part, words[to : to + width], zero)
        to += width


@optimized
def _count_negative(values, zero):
    count = np.int32(0)
    for i in range(values.size):
        count = np.int32(count + np.int32(zero * values[i] < _ZERO))
    return count if zero > _ZERO else np.int32(values.size - count)


@optimized
def _pack(values, words, zero):
    """Write the signs of values, 1 below 0, as many as ``words`` have bits."""
    width = words.size
    words[:] = _U(0)
    for b in range(_DIGITS - 4, -4, -4):  # four bits at a time: fewer stores
        first, second = values[b * width : (b + 1) * width], values[(b + 1) * width :]
        third, fourth = values[(b + 2) * width :], values[(b + 3) * width :]
        for j in range(width):
            low = _below(first[j], zero) | _U(_below(second[j], zero) << _U(1))
            high = _below(third[j], zero) | _U(_below(fourth[j], zero) << _U(1))
            words[j] = _U(_U(words[j] << _U(4)) | _U(low | _U(high << _U(2))))
    if zero < _ZERO:
        for j in range(width):
            words[j] = ~words[j]


@optimized
def _below(x, zero):
    """Return whether ``x`` is below 0, or above 0 where ``zero`` is -1: then a bit of 1 is not."""
    return _U(zero * x < _ZERO)


@optimized
def _sides(part, up, down):
    """Write the sum of the values from 0 up to ``up[0]``, of those below 0 to ``down[0]``."""
    up[:], down[:] = 0.0, 0.0
    whole = part.size // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            x = part[i + j]
            up[j] += np.float64(_ZERO if x < _ZERO else x)
            down[j] += np.float64(x if x < _ZERO else _ZERO)
    for j in range(part.size - whole):
        x = part[whole + j]
        up[j] += np.float64(_ZERO if x < _ZERO else x)
        down[j] += np.float64(x if x < _ZERO else _ZERO)
    fold(up)
    fold(down)


@optimized
def subtract_sign_rows(values, sides, length, first, zero):
    """Subtract each value's side of its row; ``first``: the index of the first value."""
    one, other = (0, 1) if zero > _ZERO else (1, 0)
    at = 0
    while at < values.size:
        row = (first + at) // length
        end = min(values.size, (row + 1) * length - first)
        up, down = sides[row, one], sides[row, other]
        part = values[at:end]
        for i in range(part.size):
            part[i] -= down if zero * part[i] < _ZERO else up
        at = end


@optimized
def add_sign_groups(total, words, sides, length, first):
    """Add the sides of signs in consecutive groups; ``first``: the index of the first value."""
    bits = np.empty(GROUP + _DIGITS, np.uint32)
    at = 0
    for begin in range(0, total.size, GROUP):
        part = total[begin : begin + GROUP]
        width = (part.size + _DIGITS - 1) // _DIGITS
        packed = words[at : at + width]
        for b in range(_DIGITS):
            plane = bits[b * width : (b + 1) * width]
            for j in range(width):
                plane[j] = (packed[j] >> _U(b)) & _U(1)
        at += width
        i = 0
        while i < part.size:
            row = (first + begin + i) // length
            end = min(part.size, (row + 1) * length - first - begin)
            up, down = sides[row, 0], sides[row, 1]
            piece, signs = part[i:end], bits[i:end]
            for j in range(piece.size):
                piece[j] += down if signs[j] else up
            i = end


def majority_sign(values: Array, many: float) -> None:
    """Replace values by ``many`` times their signs, in place; 0 stays 0, and NaN is kept."""
    sign = np.float32(many)
    ranges = threads.ranges(values.size, _LEAST_VALUES)
    threads.each(lambda begin, end: _majority_sign(values[begin:end], sign), ranges)


@kernel
def _majority_sign(values, many):
    for i in range(values.size):
        x = values[i]
        sign = many if x > _ZERO else -many
        values[i] = sign if x != _ZERO and x == x else x + _ZERO
