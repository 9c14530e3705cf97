"""Which coefficients are largest, on a CPU: their keys, and the k-th key without a sort."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from horovod_fftcomp import threads
from horovod_fftcomp.backends import Array
from horovod_fftcomp.backends.cpu.codelets import count_ones, mask_above, trailing_zeros

kernel: Any = njit(cache=True, nogil=True)

GROUP = 4096  # coefficients whose keys are computed at a time, into the L1 cache
LEAST_GROUPS = 8  # for a thread of its own
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NO_KEY = np.int32(-2)  # below every key, and below what is above every key
_SAMPLES = 1 << 14
_ABOVE_ALL = 0x7FFFFFFF


def key_scale(exponent: int) -> np.float32:
    """Return what complex coefficients are multiplied by before they are squared."""
    return np.float32(2.0**-exponent)


@kernel
def fill_keys(reals, is_complex, bins_per_block, scale, keys):
    """Write the keys of a group that begins with a block, at most ``keys.size``; pad the rest."""
    if is_complex:
        energies = keys.view(np.float32)
        n = reals.size // 2
        for i in range(n):
            re, im = reals[2 * i] * scale, reals[2 * i + 1] * scale
            energies[i] = re * re + im * im
        for i in range(0, n, bins_per_block):
            energies[i] *= np.float32(0.5)
    else:
        patterns = reals.view(np.int32)
        n = patterns.size
        for i in range(n):
            keys[i] = patterns[i] & _MAGNITUDE
    keys[n:] = _NO_KEY


def kth_key(coeffs: Array, k: int, bins_per_block: int, exponent: int) -> tuple[int, int]:
    """See ``reference.kth_key``; one pass, between limits that a sample of the keys suggests."""
    reals = coeffs.view(np.float32)
    options = (coeffs.dtype == np.complex64, bins_per_block, key_scale(exponent))
    low, high = _limits(reals, k, coeffs.size, *options)
    room = max(coeffs.size // 8, 2 * _SAMPLES)
    above, equal, found = _count(reals, coeffs.size, options, low, high, room)
    if above >= k or above + (equal or found.size) < k:  # a miss, or too many between
        above, equal, found = _count(reals, coeffs.size, options, 0, _ABOVE_ALL, coeffs.size)
    if equal:
        return low, k - above
    return _kth(found, k - above)


def _limits(
    reals: Array, k: int, n: int, is_complex: bool, bins_per_block: int, scale: np.float32
) -> tuple[int, int]:
    """Return keys that the k-th of ``n`` lies between, all but surely."""
    if n <= 2 * _SAMPLES:
        return 0, _ABOVE_ALL
    keys = _sample(reals, n, is_complex, bins_per_block, scale, np.empty(_SAMPLES, np.int32))
    rank = k * _SAMPLES / n
    margin = 4 * rank**0.5 + 8
    low, high = int(rank + margin), int(rank - margin)
    keys.sort()
    return (
        int(keys[-low]) if low <= _SAMPLES else 0,
        int(keys[-high]) if high >= 1 else _ABOVE_ALL,
    )


@kernel
def _sample(reals, n, is_complex, bins_per_block, scale, keys):
    """Fill ``keys`` with those of places spread over all ``n``, one at random in each stretch."""
    random = np.uint64(0x9E3779B97F4A7C15)
    stretch = n // keys.size
    for i in range(keys.size):
        random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        at = i * stretch + np.int64(random >> np.uint64(33)) % stretch
        if is_complex:
            re, im = reals[2 * at] * scale, reals[2 * at + 1] * scale
            energy = re * re + im * im
            if at % bins_per_block == 0:
                energy *= np.float32(0.5)
            keys.view(np.float32)[i] = energy
        else:
            keys[i] = reals.view(np.int32)[at] & _MAGNITUDE
    return keys


def _count(
    reals: Array, n: int, options: tuple, low: int, high: int, room: int
) -> tuple[int, int, Array]:
    """Return (keys above ``high``, keys equal to it if ``low`` is, the keys from ``low`` to it).

    No keys are returned where there is no ``room`` for all.
    """
    width = reals.size // n

    def work(begin: int, end: int) -> tuple[int, int, Array]:
        part = reals[begin * GROUP * width : end * GROUP * width]
        found = np.empty(0 if low == high else room + 64, np.int32)
        above, between = _count_groups(part, *options, low, high, found)
        return above, between, found[:between]

    parts = threads.each(work, threads.ranges(-(-n // GROUP), LEAST_GROUPS))
    if low != high and any(part[1] > room for part in parts):
        return 0, 0, np.empty(0, np.int32)
    above = sum(part[0] for part in parts)
    equal = sum(part[1] for part in parts) if low == high else 0
    return above, equal, np.concatenate([part[2] for part in parts])


@kernel
def _count_groups(reals, is_complex, bins_per_block, scale, low, high, found):
    above = between = 0
    keys = np.empty(GROUP, np.int32)
    at = np.int64(keys.ctypes.data)
    size = GROUP * (2 if is_complex else 1)
    for begin in range(0, reals.size, size):
        fill_keys(reals[begin : begin + size], is_complex, bins_per_block, scale, keys)
        for word in range(GROUP // 64):
            over = mask_above(at + 256 * word, high)
            inside = mask_above(at + 256 * word, low - 1) ^ over
            above += count_ones(np.int64(over))
            if inside != 0:
                left = np.int64(inside)
                while left != 0 and between + 64 <= found.size:
                    found[between] = keys[64 * word + trailing_zeros(left)]
                    left &= left - 1
                    between += 1
                between += count_ones(left)
    return above, between


@kernel
def _kth(keys, k):
    """Return (the k-th largest key, how many of those equal to it belong to the k largest)."""
    threshold, prefix_bits, need = np.int64(0), 0, k
    for digit_bits in (11, 10, 10):
        shift = 31 - prefix_bits - digit_bits
        counts = np.zeros(1 << digit_bits, np.int64)
        mask = (1 << digit_bits) - 1
        above = 31 - prefix_bits
        prefix = threshold >> above
        for key in keys:
            if np.int64(key) >> above == prefix:
                counts[(np.int64(key) >> shift) & mask] += 1
        digit = mask
        while digit > 0 and counts[digit] < need:
            need -= counts[digit]
            digit -= 1
        threshold |= digit << shift
        prefix_bits += digit_bits
    return threshold, need
