"""CPU kernels of schemes whose ranks use common positions or merge sparse vectors."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.positions import as_words, count_bits
from horovod_fftcomp.kernels.cpu.value_codes import PADDING, read_bits, write_bits
from horovod_fftcomp.kernels.cpu.vector_ir import trailing_zeros
from horovod_fftcomp.types import Array, Body

_GROUP = 4096  # values that are processed at a time, in the L1 cache
_LEAST_VALUES = 1 << 15  # per thread, at least
_LEAST_WORDS = 1 << 13
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NOTHING = np.empty(0, np.float32)


def low_pass(flat: Array, residual: Array | None, beta: float) -> tuple[Array, int]:
    """See ``reference.low_pass``."""
    out = empty(flat.size)
    addend = _NOTHING if residual is None else residual

    def work(begin: int, end: int) -> int:
        here = slice(begin, end)
        return _low_pass(flat[here], addend[here], np.float32(beta), out[here])

    return out, max(threads.each(work, threads.ranges(flat.size, _LEAST_VALUES)))


@kernel
def _low_pass(a, b, beta, out):
    """Write b + beta * a; return the bits of the largest |a + b|."""
    sums = np.zeros(_GROUP, np.float32)
    keys = sums.view(np.int32)
    peak = np.int32(0)
    for begin in range(0, out.size, _GROUP):
        end = min(begin + _GROUP, out.size)
        x, z = a[begin:end], out[begin:end]  # from index 0, else the loops are not vectorized
        if b.size:
            y = b[begin:end]
            for i in range(x.size):
                sums[i] = x[i] + y[i]
            for i in range(x.size):
                z[i] = y[i] + beta * x[i]
        else:
            for i in range(x.size):
                sums[i] = x[i]
            for i in range(x.size):
                z[i] = beta * x[i]
        for key in keys:  # in a partial group the rest are keys of the group before
            peak = max(peak, key & _MAGNITUDE)
    return np.int64(peak)


def chunk_winners(flat: Array, residual: Array | None, chunk: int) -> Array:
    """See ``reference.chunk_winners``."""
    winners = np.empty(-(-flat.size // chunk), np.uint32)
    addend = _NOTHING if residual is None else residual

    def work(begin: int, end: int) -> None:
        here = slice(begin * chunk, end * chunk)
        _chunk_winners(flat[here], addend[here], chunk, winners[begin:end])

    threads.each(work, threads.ranges(winners.size, max(1, _LEAST_VALUES // chunk)))
    return winners


@kernel
def _chunk_winners(a, b, chunk, winners):
    sums = np.empty(chunk, np.float32)
    keys = sums.view(np.int32)
    for number in range(winners.size):
        begin = number * chunk
        end = min(begin + chunk, a.size)
        n = end - begin
        x = a[begin:end]
        if b.size:
            y = b[begin:end]
            for i in range(n):
                sums[i] = x[i] + y[i]
        else:
            for i in range(n):
                sums[i] = x[i]
        top = np.int32(0)
        for i in range(n):  # without the index of the maximum, so that it is vectorized
            keys[i] &= _MAGNITUDE
            top = max(top, keys[i])
        i = 0
        while keys[i] != top:
            i += 1
        winners[number] = i


def pack_bits(codes: Array, bits: int) -> Array:
    """See ``reference.pack_bits``."""
    stream = np.empty(codes.size * bits // 64 + PADDING, np.uint64)
    _pack_bits(codes.view(np.int32), bits, stream)
    return stream.view(np.uint8)[: (codes.size * bits + 7) // 8]


@kernel
def _pack_bits(codes, bits, stream):
    group = np.empty(_GROUP, np.int32)
    bit = np.int64(0)
    for begin in range(0, codes.size, _GROUP):
        n = min(_GROUP, codes.size - begin)
        group[:n] = codes[begin : begin + n]
        bit = write_bits(group, n, bits, stream, bit)


def unpack_bits(packed: Array, count: int, bits: int) -> Array:
    """See ``reference.unpack_bits``."""
    stream = as_words(packed[: (count * bits + 7) // 8], count * bits // 64 + PADDING)
    codes = np.empty(count, np.uint32)
    _unpack_bits(stream, bits, codes.view(np.int32))
    return codes


@kernel
def _unpack_bits(stream, bits, codes):
    group = np.empty(_GROUP, np.int32)
    for begin in range(0, codes.size, _GROUP):
        n = min(_GROUP, codes.size - begin)
        read_bits(stream, np.int64(begin) * bits, n, bits, group)
        codes[begin : begin + n] = group[:n]


def positions_of(bitmap: Array) -> Array:
    """See ``reference.positions_of``."""
    positions = np.empty(count_bits(bitmap), np.int64)
    _positions_of(bitmap, positions)
    return positions


@kernel
def _positions_of(bitmap, positions):
    at = 0
    for i in range(bitmap.size):
        word = np.int64(bitmap[i])
        while word != 0:
            positions[at] = 64 * i + trailing_zeros(word)
            word &= word - 1
            at += 1


def sum_sparse(a: Body, b: Body) -> Array:
    """See ``reference.sum_sparse``."""
    bitmaps, values = (a.bitmap, b.bitmap), empty(count_bits(a.bitmap | b.bitmap))
    # One value more: the kernel reads the next value of both before it knows which it needs.
    x, y = (np.append(part.packed.view(np.float32), np.float32(0)) for part in (a, b))

    def work(begin: int, end: int) -> None:
        i, j = (count_bits(words[:begin]) for words in bitmaps)
        at = count_bits(a.bitmap[:begin] | b.bitmap[:begin])
        _merge(a.bitmap[begin:end], x[i:], b.bitmap[begin:end], y[j:], values[at:])

    threads.each(work, threads.ranges(a.bitmap.size, _LEAST_WORDS))
    return values


@kernel
def _merge(a, x, b, y, values):
    i = j = at = np.int64(0)
    for word in range(a.size):
        in_a, in_b = np.int64(a[word]), np.int64(b[word])
        union = in_a | in_b
        while union != 0:
            bit = trailing_zeros(union)
            union &= union - 1
            # No branch: it could not be predicted which of the two has a value here.
            has_a, has_b = (in_a >> bit) & 1, (in_b >> bit) & 1
            total = np.float32(0) + np.float32(has_a) * x[i]
            values[at] = total + np.float32(has_b) * y[j]
            i += has_a
            j += has_b
            at += 1
