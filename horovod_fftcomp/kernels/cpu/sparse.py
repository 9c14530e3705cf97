"""CPU kernels of sparse codecs: gradient plus residual, top-k selection, codes and their sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, key_exponent
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.arrays import largest, multiply
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.jit import kernel, kernel_of
from horovod_fftcomp.kernels.cpu.positions import count_bits, write_places
from horovod_fftcomp.kernels.cpu.topk import (
    GROUP,
    LEAST_GROUPS,
    count_keys,
    fill_keys,
    key_scale,
    kth_key,
)
from horovod_fftcomp.kernels.cpu.value_codes import PADDING, decode, encode, read_bits, write_bits
from horovod_fftcomp.kernels.cpu.vector_ir import LANES
from horovod_fftcomp.kernels.cpu.vector_values import (
    add_8,
    add_64,
    add_pairs_8,
    collect_8,
    collect_pairs_8,
    copy_64,
    copy_with_keys,
    count_ones,
    mask_above,
    put_8,
    put_pairs_8,
    sum_with_keys,
)
from horovod_fftcomp.types import Array, Body, Coding, Coefficients

_LEAST_VALUES = 1 << 15  # per thread, at least
_MAGNITUDE = 0x7FFFFFFF


def max_abs_bits(values: Array) -> int:
    """Return the largest bit pattern of any |component|; 0x7F800000 or more with Inf or NaN."""
    patterns = values.view(np.int32)
    ranges = threads.ranges(patterns.size, _LEAST_VALUES)
    return max(threads.each(lambda a, b: run_peak_bits(patterns[a:b]), ranges))


@inlined
def peak_bits(patterns):
    """Return the largest magnitude of float32 bit patterns, int32."""
    peak = np.int32(0)
    for pattern in patterns:
        peak = max(peak, pattern & np.int32(_MAGNITUDE))
    return np.int64(peak)


run_peak_bits = kernel_of(peak_bits)


def count_above(values: Array, key: int) -> int:
    """Return the number of values whose magnitude has a bit pattern above ``key``."""
    patterns = values.view(np.int32)
    ranges = threads.ranges(patterns.size, _LEAST_VALUES)
    return sum(threads.each(lambda a, b: _count_above(patterns[a:b], np.int32(key)), ranges))


@kernel
def _count_above(patterns, key):
    total = np.int64(0)
    for begin in range(0, patterns.size, GROUP):  # counts of 32 bits, in vector lanes
        count = np.int32(0)
        for i in range(begin, min(begin + GROUP, patterns.size)):
            count += np.int32((patterns[i] & np.int32(_MAGNITUDE)) > key)
        total += count
    return total


def topk_threshold(coeffs: Array, k: int, bins_per_block: int) -> Coefficients:
    """Return ``coeffs``, not copied, with the threshold of the ``k`` largest."""
    return with_threshold(coeffs, max_abs_bits(coeffs), k, bins_per_block)


def add_residual(flat: Array, residual: Array | None, k: int) -> Coefficients:
    """Return ``flat`` plus ``residual``, a new array, with the threshold of its ``k`` largest."""
    out = empty(flat.size)
    addend = NOTHING if residual is None else residual

    def add(begin: int, end: int) -> int:
        here = slice(begin * GROUP, end * GROUP)
        return run_add_groups(flat[here], addend[here], out[here], 0, 0, _NO_KEYS)[0]

    peaks = threads.each(add, threads.ranges(-(-flat.size // GROUP), LEAST_GROUPS))
    return with_threshold(out, max(peaks), k, 1)


NOTHING = np.empty(0, np.float32)  # stands for zeros
_NO_KEYS = np.empty(0, np.int32)


def with_threshold(coeffs: Array, peak: int, k: int, bins_per_block: int) -> Coefficients:
    """Return coefficients of this peak with the threshold of the ``k`` largest."""
    if not k or peak > LARGEST_FINITE_BITS:
        return Coefficients(coeffs, peak, 0, coeffs.size)
    is_complex = coeffs.dtype == np.complex64
    scale = key_scale(key_exponent(peak) if is_complex else 0)
    found = empty(-(-coeffs.size // GROUP) * GROUP, np.int32)
    options = is_complex, bins_per_block, scale
    return Coefficients(coeffs, peak, *kth_key(coeffs.view(np.float32), k, options, found))


@allocating
def add_groups(a, b, out, low, high, found):
    """Write a + b; return (bits of the peak, sums of ``count_keys`` unless ``found`` is empty)."""
    above = between = kept = np.int64(0)
    peaks, keys = np.zeros(LANES, np.int32), np.empty(GROUP, np.int32)
    peak, to = np.int64(peaks.ctypes.data), np.int64(keys.ctypes.data)
    x, y, z = np.int64(a.ctypes.data), np.int64(b.ctypes.data), np.int64(out.ctypes.data)
    for begin in range(0, out.size, GROUP):
        end = min(begin + GROUP, out.size)
        whole = (end - begin) // 64 * 64
        for i in range(0, 4 * whole, 256):
            if b.size:
                sum_with_keys(x + i, y + i, z + i, to + i, peak)
            else:
                copy_with_keys(x + i, y + i, z + i, to + i, peak)
        if whole < GROUP:
            rest = out[begin + whole : end]
            for i in range(begin + whole, end):
                out[i] = a[i] + b[i] if b.size else a[i]
            fill_keys(rest, False, 1, np.float32(1), keys[whole:])
            for i in range(whole, end - begin):
                peaks[0] = max(peaks[0], keys[i])
        if found.size:
            more, inside, kept = count_keys(keys, low, high, found, kept)
            above += more
            between += inside
        x, y, z = x + 4 * GROUP, y + 4 * GROUP, z + 4 * GROUP
    return np.int64(largest(peaks)), above, between, kept


run_add_groups = kernel_of(add_groups)


def select_quantize_pack(
    coeffs: Coefficients, bins_per_block: int, coding: Coding, keep: bool
) -> tuple[Array, Array]:
    """Return (bitmap of the selected coefficients, their codes by ``coding``, packed)."""
    array, peak, key, ties = coeffs[:4]
    reals = array.view(np.float32)
    is_complex = array.dtype == np.complex64
    options = is_complex, bins_per_block, key_scale(key_exponent(peak) if is_complex else 0)
    bitmap = empty(-(-array.size // GROUP) * (GROUP // 64), np.uint64)
    packed = empty(reals.size * coding.bits // 64 + PADDING, np.uint64)
    numbers = np.array(coding, np.int64)
    n_bits = run_take_groups(reals, *options, key, ties, numbers, keep, bitmap, packed)
    return bitmap[: (array.size + 63) // 64], packed.view(np.uint8)[: (n_bits + 7) // 8]


@allocating
def take_groups(reals, is_complex, bins_per_block, scale, key, ties, coding, keep, bitmap, packed):
    """Select, pack and subtract, group by group; return the number of bits packed."""
    keys, (codes, values, places) = np.empty(GROUP, np.int32), memory_of_group()
    width = 2 if is_complex else 1
    bit = np.int64(0)
    for group in range(bitmap.size * 64 // GROUP):
        part = reals[group * GROUP * width : (group + 1) * GROUP * width]
        words = bitmap[group * (GROUP // 64) : (group + 1) * (GROUP // 64)]
        fill_keys(part, is_complex, bins_per_block, scale, keys)
        ties = _mark(keys, key, ties, words)
        n_few = write_few_places(words, part.size, width, places)
        n = collect(part, width, words, places, n_few, values)
        encode(values, n, coding, codes)
        bit = write_bits(codes, n, coding[1], packed, bit)
        if keep:
            scatter(part, width, words, places, n_few, values, False)
    return bit


run_take_groups = kernel_of(take_groups)


@inlined
def _mark(keys, key, ties, words):
    """Set the bits of keys above ``key`` and of the first ``ties`` equal ones; return ties left."""
    at = np.int64(keys.ctypes.data)
    for word in range(words.size):
        chosen = np.int64(mask_above(at + 256 * word, key))
        if ties > 0:
            equal = np.int64(mask_above(at + 256 * word, key - 1)) ^ chosen
            while equal != 0 and ties > 0:
                chosen |= equal & -equal
                equal &= equal - 1
                ties -= 1
        words[word] = np.uint64(chosen)
    return ties


_MANY = 16  # ones of 64 bits above which visiting all places takes less time than a list of them


@inlined
def write_few_places(words, size, width, places):
    """Write the places of the ones of a group's bitmap; return their number.

    -1, with nothing written, for many in a whole group; ``size``: its reals.
    """
    if size == GROUP * width and count_bits(words) > _MANY * words.size:
        return np.int64(-1)
    return write_places(words, places)


@inlined
def collect(reals, width, words, places, n_few, values):
    """Gather the reals at the bitmap's ones into ``values``; return their number.

    ``places``, ``n_few``: of ``write_few_places``.
    """
    for i in range(n_few):
        place = width * np.int64(places[i])
        values[width * i] = reals[place]
        if width == 2:
            values[2 * i + 1] = reals[place + 1]
    if n_few >= 0:
        return width * n_few
    at, to, n = np.int64(reals.ctypes.data), np.int64(values.ctypes.data), np.int64(0)
    for word in range(words.size):
        chosen = np.int64(words[word])
        if chosen == -1:
            for part in range(width):
                copy_64(at + 256 * (width * word + part), to + 4 * n)
                n += 64
            continue
        for byte in range(8):
            ones = (chosen >> (8 * byte)) & 255
            source = at + 4 * width * (64 * word + 8 * byte)
            if width == 2:
                collect_pairs_8(source, to + 4 * n, ones)
            else:
                collect_8(source, to + 4 * n, ones)
            n += width * count_ones(ones)
    return n


@inlined
def scatter(reals, width, words, places, n_few, values, adds):
    """Write ``values`` over the reals at the bitmap's ones, the inverse of ``collect``.

    ``adds``: add them to the reals, none of which is -0.
    """
    for i in range(n_few):
        place, value = width * np.int64(places[i]), values[width * i]
        reals[place] = reals[place] + value if adds else value
        if width == 2:
            value = values[2 * i + 1]
            reals[place + 1] = reals[place + 1] + value if adds else value
    if n_few >= 0:
        return
    at, to, n = np.int64(values.ctypes.data), np.int64(reals.ctypes.data), np.int64(0)
    for word in range(words.size):
        chosen, target = np.int64(words[word]), to + 256 * width * word
        if chosen == -1:
            for part in range(width):
                if adds:
                    add_64(at + 4 * n, target + 256 * part)
                else:
                    copy_64(at + 4 * n, target + 256 * part)
                n += 64
            continue
        for byte in range(8):
            ones = (chosen >> (8 * byte)) & 255
            if width == 2 and adds:
                add_pairs_8(at + 4 * n, target + 64 * byte, ones)
            elif width == 2:
                put_pairs_8(at + 4 * n, target + 64 * byte, ones)
            elif adds:
                add_8(at + 4 * n, target + 32 * byte, ones)
            else:
                put_8(at + 4 * n, target + 32 * byte, ones)
            n += width * count_ones(ones)


@inlined
def append_bits(whole, at, words, n_bits):
    """Write ``n_bits`` bits of words into others, zeros from bit ``at`` on."""
    shift, to = np.uint64(at & 63), at >> 6
    for i in range((n_bits + 63) // 64):
        word = words[i]
        if 64 * i + 64 > n_bits:  # bits after the end are undefined
            word &= (np.uint64(1) << np.uint64(n_bits & 63)) - np.uint64(1)
        whole[to + i] |= word << shift
        if shift:
            whole[to + i + 1] |= word >> (np.uint64(64) - shift)


def sum_values(parts: Sequence[Body], total: Array) -> Array:
    """Write the sum of sparse vectors, added in the order of ``parts``, to ``total``; return it."""
    streams = streams_of(parts, -(-total.size // GROUP) * GROUP)
    reals, width = total.view(np.float32), total.itemsize // 4
    check_streams(run_sum_groups(reals, width, *streams, np.float32(1)))
    return total


def streams_of(parts: Sequence[Body], n_bins: int) -> tuple[Array, Array, Array, Array]:
    """Return what kernels that sum payloads take: 2-D arrays, and the first bit of codes.

    Bitmaps ``[p, words]`` of ``n_bins``, streams of codes ``[p, words]``, codings ``[p, 7]``.
    """
    bitmaps = _rows([part.bitmap for part in parts], n_bins // 64)
    n_codes = max(part.packed.size for part in parts) // 8 + PADDING
    codes = _rows([part.packed for part in parts], n_codes)
    codings = np.array([part.coding for part in parts], np.int64)
    return bitmaps, codes, codings, np.zeros(len(parts), np.int64)


def check_streams(bad: int) -> None:
    """Raise ValueError for a payload that ``add_group`` reports as corrupt."""
    if bad >= 0:
        raise ValueError(f"payload {bad}: a value exceeds the header's scale")


def _rows(arrays: list[Array], n_words: int) -> Array:
    """Return arrays of 8- or 64-bit integers as rows of 64-bit words, padded with zeros."""
    rows = empty(len(arrays) * n_words, np.uint64).reshape(len(arrays), n_words)
    for row, array in zip(rows, arrays, strict=True):
        whole = row.view(array.dtype)
        whole[: array.size] = array
        whole[array.size :] = 0
    return rows


@allocating
def sum_groups(reals, width, bitmaps, streams, codings, bits, factor):
    """Write the sum of all payloads' values, times ``factor``; return a corrupt payload or -1."""
    bad, memory = -1, memory_of_group()
    for group in range((reals.size + GROUP * width - 1) // (GROUP * width)):
        part = reals[group * GROUP * width : (group + 1) * GROUP * width]
        part[:] = np.float32(0)
        word = group * (GROUP // 64)
        bad = max(bad, add_group(part, width, word, bitmaps, streams, codings, bits, *memory))
        multiply(part, factor)
    return bad


run_sum_groups = kernel_of(sum_groups)


@allocating
def memory_of_group():
    """Return memory for a group's codes, values and places."""
    places = np.empty(GROUP + 64, np.uint32)
    return np.empty(2 * GROUP, np.int32), np.empty(2 * GROUP, np.float32), places


@inlined
def add_group(
    reals, width, first_word, bitmaps, streams, codings, bits, codes, values, places
):  # fmt: skip
    """Add all payloads' values in a group of bins; return the number of a corrupt one, or -1.

    The last three: of ``memory_of_group``.
    """
    bad = -1
    for p in range(bitmaps.shape[0]):
        words = bitmaps[p, first_word : first_word + GROUP // 64]
        n_few = write_few_places(words, reals.size, width, places)
        n = width * (n_few if n_few >= 0 else count_bits(words))
        read_bits(streams[p], bits[p], n, codings[p, 1], codes)
        if decode(codes, n, codings[p], values) > codings[p, 6]:
            bad = p
        bits[p] += n * codings[p, 1]
        scatter(reals, width, words, places, n_few, values, True)
    return bad
