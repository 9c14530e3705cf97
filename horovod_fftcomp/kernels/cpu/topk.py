"""Top-k selection on a CPU: keys of coefficients, and the k-th largest key without a sort.

Limits for the k-th key are estimated from a sample of the keys. One pass, possibly the one that
computes the coefficients, counts the keys above the limits and collects those between; the k-th
key is then selected among these. If the limits prove wrong, all keys are collected: the sample
affects speed alone.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels.cpu.arrays import as_float32, as_int32
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.vector_values import count_ones, mask_above, trailing_zeros

GROUP = 4096  # coefficients whose keys are computed at a time, in the L1 cache
LEAST_GROUPS = 8  # per thread, at least
SAMPLES = 1 << 14
_MAGNITUDE = np.int32(0x7FFFFFFF)
_NO_KEY = np.int32(-2)  # below every key, and below -1, the limit that selects all keys from 0 up
_ABOVE_ALL = 0x7FFFFFFF
FEW_SAMPLES = 2048  # the least of a large tensor, the most of a small one; a multiple of 64
_UNKNOWN_BITS = 15  # of a limit's 31: a wider range only lets a few more keys pass


def key_scale(exponent: int) -> np.float32:
    """Return 2^-exponent, by which complex coefficients are scaled before they are squared."""
    return np.float32(2.0**-exponent)


@inlined
def fill_keys(reals, is_complex, bins_per_block, scale, keys):
    """Write the keys of a group's coefficients, ``keys.size`` at most, and pad the rest.

    A complex group begins with a block.
    """
    if is_complex:
        energies = as_float32(keys)
        n = reals.size // 2
        for i in range(n):
            re, im = reals[2 * i] * scale, reals[2 * i + 1] * scale
            energies[i] = re * re + im * im
        for i in range(0, n, bins_per_block):
            energies[i] *= np.float32(0.5)
    else:
        patterns = as_int32(reals)
        n = patterns.size
        for i in range(n):
            keys[i] = patterns[i] & _MAGNITUDE
    keys[n:] = _NO_KEY


@inlined
def drawn(random):
    """Return the random bits, uint64, that follow ``random``."""
    return random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)


@inlined
def below(random, n):
    """Return a number from 0 to ``n`` - 1, at most 2^31, by random bits."""
    return np.int64(random >> np.uint64(33)) * n >> 31


@allocating
def sample_of(reals, n, is_complex, bins_per_block, scale, keys):
    """Fill ``keys`` with a stratified sample of the ``n``: one key at random from each stretch."""
    random = np.uint64(0x9E3779B97F4A7C15)
    stretch = n // keys.size
    for i in range(keys.size):
        random = drawn(random)
        at = i * stretch + below(random, stretch)
        if is_complex:
            re, im = reals[2 * at] * scale, reals[2 * at + 1] * scale
            energy = re * re + im * im
            if at % bins_per_block == 0:
                energy *= np.float32(0.5)
            as_float32(keys)[i] = energy
        else:
            keys[i] = as_int32(reals)[at] & _MAGNITUDE
    return keys


@allocating
def count_groups(reals, is_complex, bins_per_block, scale, low, high, found):
    """Return the sums of ``count_keys`` over all groups of coefficients."""
    above = between = kept = np.int64(0)
    keys = np.empty(GROUP, np.int32)
    size = GROUP * (2 if is_complex else 1)
    for begin in range(0, reals.size, size):
        fill_keys(reals[begin : begin + size], is_complex, bins_per_block, scale, keys)
        more, inside, kept = count_keys(keys, low, high, found, kept)
        above += more
        between += inside
    return above, between, kept


@inlined
def count_keys(keys, low, high, found, kept):
    """Count keys, a multiple of 64: return (number above high, number in [low, high], ``kept``).

    Keys in [low, high] are appended to ``found`` from ``kept`` on, as far as it is large enough.
    """
    at = np.int64(keys.ctypes.data)
    above = between = np.int64(0)
    for word in range(keys.size // 64):
        over = mask_above(at + 256 * word, high)
        inside = np.int64(mask_above(at + 256 * word, low - 1) ^ over)
        above += count_ones(np.int64(over))
        between += count_ones(inside)
        while inside != 0 and kept < found.size:
            found[kept] = keys[64 * word + trailing_zeros(inside)]
            inside &= inside - 1
            kept += 1
    return above, between, kept


@allocating
def kth_of_few(reals, n, k, options, found):
    """Return (the k-th largest key of ``n``, number of keys equal to it among the k largest).

    ``options``: the next arguments of ``count_groups``. ``found``: int32, whole groups.
    """
    low, high = np.int64(0), np.int64(_ABOVE_ALL)
    n_samples = min(FEW_SAMPLES, n // 512 * 64)
    if n_samples:
        low, high = limits_among(sample_of(reals, n, *options, found[:n_samples]), k, n, 1)
    above, between, kept = count_groups(reals, *options, low, high, found)
    if not above < k <= above + between:
        low, high = np.int64(0), np.int64(_ABOVE_ALL)
        above, _, kept = count_groups(reals, *options, low, high, found)
    padded = (kept + 63) // 64 * 64
    found[kept:padded] = _NO_KEY
    key = kth_by_bits(found[:padded], k - above, low, high, 0)
    return key, k - above - keys_above(found[:padded], key)


@inlined
def limits_among(sample, k, n, spread):
    """Return limits, both inclusive, of the k-th largest of ``n`` keys, estimated from a sample.

    ``sample``: a multiple of 64 keys. ``spread``: the standard deviation of a key's rank in it, as
    a multiple of that in an independent sample.
    """
    low, high = np.int64(0), np.int64(_ABOVE_ALL)
    rank = k * sample.size / n
    margin = 4 * spread * rank**0.5 + 8
    if rank + margin <= sample.size:
        low = kth_by_bits(sample, np.int64(rank + margin), low, high, _UNKNOWN_BITS)
    if rank - margin >= 1:
        high = kth_by_bits(sample, np.int64(rank - margin), low, high, _UNKNOWN_BITS)
        high |= (1 << _UNKNOWN_BITS) - 1
    return low, high


@inlined
def kth_by_bits(keys, k, low, high, n_unknown):
    """Return the k-th largest key with its lowest ``n_unknown`` bits cleared.

    ``keys``: a multiple of 64. ``low``, ``high``: of the k-th largest key, both inclusive.
    """
    bit = 30
    while bit >= n_unknown and not (low ^ high) >> bit:
        bit -= 1
    key = low >> (bit + 1) << (bit + 1)  # the bits that all keys between them share
    while bit >= n_unknown:
        trial = key | 1 << bit
        if keys_above(keys, trial - 1) >= k:
            key = trial
        bit -= 1
    return key


@inlined
def keys_above(keys, limit):
    """Return the number of keys above ``limit``; ``keys``: a multiple of 64."""
    at, count = np.int64(keys.ctypes.data), 0
    for word in range(keys.size // 64):
        count += count_ones(np.int64(mask_above(at + 256 * word, limit)))
    return count


@kernel
def kth_key(reals, k, options, found):
    """Return as ``kth_of_few``, as a kernel of its own."""
    return kth_of_few(reals, reals.size // (2 if options[0] else 1), k, options, found)
