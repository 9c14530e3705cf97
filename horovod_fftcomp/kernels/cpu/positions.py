"""CPU kernels of positions: bitmaps of 64-bit words to their encodings in payloads, and back."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels.cpu.buffer_pool import empty, zeros
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.jit import kernel_of
from horovod_fftcomp.kernels.cpu.vector_values import count_ones, places_8
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.positions import unary_bits

_WORDS = 64  # of a bitmap, whose places are listed at a time


@inlined
def count_bits(bitmap):
    """Return the number of ones in 64-bit words."""
    total = 0
    for word in bitmap:
        total += count_ones(np.int64(word))
    return total


run_count_bits = kernel_of(count_bits)


@inlined
def write_places(bitmap, places):
    """Write the places of the ones, uint32, in ascending order; return their number.

    ``places``: of at least 64 more elements than ones. The loops over places that follow have no
    branch to be mispredicted at each word's last one.
    """
    to, n = np.int64(places.ctypes.data), np.int64(0)
    for w in range(bitmap.size):
        word, at = np.int64(bitmap[w]), to + 4 * n
        n += count_ones(word)
        while True:  # more than once only for more than eight
            word = places_8(word, 64 * w, at)
            at += 32
            if word == 0:
                break
    return n


_run_write_places = kernel_of(write_places)


def positions_of(bitmap: Array) -> Array:
    """Return the positions of the ones of a bitmap, int64, ascending."""
    places = np.empty(run_count_bits(bitmap) + 64, np.uint32)
    return places[: _run_write_places(bitmap, places)].astype(np.int64)


@inlined
def bitmap_has(bitmap, n, k):
    """Return whether 64-bit words have ``k`` ones, all of them among the first ``n`` bits."""
    if n % 64 and bitmap[-1] >> np.uint64(n % 64) != 0:
        return False
    return count_bits(bitmap) == k


run_bitmap_has = kernel_of(bitmap_has)


def as_words(packed: Array, n_words: int) -> Array:
    """Return bytes as ``n_words`` 64-bit words, padded with zeros."""
    words = empty(n_words, np.uint64)
    as_bytes = words.view(np.uint8)
    used = min(packed.size, as_bytes.size)
    as_bytes[:used] = packed[:used]
    as_bytes[used:] = 0
    return words


def pack_bitmap(bitmap: Array, n: int) -> Array:
    """Return the payload form of a bitmap of ``n`` bits: uint8 ``[ceil(n / 8)]``."""
    return bitmap.view(np.uint8)[: (n + 7) // 8]


def unpack_bitmap(packed: Array, n: int, k: int) -> Array:
    """Return the bitmap that ``pack_bitmap`` packed; ValueError unless it has ``k`` ones."""
    bitmap = as_words(packed, (n + 63) // 64)
    if not run_bitmap_has(bitmap, n, k):
        raise ValueError(f"the bitmap does not have {k} bits set below {n}")
    return bitmap


def pack_offsets(bitmap: Array, n: int, k: int, low_bits: int) -> Array:
    """Return the ``k`` positions as offsets in blocks of 2^low_bits bits, uint8."""
    n_unary = unary_bits(n, k, low_bits)
    unary = zeros((n_unary + 63) // 64, np.uint64)
    offsets = np.zeros((k * low_bits + 63) // 64 + 1, np.uint64)
    run_write_offsets(bitmap, low_bits, unary, offsets)
    return np.concatenate([pack_bitmap(unary, n_unary), pack_bitmap(offsets, k * low_bits)])


@allocating
def write_offsets(bitmap, low_bits, unary, offsets):
    """Write the counts in unary and the offsets of the positions to words of zeros."""
    places = np.empty(64 * _WORDS + 64, np.uint32)
    found, bit, low = np.int64(0), np.int64(0), np.int64((1 << low_bits) - 1)
    for begin in range(0, bitmap.size, _WORDS):
        n = write_places(bitmap[begin : begin + _WORDS], places)
        for i in range(n):
            position = 64 * begin + np.int64(places[i])
            at = np.uint64((position >> low_bits) + found + i)
            unary[at >> np.uint64(6)] |= np.uint64(1) << (at & np.uint64(63))
            shift, offset = np.uint64(bit & 63), np.uint64(position & low)
            offsets[bit >> 6] |= offset << shift
            offsets[(bit >> 6) + 1] |= (offset >> np.uint64(1)) >> (np.uint64(63) - shift)
            bit += low_bits
        found += n


run_write_offsets = kernel_of(write_offsets)


def unpack_offsets(packed: Array, n: int, k: int, low_bits: int) -> Array:
    """Return the bitmap of the ``k`` positions that ``pack_offsets`` packed."""
    n_unary = unary_bits(n, k, low_bits)
    split = (n_unary + 7) // 8
    unary = unpack_bitmap(packed[:split], n_unary, k)
    if (packed.size - split) * 8 < k * low_bits:
        raise ValueError("the offsets are cut short")
    offsets = as_words(packed[split:], (k * low_bits + 63) // 64 + 1)
    bitmap = zeros((n + 63) // 64, np.uint64)
    if not run_read_offsets(unary, offsets, low_bits, n, bitmap):
        raise ValueError(f"the positions do not ascend, or are not below {n}")
    return bitmap


@allocating
def read_offsets(unary, offsets, low_bits, n, bitmap):
    """Set the bits of the positions; return False unless they ascend and are below n."""
    places = np.empty(64 * _WORDS + 64, np.uint32)
    last, found, bit, low = np.int64(-1), np.int64(0), np.int64(0), np.uint64((1 << low_bits) - 1)
    for begin in range(0, unary.size, _WORDS):
        k = write_places(unary[begin : begin + _WORDS], places)
        for i in range(k):
            high = 64 * begin + np.int64(places[i]) - found - i
            shift = np.uint64(bit & 63)
            both = offsets[bit >> 6] >> shift
            both |= (offsets[(bit >> 6) + 1] << np.uint64(1)) << (np.uint64(63) - shift)
            position = (high << low_bits) | np.int64(both & low)
            bit += low_bits
            if position <= last or position >= n:
                return False
            at = np.uint64(position)
            bitmap[at >> np.uint64(6)] |= np.uint64(1) << (at & np.uint64(63))
            last = position
        found += k
    return True


run_read_offsets = kernel_of(read_offsets)
