"""Values on a CPU: chosen coefficients to packed codes and back, and dense ones to half width."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from horovod_fftcomp import threads
from horovod_fftcomp.backends import Array
from horovod_fftcomp.backends.cpu.codelets import as_float, mask_above, trailing_zeros
from horovod_fftcomp.backends.cpu.positions import as_words, count_bits
from horovod_fftcomp.backends.cpu.selection import GROUP, LEAST_GROUPS, fill_keys, key_scale
from horovod_fftcomp.quantizers import BFLOAT16, FLOAT32, LARGEST_BFLOAT16_BITS, RANGE, Coding

kernel: Any = njit(cache=True, nogil=True)

_LEAST_VALUES = 1 << 15  # for a thread of its own
_LEAST_WORDS = 1 << 9
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


def add(flat: Array, residual: Array | None) -> tuple[Array, int]:
    """See ``reference.add``."""
    out = np.empty(flat.size, np.float32)
    if residual is None:
        np.copyto(out, flat)
        return out, peak_bits(out)
    ranges = threads.ranges(flat.size, _LEAST_VALUES)
    peaks = threads.each(lambda a, b: _add(flat[a:b], residual[a:b], out[a:b]), ranges)
    return out, max(peaks)


@kernel
def _add(a, b, out):
    peak = np.int32(0)
    patterns = out.view(np.int32)
    for i in range(out.size):
        out[i] = a[i] + b[i]
        peak = max(peak, patterns[i] & np.int32(_MAGNITUDE))
    return np.int64(peak)


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
    coeffs: Array,
    key: int,
    ties: int,
    bins_per_block: int,
    exponent: int,
    coding: Coding,
    keep: bool,
) -> tuple[Array, Array]:
    """See ``reference.take``."""
    reals = coeffs.view(np.float32)
    is_complex = coeffs.dtype == np.complex64
    width = 2 if is_complex else 1
    options = (is_complex, bins_per_block, key_scale(exponent))
    ranges = threads.ranges(-(-coeffs.size // GROUP), LEAST_GROUPS)
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
    return bitmap[: (coeffs.size + 63) // 64], _joined(parts)


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


def add_values(total: Array, bitmap: Array, packed: Array, coding: Coding) -> None:
    """See ``reference.add_values``."""
    reals = total.view(np.float32)
    width = 2 if total.dtype == np.complex64 else 1
    codes = as_words(packed, packed.size // 8 + 2)
    ranges = threads.ranges(bitmap.size, _LEAST_WORDS)
    counts = threads.each(lambda a, b: count_bits(bitmap[a:b]), ranges)
    first_bits = (np.cumsum([0, *counts[:-1]]) * width * coding.bits).tolist()

    def work(begin: int, end: int, first_bit: int) -> int:
        part = reals[begin * 64 * width : end * 64 * width]
        return _add_values(part, width, bitmap[begin:end], codes, first_bit, *coding[:5])

    largest = threads.each(
        work, ((*pair, bit) for pair, bit in zip(ranges, first_bits, strict=True))
    )
    if max(largest) > coding.largest:
        raise ValueError("a value lies beyond the range that the scale allows")


@kernel
def _add_values(reals, width, bitmap, codes, bit, kind, bits, shift, base, positives):
    """Add the values from stream bit ``bit`` on; return the largest code, or magnitude."""
    largest = np.int64(0)
    mask = np.uint64((1 << bits) - 1)
    for w in range(bitmap.size):
        chosen = np.int64(bitmap[w])
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
    return largest
