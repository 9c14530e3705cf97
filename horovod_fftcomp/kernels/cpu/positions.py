"""CPU kernels of positions: bitmaps of 64-bit words to their encodings in payloads, and back."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels.cpu.buffer_pool import empty, zeros
from horovod_fftcomp.kernels.cpu.inlining import inlined
from horovod_fftcomp.kernels.cpu.jit import kernel_of
from horovod_fftcomp.kernels.cpu.vector_values import count_ones, trailing_zeros
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.positions import unary_bits


@inlined
def count_bits(bitmap):
    """Return the number of ones in 64-bit words."""
    total = 0
    for word in bitmap:
        total += count_ones(np.int64(word))
    return total


run_count_bits = kernel_of(count_bits)


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


@inlined
def write_offsets(bitmap, low_bits, unary, offsets):
    """Write the counts in unary and the offsets of the positions to words of zeros."""
    one, found, bit = np.uint64(1), 0, 0
    low = (1 << low_bits) - 1
    for w in range(bitmap.size):
        word = np.int64(bitmap[w])
        while word != 0:
            position = 64 * w + trailing_zeros(word)
            word &= word - 1
            at = (position >> low_bits) + found
            unary[at >> 6] |= one << np.uint64(at & 63)
            offset, shift = np.uint64(position & low), np.uint64(bit & 63)
            offsets[bit >> 6] |= offset << shift
            if (bit & 63) + low_bits > 64:
                offsets[(bit >> 6) + 1] |= offset >> (np.uint64(64) - shift)
            bit += low_bits
            found += 1


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


@inlined
def read_offsets(unary, offsets, low_bits, n, bitmap):
    """Set the bits of the positions; return False unless they ascend and are below n."""
    last, found, bit = np.int64(-1), 0, 0
    low = np.uint64((1 << low_bits) - 1)
    for w in range(unary.size):
        word = np.int64(unary[w])
        while word != 0:
            high = 64 * w + trailing_zeros(word) - found
            word &= word - 1
            shift = np.uint64(bit & 63)
            both = offsets[bit >> 6] >> shift
            both |= (offsets[(bit >> 6) + 1] << np.uint64(1)) << (np.uint64(63) - shift)
            position = (high << low_bits) | np.int64(both & low)
            if position <= last or position >= n:
                return False
            bitmap[position >> 6] |= np.uint64(1) << np.uint64(position & 63)
            last = position
            bit += low_bits
            found += 1
    return True


run_read_offsets = kernel_of(read_offsets)
