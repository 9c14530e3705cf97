"""CPU kernels of the adaptive methods: choice of elements, and their codes."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels.cpu.arrays import as_int32
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.dense import fill_random, fold
from horovod_fftcomp.kernels.cpu.inlining import inlined
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.positions import run_count_bits
from horovod_fftcomp.kernels.cpu.sparse import collect, memory_of_group, scatter, write_few_places
from horovod_fftcomp.kernels.cpu.value_codes import PADDING, encode, write_bits
from horovod_fftcomp.kernels.cpu.vector_values import mask_above
from horovod_fftcomp.types import Array, Coding
from horovod_fftcomp.wire.radix import GROUP, LANES

_MAGNITUDE = np.int32(0x7FFFFFFF)
_ABOVE_ALL = np.int32(0x7FFFFFFF)


def bin_winners(total: Array, grad: Array, length: int) -> tuple[Array, Array]:
    """Return (bitmap of the elements of at least their bin's largest magnitude; maxima)."""
    n, length = total.size, min(length, total.size)
    maxima, bitmap = np.empty(-(-n // length), np.float32), empty(-(-n // 64), np.uint64)
    _maxima(total, length, maxima)
    _mark_winners(total, grad, maxima, length, bitmap)
    return bitmap, maxima


@kernel
def _maxima(values, length, maxima):
    patterns, out = as_int32(values), as_int32(maxima)
    for number in range(out.size):
        peak = np.int32(0)
        for pattern in patterns[number * length : (number + 1) * length]:
            peak = max(peak, pattern & _MAGNITUDE)
        out[number] = peak


@kernel
def _mark_winners(total, grad, maxima, length, bitmap):
    """Set the bits of winners."""
    limits, keys = as_int32(maxima), np.empty(GROUP, np.int32)
    sums = np.empty(GROUP, np.float32)
    for begin in range(0, total.size, GROUP):
        part, other = total[begin : begin + GROUP], grad[begin : begin + GROUP]
        for i in range(part.size):
            sums[i] = part[i] + other[i]
        at = 0
        while at < part.size:
            number = (begin + at) // length
            stop = min((number + 1) * length - begin, part.size)
            limit = limits[number] if limits[number] > 0 else _ABOVE_ALL
            patterns, out = as_int32(sums[at:stop]), keys[at:stop]
            for i in range(patterns.size):
                out[i] = np.int32(np.int32(patterns[i] & _MAGNITUDE) - limit)
            at = stop
        _write_mask(keys, part.size, np.int32(-1), bitmap[begin // 64 :])


@inlined
def _write_mask(keys, n, key, words):
    """Set the bits of the keys above ``key``, of the first ``n`` of a group."""
    keys[n:] = key
    at = np.int64(keys.ctypes.data)
    for word in range((n + 63) // 64):
        words[word] = np.uint64(mask_above(at + 256 * word, key))


def sums_below(values: Array, limit: float) -> tuple[int, Array]:
    """Return (number of magnitudes of at least ``limit``; sums of the others by group, float64)."""
    sums = np.empty(-(-values.size // GROUP))
    return _sums_below(values, np.float32(limit), sums), sums


@kernel
def _sums_below(values, limit, sums):
    lanes, total = np.empty(LANES), np.int64(0)
    for group in range(sums.size):
        part = values[group * GROUP : (group + 1) * GROUP]
        lanes[:] = 0.0
        above = np.int32(0)
        whole = part.size // LANES * LANES
        for i in range(0, whole, LANES):
            for j in range(LANES):
                size = abs(part[i + j])
                above += np.int32(size >= limit)
                lanes[j] += np.float64(size if size < limit else np.float32(0))
        for j in range(part.size - whole):
            size = abs(part[whole + j])
            above += np.int32(size >= limit)
            lanes[j] += np.float64(size if size < limit else np.float32(0))
        sums[group] = fold(lanes)
        total += above
    return total


def draw_chosen(values: Array, limit: float, key: int) -> Array:
    """Return the bitmap of a random choice: each value with probability min(|value| / limit, 1)."""
    bitmap = empty(-(-values.size // 64), np.uint64)
    _draw(values, 2.0**32 / float(limit), np.uint64(key), bitmap)
    return bitmap


@kernel
def _draw(values, factor, key, bitmap):
    random, keys = np.empty(GROUP, np.uint32), np.empty(GROUP, np.int32)
    for begin in range(0, values.size, GROUP):
        part = values[begin : begin + GROUP]
        fill_random(key, begin // GROUP, random)
        for i in range(part.size):
            keys[i] = np.int32(np.float64(random[i]) < np.float64(abs(part[i])) * factor)
        _write_mask(keys, part.size, np.int32(0), bitmap[begin // 64 :])


def take_chosen(
    array: Array, bitmap: Array, least: float, coding: Coding, keep: bool
) -> tuple[int, Array]:
    """Return (number of ones in the bitmap; packed codes of the float32 values there)."""
    packed = empty(run_count_bits(bitmap) * coding.bits // 64 + PADDING, np.uint64)
    numbers = np.array(coding, np.int64)
    bits = _take_chosen(array, bitmap, np.float32(least), numbers, keep, packed)
    return bits // coding.bits, packed.view(np.uint8)[: (bits + 7) // 8]


@kernel
def _take_chosen(array, bitmap, least, coding, keep, packed):
    """Pack and subtract the chosen values, group by group; return the number of bits packed."""
    codes, values, places = memory_of_group()
    raised = np.empty(2 * GROUP, np.float32)
    bit = np.int64(0)
    for begin in range(0, array.size, GROUP):
        part, words = array[begin : begin + GROUP], bitmap[begin // 64 : (begin + GROUP) // 64]
        n_few = write_few_places(words, part.size, 1, places)
        n = collect(part, 1, words, places, n_few, values)
        for i in range(n):
            size = max(abs(values[i]), least)
            raised[i] = np.copysign(size, values[i])
            values[i] -= raised[i]
        encode(raised, n, coding, codes)
        bit = write_bits(codes, n, coding[1], packed, bit)
        if keep:
            for i in range(n):
                values[i] += raised[i]
            scatter(part, 1, words, places, n_few, values, False)
    return bit
