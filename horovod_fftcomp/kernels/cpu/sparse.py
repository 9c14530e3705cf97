"""CPU kernels of sparse codecs: gradient plus residual, top-k selection, codes and their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.arrays import largest
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.jit import inlined, kernel
from horovod_fftcomp.kernels.cpu.positions import count_bits
from horovod_fftcomp.kernels.cpu.topk import (
    GROUP,
    LEAST_GROUPS,
    SAMPLES,
    Counts,
    Limits,
    capacity_for,
    count_groups,
    count_keys,
    fill_keys,
    key_scale,
    kth_from_counts,
    kth_key,
    samples_of,
    suggest,
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
    trailing_zeros,
)
from horovod_fftcomp.kernels.reference import key_exponent
from horovod_fftcomp.types import Array, Body, Coding, Coefficients

_LEAST_VALUES = 1 << 15  # per thread, at least
_MAGNITUDE = 0x7FFFFFFF


def max_abs_bits(values: Array) -> int:
    """Return the largest bit pattern of any |component|; 0x7F800000 or more with Inf or NaN."""
    patterns = values.view(np.int32)
    ranges = threads.ranges(patterns.size, _LEAST_VALUES)
    return max(threads.each(lambda a, b: peak_bits(patterns[a:b]), ranges))


@kernel
def peak_bits(patterns):
    """Return the largest magnitude of float32 bit patterns, int32."""
    peak = np.int32(0)
    for pattern in patterns:
        peak = max(peak, pattern & np.int32(_MAGNITUDE))
    return np.int64(peak)


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
    return _with_threshold(coeffs, max_abs_bits(coeffs), k, bins_per_block, None)


def add_residual(
    flat: Array, residual: Array | None, k: int, out: Array | None = None
) -> Coefficients:
    """Return ``flat`` plus ``residual``, a new array, with the threshold of its ``k`` largest."""
    n = flat.size
    out = empty(n) if out is None else out
    addend = NOTHING if residual is None else residual
    limits = _limits_of_sum(flat, addend, k) if k and n > 2 * SAMPLES else None

    def add(begin: int, end: int, *counting: Any) -> tuple[int, int, int, int]:
        here = slice(begin * GROUP, end * GROUP)
        return add_groups(flat[here], addend[here], out[here], *counting)

    return counted(out, k, 1, limits, add, threads.ranges(-(-n // GROUP), LEAST_GROUPS))


NOTHING = np.empty(0, np.float32)  # stands for zeros
NO_KEYS = np.empty(0, np.int32)


def counted(
    coeffs: Array,
    k: int,
    bins_per_block: int,
    limits: Limits | None,
    write: Callable[..., tuple[int, int, int, int]],
    ranges: list[tuple[int, int]],
) -> Coefficients:
    """Return the coefficients that ``write`` computes, with their top-k threshold.

    ``write(begin, end, low, high, found)``, for each of ``ranges``, returns the bits of the peak
    and the sums of ``count_keys``; without ``limits`` it counts nothing, and ``found`` is empty.
    """
    capacity = capacity_for(coeffs.size) if limits else 0
    low, high = limits or (0, 0)

    def work(begin: int, end: int) -> tuple[int, Counts]:
        found = empty(capacity, np.int32)
        peak, above, between, kept = write(begin, end, low, high, found)
        return peak, Counts(above, between, found[:kept])

    parts = threads.each(work, ranges)
    peak = max(peak for peak, _ in parts)
    counts = [counts for _, counts in parts] if limits else None
    return _with_threshold(coeffs, peak, k, bins_per_block, counts)


def _with_threshold(
    coeffs: Array, peak: int, k: int, bins_per_block: int, counts: list[Counts] | None
) -> Coefficients:
    """Return the coefficients with their top-k threshold, from ``counts`` if they suffice."""
    if not k or peak > LARGEST_FINITE_BITS:
        return Coefficients(coeffs, peak, 0, coeffs.size)
    exponent = key_exponent(peak) if coeffs.dtype == np.complex64 else 0
    found = kth_from_counts(counts, k) if counts and not exponent else None
    return Coefficients(coeffs, peak, *(found or kth_key(coeffs, k, bins_per_block, exponent)))


def _limits_of_sum(flat: Array, addend: Array, k: int) -> Limits | None:
    places = sampled_places(flat.size)
    sample = flat[places] + addend[places] if addend.size else flat[places]
    return limits_of(sample, k, flat.size)


def sampled_places(n: int) -> Array:
    """Return a stratified sample of ``samples_of(n)`` indices: one at random in each stretch."""
    count = samples_of(n)
    places = np.arange(count) * (n // count)
    places += np.random.default_rng(n).integers(n // count, size=count)
    return places


def limits_of(sample: Array, k: int, n: int) -> Limits | None:
    """Return limits of the k-th of ``n`` magnitudes, estimated from a sample of the values.

    None if there are many ties, which need a separate pass.
    """
    limits = suggest(sample.view(np.int32) & np.int32(_MAGNITUDE), k, n, 1)
    return None if limits.low == limits.high else limits


@kernel
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


def select_quantize_pack(
    coeffs: Coefficients, bins_per_block: int, coding: Coding, keep: bool
) -> tuple[Array, Array]:
    """Return (bitmap of the selected coefficients, their codes by ``coding``, packed)."""
    array, peak, key, ties = coeffs[:4]
    reals = array.view(np.float32)
    is_complex = array.dtype == np.complex64
    width = 2 if is_complex else 1
    exponent = key_exponent(peak) if is_complex else 0
    options = (is_complex, bins_per_block, key_scale(exponent))
    numbers = np.array(coding, np.int64)
    ranges = threads.ranges(-(-array.size // GROUP), LEAST_GROUPS)
    bitmap = empty(ranges[-1][1] * (GROUP // 64), np.uint64)

    def reals_of(begin: int, end: int) -> Array:
        return reals[begin * GROUP * width : end * GROUP * width]

    def work(begin: int, end: int, ties: int) -> tuple[int, Array]:
        part = reals_of(begin, end)
        words = bitmap[begin * (GROUP // 64) : end * (GROUP // 64)]
        packed = empty(part.size * coding.bits // 64 + PADDING, np.uint64)
        return take_groups(part, *options, key, ties, numbers, keep, words, packed), packed

    ties_left = [ties]
    if len(ranges) > 1:  # ties in earlier ranges are taken first
        same = (*options, key, key, NO_KEYS)
        counts = threads.each(lambda a, b: count_groups(reals_of(a, b), *same), ranges)
        for _, count, _ in counts[:-1]:
            ties_left.append(max(0, ties_left[-1] - count))
    parts = threads.each(
        work, ((*pair, left) for pair, left in zip(ranges, ties_left, strict=True))
    )
    return bitmap[: (array.size + 63) // 64], concatenated(parts)


@kernel
def take_groups(reals, is_complex, bins_per_block, scale, key, ties, coding, keep, bitmap, packed):
    """Select, pack and subtract, group by group; return the number of bits packed."""
    keys, codes = np.empty(GROUP, np.int32), np.empty(2 * GROUP, np.int32)
    values = np.empty(2 * GROUP, np.float32)
    width = 2 if is_complex else 1
    bit = np.int64(0)
    for group in range(bitmap.size * 64 // GROUP):
        part = reals[group * GROUP * width : (group + 1) * GROUP * width]
        words = bitmap[group * (GROUP // 64) : (group + 1) * (GROUP // 64)]
        fill_keys(part, is_complex, bins_per_block, scale, keys)
        ties = _mark(keys, key, ties, words)
        n = collect(part, width, words, values)
        encode(values, n, coding, codes)
        bit = write_bits(codes, n, coding[1], packed, bit)
        if keep:
            scatter(part, width, words, values, False)
    return bit


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


_MANY = 16  # ones of 64 bits above which visiting all places, without a branch, takes less time


@inlined
def collect(reals, width, words, values):
    """Gather the reals at the bitmap's ones into ``values``; return their number."""
    n = 0
    at, to = np.int64(reals.ctypes.data), np.int64(values.ctypes.data)
    for word in range(words.size):
        chosen = np.int64(words[word])
        if chosen == -1:
            for part in range(width):
                copy_64(at + 256 * (width * word + part), to + 4 * n)
                n += 64
            continue
        if count_ones(chosen) > _MANY and 64 * (word + 1) * width <= reals.size:
            for byte in range(8):
                ones = (chosen >> (8 * byte)) & 255
                source = at + 4 * width * (64 * word + 8 * byte)
                if width == 2:
                    collect_pairs_8(source, to + 4 * n, ones)
                else:
                    collect_8(source, to + 4 * n, ones)
                n += width * count_ones(ones)
            continue
        while chosen != 0:
            i = (64 * word + trailing_zeros(chosen)) * width
            chosen &= chosen - 1
            values[n] = reals[i]
            if width == 2:
                values[n + 1] = reals[i + 1]
            n += width
    return n


@inlined
def scatter(reals, width, words, values, adds):
    """Write ``values`` over the reals at the bitmap's ones, the inverse of ``collect``.

    ``adds``: add them to the reals, none of which is -0.
    """
    n = 0
    at, to = np.int64(values.ctypes.data), np.int64(reals.ctypes.data)
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
        if count_ones(chosen) > _MANY and 64 * (word + 1) * width <= reals.size:
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
            continue
        while chosen != 0:
            i = (64 * word + trailing_zeros(chosen)) * width
            chosen &= chosen - 1
            reals[i] = reals[i] + values[n] if adds else values[n]
            if width == 2:
                reals[i + 1] = reals[i + 1] + values[n + 1] if adds else values[n + 1]
            n += width


def concatenated(parts: list[tuple[int, Array]]) -> Array:
    """Return the concatenation of bit streams, uint8; ``parts``: (number of bits, words)."""
    total = sum(n_bits for n_bits, _ in parts)
    _, whole = parts[0]
    if len(parts) > 1:
        whole = np.zeros(total // 64 + 2, np.uint64)
        at = 0
        for n_bits, words in parts:
            append_bits(whole, at, words, n_bits)
            at += n_bits
    return whole.view(np.uint8)[: (total + 7) // 8]


@kernel
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
    reals, width = total.view(np.float32), total.itemsize // 4
    streams = Streams(parts, width, GROUP, -(-total.size // GROUP))

    def work(begin: int, end: int, first_bits: Array) -> int:
        part = reals[begin * GROUP * width : end * GROUP * width]
        return sum_groups(part, begin, width, *streams.arrays, first_bits)

    streams.check(threads.each(work, streams.ranges(LEAST_GROUPS)))
    return total


class Streams:
    """Bitmaps and codes of several payloads as 2-D arrays, as the sum kernels take them.

    ``arrays``: bitmaps ``[p, words]``, streams of codes ``[p, words]``, codings ``[p, 7]``.
    """

    def __init__(self, parts: Sequence[Body], width: int, span: int, n_spans: int) -> None:
        """``span``: bins that are summed together, whole groups; ``n_spans``: number of spans."""
        n_words = n_spans * (span // 64)
        bitmaps = _rows([part.bitmap for part in parts], n_words)
        n_codes = max(part.packed.size for part in parts) // 8 + PADDING
        codes = _rows([part.packed for part in parts], n_codes)
        self.arrays = bitmaps, codes, np.array([part.coding for part in parts], np.int64)
        self._width, self._words, self._spans = width, span // 64, n_spans

    def ranges(self, least: int) -> list[tuple[int, int, Array]]:
        """Return (first span, end, stream bit at which each payload's codes begin there)."""
        bitmaps, _, codings = self.arrays
        pairs = threads.ranges(self._spans, least)
        words = self._words
        counts = [[count_bits(row[a * words : b * words]) for row in bitmaps] for a, b in pairs]
        before = np.cumsum([[0] * len(bitmaps), *counts[:-1]], axis=0, dtype=np.int64)
        bits = before * self._width * codings[:, 1]
        return [(*pair, first) for pair, first in zip(pairs, bits, strict=True)]

    def check(self, bad: list[int]) -> None:
        """Raise ValueError for a payload that ``add_group`` reports as corrupt."""
        for number in bad:
            if number >= 0:
                raise ValueError(f"payload {number}: a value exceeds the header's scale")


def _rows(arrays: list[Array], n_words: int) -> Array:
    """Return arrays of 8- or 64-bit integers as rows of 64-bit words, padded with zeros."""
    rows = empty(len(arrays) * n_words, np.uint64).reshape(len(arrays), n_words)
    for row, array in zip(rows, arrays, strict=True):
        whole = row.view(array.dtype)
        whole[: array.size] = array
        whole[array.size :] = 0
    return rows


@kernel
def sum_groups(reals, first_group, width, bitmaps, codes, codings, bits):
    """Write the sum of all payloads' values, group by group; return a corrupt payload or -1."""
    bad = -1
    size = GROUP * width
    for begin in range(0, reals.size, size):
        group = reals[begin : begin + size]
        group[:] = np.float32(0)
        first_word = (first_group + begin // size) * (GROUP // 64)
        bad = max(bad, add_group(group, width, first_word, bitmaps, codes, codings, bits))
    return bad


@inlined
def add_group(reals, width, first_word, bitmaps, streams, codings, bits):
    """Add all payloads' values in a group of bins; return the number of a corrupt one, or -1."""
    bad = -1
    codes, values = np.empty(2 * GROUP, np.int32), np.empty(2 * GROUP, np.float32)
    for p in range(bitmaps.shape[0]):
        words = bitmaps[p, first_word : first_word + GROUP // 64]
        n = count_bits(words) * width
        read_bits(streams[p], bits[p], n, codings[p, 1], codes)
        if decode(codes, n, codings[p], values) > codings[p, 6]:
            bad = p
        bits[p] += n * codings[p, 1]
        scatter(reals, width, words, values, True)
    return bad
