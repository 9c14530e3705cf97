"""Values on a CPU: gradients plus residuals, and chosen coefficients to packed codes and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from horovod_fftcomp import threads
from horovod_fftcomp.backends import Array, Coefficients, Part
from horovod_fftcomp.backends.cpu.codelets import (
    LANES,
    add_bfloat16,
    as_float,
    copy_with_keys,
    mask_above,
    sum_with_keys,
    to_bfloat16,
    trailing_zeros,
)
from horovod_fftcomp.backends.cpu.memory import empty
from horovod_fftcomp.backends.cpu.positions import count_bits
from horovod_fftcomp.backends.cpu.selection import (
    GROUP,
    LEAST_GROUPS,
    SAMPLES,
    Counts,
    Limits,
    count_keys,
    fill_keys,
    key_scale,
    kth_key,
    room_for,
    settled,
    suggest,
)
from horovod_fftcomp.backends.reference import key_exponent
from horovod_fftcomp.quantizers import (
    BFLOAT16,
    FLOAT32,
    LARGEST_BFLOAT16_BITS,
    LARGEST_FINITE_BITS,
    RANGE,
    Coding,
)

kernel: Any = njit(cache=True, nogil=True)

_LEAST_VALUES = 1 << 15  # for a thread of its own
_MAGNITUDE = 0x7FFFFFFF
_SIGN = 0x80000000


def peak_bits(values: Array) -> int:
    """See ``reference.peak_bits``."""
    patterns = values.view(np.int32)
    ranges = threads.ranges(patterns.size, _LEAST_VALUES)
    return max(threads.each(lambda a, b: _peak_bits(patterns[a:b]), ranges))


@kernel
def _peak_bits(patterns):
    peak = np.int32(0)
    for pattern in patterns:
        peak = max(peak, pattern & np.int32(_MAGNITUDE))
    return np.int64(peak)


def rank(coeffs: Array, k: int, bins_per_block: int) -> Coefficients:
    """See ``reference.rank``."""
    return ranked(coeffs, peak_bits(coeffs), k, bins_per_block, None)


def add(flat: Array, residual: Array | None, k: int) -> Coefficients:
    """See ``reference.add``."""
    n = flat.size
    out = empty(n)
    addend = _NOTHING if residual is None else residual
    limits = _limits_of_sum(flat, addend, k) if k and n > 2 * SAMPLES else None
    room = room_for(n) if limits else 0

    def work(begin: int, end: int) -> tuple[int, Counts]:
        here = slice(begin * GROUP, end * GROUP)
        found = np.empty(room, np.int32)
        low, high = limits or _EVERYTHING
        peak, above, between, kept = _add(
            flat[here], addend[here], out[here], room > 0, low, high, found
        )
        return peak, Counts(above, between, found[:kept])

    parts = threads.each(work, threads.ranges(-(-n // GROUP), LEAST_GROUPS))
    peak = max(peak for peak, _ in parts)
    return ranked(out, peak, k, 1, [counts for _, counts in parts] if room else None)


_NOTHING = np.empty(0, np.float32)
_EVERYTHING = Limits(0, _MAGNITUDE)


def ranked(
    coeffs: Array, peak: int, k: int, bins_per_block: int, counts: list[Counts] | None
) -> Coefficients:
    """Return the coefficients with their k-th key, from ``counts`` if they tell it."""
    if not k or peak > LARGEST_FINITE_BITS:
        return Coefficients(coeffs, peak, 0, coeffs.size)
    exponent = key_exponent(peak) if coeffs.dtype == np.complex64 else 0
    found = settled(counts, k) if counts and not exponent else None
    return Coefficients(coeffs, peak, *(found or kth_key(coeffs, k, bins_per_block, exponent)))


def _limits_of_sum(flat: Array, addend: Array, k: int) -> Limits | None:
    n = flat.size
    places = np.arange(SAMPLES) * (n // SAMPLES)
    places += np.random.default_rng(n).integers(n // SAMPLES, size=SAMPLES)
    sample = flat[places] + addend[places] if addend.size else flat[places]
    limits = suggest(sample.view(np.int32) & np.int32(_MAGNITUDE), k, n, 1)
    return None if limits.low == limits.high else limits  # many ties: they need a pass of their own


@kernel
def _add(a, b, out, counts, low, high, found):
    """Write a + b; return (bits of the peak, and what ``count_keys`` returns of all groups)."""
    above, between, kept = 0, 0, 0
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
            rest[:] = a[begin + whole : end]
            if b.size:
                rest += b[begin + whole : end]
            fill_keys(rest, False, 1, np.float32(1), keys[whole:])
            for i in range(whole, end - begin):
                peaks[0] = max(peaks[0], keys[i])
        if counts:
            more, inside, kept = count_keys(keys, low, high, found, kept)
            above += more
            between += inside
        x, y, z = x + 4 * GROUP, y + 4 * GROUP, z + 4 * GROUP
    return np.int64(peaks.max()), above, between, kept


@kernel
def _code(pattern, kind, shift, base, positives, negatives):
    """Return (the code of a float32's bits, the bits that it decodes to)."""
    magnitude = pattern & _MAGNITUDE
    sign = pattern & _SIGN
    if kind == FLOAT32:
        return pattern, pattern
    if kind == BFLOAT16:
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) & 0x7FFF0000
        sent = min(rounded, LARGEST_BFLOAT16_BITS) | sign
        return sent >> 16, sent
    # Signs are random: with branches, half of all values would be mispredicted.
    negative = sign >> 31
    most = positives + (negatives - positives) * negative
    level = min(max(((magnitude + (1 << (shift - 1))) >> shift) - base + 1, 0), most)
    some = np.int64(level > 0)
    return level + positives * (negative & some), (((base + level - 1) << shift) | sign) * some


@kernel
def _value(code, kind, shift, base, positives):
    """Return the float32's bits that a code stands for."""
    if kind == FLOAT32:
        return code
    if kind == BFLOAT16:
        return code << 16
    negative = np.int64(code > positives)
    level = code - positives * negative
    return (((base + level - 1) << shift) | negative << 31) * np.int64(code > 0)


def take(
    coeffs: Coefficients, bins_per_block: int, coding: Coding, keep: bool
) -> tuple[Array, Array]:
    """See ``reference.take``."""
    array, peak, key, ties = coeffs
    reals = array.view(np.float32)
    is_complex = array.dtype == np.complex64
    width = 2 if is_complex else 1
    exponent = key_exponent(peak) if is_complex else 0
    options = (is_complex, bins_per_block, key_scale(exponent))
    ranges = threads.ranges(-(-array.size // GROUP), LEAST_GROUPS)
    bitmap = np.empty(ranges[-1][1] * (GROUP // 64), np.uint64)

    def reals_of(begin: int, end: int) -> Array:
        return reals[begin * GROUP * width : end * GROUP * width]

    def work(begin: int, end: int, ties: int) -> tuple[int, Array]:
        part = reals_of(begin, end)
        words = bitmap[begin * (GROUP // 64) : end * (GROUP // 64)]
        packed = np.empty(part.size * coding.bits // 64 + 2, np.uint64)
        return _take(part, *options, key, ties, *coding[:6], keep, words, packed), packed

    ties_left = [ties]
    if len(ranges) > 1:  # of those in earlier ranges, which come first
        equal = threads.each(lambda a, b: _count_equal(reals_of(a, b), *options, key), ranges)
        for count in equal[:-1]:
            ties_left.append(max(0, ties_left[-1] - count))
    parts = threads.each(
        work, ((*pair, left) for pair, left in zip(ranges, ties_left, strict=True))
    )
    return bitmap[: (array.size + 63) // 64], _joined(parts)


@kernel
def _count_equal(reals, is_complex, bins_per_block, scale, key):
    keys = np.empty(GROUP, np.int32)
    size = GROUP * (2 if is_complex else 1)
    count = 0
    for begin in range(0, reals.size, size):
        fill_keys(reals[begin : begin + size], is_complex, bins_per_block, scale, keys)
        for i in range(GROUP):
            count += keys[i] == key
    return count


@kernel
def _take(
    reals, is_complex, bins_per_block, scale, key, ties,
    kind, bits, shift, base, positives, negatives, keep, bitmap, packed,
):  # fmt: skip
    """Choose, pack and subtract in one pass; return the bits packed."""
    keys = np.empty(GROUP, np.int32)
    at = np.int64(keys.ctypes.data)
    patterns = reals.view(np.uint32)
    width = 2 if is_complex else 1
    window, filled, done = np.uint64(0), 0, 0
    for group in range(bitmap.size * 64 // GROUP):
        begin = group * GROUP * width
        fill_keys(reals[begin : begin + GROUP * width], is_complex, bins_per_block, scale, keys)
        for word in range(GROUP // 64):
            chosen = np.int64(mask_above(at + 256 * word, key))
            if ties > 0:
                equal = np.int64(mask_above(at + 256 * word, key - 1)) ^ chosen
                while equal != 0 and ties > 0:
                    chosen |= equal & -equal
                    equal &= equal - 1
                    ties -= 1
            bitmap[group * (GROUP // 64) + word] = np.uint64(chosen)
            first = begin + 64 * word * width
            if chosen == -1 and kind == BFLOAT16 and not (keep or is_complex):
                source, target = np.int64(reals.ctypes.data), np.int64(packed.ctypes.data)
                to_bfloat16(source + 4 * first, target + 8 * done)
                done += 16
                continue
            while chosen != 0:
                i = first + trailing_zeros(chosen) * width
                chosen &= chosen - 1
                for part in range(i, i + width):
                    pattern = np.int64(patterns[part])
                    code, sent = _code(pattern, kind, shift, base, positives, negatives)
                    window |= np.uint64(code) << np.uint64(filled)
                    filled += bits
                    if filled >= 64:
                        packed[done] = window
                        done += 1
                        filled -= 64
                        window = np.uint64(code) >> np.uint64(bits - filled)
                    if keep:
                        reals[part] -= as_float(sent)
    packed[done] = window
    return 64 * done + filled


def _joined(parts: list[tuple[int, Array]]) -> Array:
    """Return streams of bits as one, uint8."""
    total = sum(n_bits for n_bits, _ in parts)
    _, joined = parts[0]
    if len(parts) > 1:
        joined = np.zeros(total // 64 + 2, np.uint64)
        at = 0
        for n_bits, words in parts:
            _append(joined, at, words, n_bits)
            at += n_bits
    return joined.view(np.uint8)[: (total + 7) // 8]


@kernel
def _append(joined, at, words, n_bits):
    shift, to = np.uint64(at & 63), at >> 6
    for i in range((n_bits + 63) // 64):
        joined[to + i] |= words[i] << shift
        if shift:
            joined[to + i + 1] |= words[i] >> (np.uint64(64) - shift)


def sum_values(parts: Sequence[Part], n: int, is_complex: bool) -> Array:
    """See ``reference.sum_values``."""
    out = empty(n, np.complex64 if is_complex else np.float32)
    reals = out.view(np.float32)
    width = 2 if is_complex else 1
    streams = Streams(parts, width, GROUP, -(-n // GROUP))

    def work(begin: int, end: int, first_bits: Array) -> int:
        part = reals[begin * GROUP * width : end * GROUP * width]
        return _sum_groups(part, begin, width, *streams.arrays, first_bits)

    streams.check(threads.each(work, streams.ranges(LEAST_GROUPS)))
    return out


class Streams:
    """The bitmaps and codes of several payloads as arrays that kernels take, and where to begin.

    ``arrays``: bitmaps ``[p, words]``, codes ``[p, words]``, codings ``[p, 7]``.
    """

    def __init__(self, parts: Sequence[Part], width: int, span: int, n_spans: int) -> None:
        """``span``: bins that a thread takes on together, in whole groups; ``n_spans``: of all."""
        n_words = n_spans * (span // 64)
        bitmaps = np.zeros((len(parts), n_words), np.uint64)
        codes = np.zeros((len(parts), max(p.packed.size for p in parts) // 8 + 2), np.uint64)
        for bitmap, code, part in zip(bitmaps, codes, parts, strict=True):
            bitmap[: part.bitmap.size] = part.bitmap
            code.view(np.uint8)[: part.packed.size] = part.packed
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
        """Raise ValueError for what ``add_group`` has refused."""
        for number in bad:
            if number >= 0:
                raise ValueError(f"payload {number}: a value lies beyond what the scale allows")


@kernel
def _sum_groups(reals, first_group, width, bitmaps, codes, codings, bits):
    """Write the sum of all payloads' values, group after group; return the bad payload or -1."""
    bad = -1
    size = GROUP * width
    for begin in range(0, reals.size, size):
        group = reals[begin : begin + size]
        group[:] = np.float32(0)
        first_word = (first_group + begin // size) * (GROUP // 64)
        bad = max(bad, add_group(group, width, first_word, bitmaps, codes, codings, bits))
    return bad


@kernel
def add_group(reals, width, first_word, bitmaps, codes, codings, bits):
    """Add all payloads' values in a group of bins; return the number of a bad one, or -1."""
    bad = -1
    for p in range(bitmaps.shape[0]):
        kind, n_bits, shift = codings[p, 0], codings[p, 1], codings[p, 2]
        base, positives = codings[p, 3], codings[p, 4]
        end, largest = _add_values(
            reals, width, bitmaps[p, first_word : first_word + GROUP // 64], codes[p], bits[p],
            kind, n_bits, shift, base, positives,
        )  # fmt: skip
        bits[p] = end
        if largest > codings[p, 6]:
            bad = p
    return bad


@kernel
def _add_values(reals, width, bitmap, codes, bit, kind, bits, shift, base, positives):
    """Return (the stream bit after the last code, the largest code or magnitude)."""
    largest = np.int64(0)
    mask = np.uint64((1 << bits) - 1)
    for w in range(bitmap.size):
        chosen = np.int64(bitmap[w])
        if chosen == -1 and kind == BFLOAT16 and width == 1:
            source, target = np.int64(codes.ctypes.data), np.int64(reals.ctypes.data)
            peak = add_bfloat16(source + (bit >> 3), target + 256 * w)
            largest = max(largest, peak)
            bit += 1024
            continue
        while chosen != 0:
            i = (64 * w + trailing_zeros(chosen)) * width
            chosen &= chosen - 1
            for part in range(i, i + width):
                low = np.uint64(bit & 63)
                word = codes[bit >> 6] >> low
                word |= (codes[(bit >> 6) + 1] << np.uint64(1)) << (np.uint64(63) - low)
                code = np.int64(word & mask)
                bit += bits
                value = _value(code, kind, shift, base, positives)
                largest = max(largest, code if kind == RANGE else value & _MAGNITUDE)
                reals[part] += as_float(value)
    return bit, largest
