"""The kernels on a CPU: Numba for selection, quantization and packing, SciPy for transforms.

Same names, arguments and bytes as ``reference``, which documents them. Kernels release the GIL.
"""

from __future__ import annotations

import numpy as np
import scipy.fft
from numba import njit

from horovod_fftcomp.backends import Array
from horovod_fftcomp.backends.reference import unary_bits
from horovod_fftcomp.quantizers import RangeGrid

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SQRT_HALF = np.float32(np.sqrt(0.5))

# No fastmath: contraction or reordering would change bytes from one machine to the next.
kernel = njit(cache=True, nogil=True)


def rfft_blocks(blocks: Array) -> Array:
    """See ``reference.rfft_blocks``."""
    length = blocks.shape[1]
    full = scipy.fft.rfft(blocks * np.float32(1 / length), axis=1, overwrite_x=True)
    packed = np.ascontiguousarray(full[:, :-1])
    packed.imag[:, 0] = full.real[:, -1]
    return packed


def irfft_blocks(spectrum: Array) -> Array:
    """See ``reference.irfft_blocks``."""
    rows, n_bins = spectrum.shape
    full = np.empty((rows, n_bins + 1), np.complex64)
    full[:, :-1] = spectrum
    full[:, -1] = spectrum.imag[:, 0]
    full.imag[:, 0] = 0
    return scipy.fft.irfft(full, n=2 * n_bins, axis=1, norm="forward", overwrite_x=True)


def dct_blocks(blocks: Array) -> Array:
    """See ``reference.dct_blocks``; scaled down before the sums, so that they cannot overflow."""
    length = blocks.shape[1]
    coeffs = scipy.fft.dct(blocks * np.float32(0.125 / length), axis=1, overwrite_x=True)
    weights = np.full(length, np.sqrt(32), np.float32)
    weights[0] = 4
    coeffs *= weights
    return coeffs


def idct_blocks(coeffs: Array) -> Array:
    """See ``reference.idct_blocks``."""
    scaled = coeffs * _SQRT_HALF
    scaled[:, 0] = coeffs[:, 0]
    return scipy.fft.idct(scaled, axis=1, norm="forward", overwrite_x=True)


def peak_bits(values: Array) -> int:
    """See ``reference.peak_bits``."""
    return int(_peak_bits(values.view(np.uint32)))


@kernel
def _peak_bits(patterns):
    peak = np.uint32(0)
    for pattern in patterns:
        peak = max(peak, pattern & _MAGNITUDE)
    return peak


def select_top_k(coeffs: Array, k: int, bins_per_block: int, exponent: int) -> Array:
    """See ``reference.select_top_k``; finds the k-th key by three histograms, without a sort."""
    if coeffs.dtype == np.complex64:
        scale = np.float32(2.0**-exponent)
        keys = _energy_keys(coeffs.view(np.float32), bins_per_block, scale).view(np.uint32)
    else:
        keys = coeffs.view(np.uint32)
    return _select(keys, k)


@kernel
def _energy_keys(reals, bins_per_block, scale):
    keys = np.empty(reals.size // 2, np.float32)
    for i in range(keys.size):
        re, im = reals[2 * i] * scale, reals[2 * i + 1] * scale
        keys[i] = re * re + im * im
    for i in range(0, keys.size, bins_per_block):
        keys[i] *= np.float32(0.5)
    return keys


@kernel
def _select(patterns, k):
    """Positions of the k largest ``patterns`` without their sign bits, ascending."""
    threshold, prefix_bits, need = np.uint32(0), 0, k
    for digit_bits in (11, 10, 10):
        shift = 31 - prefix_bits - digit_bits
        counts = np.zeros(1 << digit_bits, np.int64)
        mask = np.uint32((1 << digit_bits) - 1)
        above = np.uint32(31 - prefix_bits)
        prefix = threshold >> above
        for pattern in patterns:
            key = pattern & _MAGNITUDE
            if key >> above == prefix:
                counts[(key >> np.uint32(shift)) & mask] += 1
        digit = (1 << digit_bits) - 1
        while digit > 0 and counts[digit] < need:
            need -= counts[digit]
            digit -= 1
        threshold |= np.uint32(digit << shift)
        prefix_bits += digit_bits
    # One spare place: the slot that a rejected position is written to is overwritten later.
    positions = np.empty(k + 1, np.int64)
    found = 0
    for i in range(patterns.size):
        key = patterns[i] & _MAGNITUDE
        tie = key == threshold
        positions[found] = i
        if key > threshold or (tie and need > 0):
            found += 1
        need -= tie
    return positions[:k]


def quantize_range_float(values: Array, grid: RangeGrid) -> Array:
    """See ``reference.quantize_range_float``."""
    return _quantize(values.view(np.uint32), *grid)


@kernel
def _quantize(patterns, shift, base, positives, negatives):
    codes = np.empty(patterns.size, np.uint16)
    half = np.int64(1) << (shift - 1)
    for i in range(patterns.size):
        cell = (np.int64(patterns[i] & _MAGNITUDE) + half) >> shift
        level = max(cell - base + 1, 0)
        if patterns[i] > _MAGNITUDE:
            level = min(level, negatives)
            codes[i] = positives + level if level > 0 else 0
        else:
            codes[i] = min(level, positives)
    return codes


def dequantize_range_float(codes: Array, grid: RangeGrid) -> Array:
    """See ``reference.dequantize_range_float``."""
    return _dequantize(codes, grid.shift, grid.base, grid.positives).view(np.float32)


@kernel
def _dequantize(codes, shift, base, positives):
    patterns = np.empty(codes.size, np.uint32)
    for i in range(codes.size):
        code = np.int64(codes[i])
        if code == 0:
            patterns[i] = 0
        elif code <= positives:
            patterns[i] = (base + code - 1) << shift
        else:
            patterns[i] = ((base + code - positives - 1) << shift) | 0x80000000
    return patterns


def pack_bits(codes: Array, bits: int) -> Array:
    """See ``reference.pack_bits``."""
    packed = np.empty((codes.size * bits + 7) // 8, np.uint8)
    _pack_bits(codes, bits, packed)
    return packed


@kernel
def _pack_bits(codes, bits, packed):
    window, filled, at = np.uint64(0), 0, 0
    for code in codes:
        window |= np.uint64(code) << np.uint64(filled)
        filled += bits
        while filled >= 8:
            packed[at] = window & np.uint64(0xFF)
            window >>= np.uint64(8)
            filled -= 8
            at += 1
    if filled > 0:
        packed[at] = window & np.uint64(0xFF)


def unpack_bits(packed: Array, count: int, bits: int) -> Array:
    """See ``reference.unpack_bits``."""
    if packed.size * 8 < count * bits:
        raise ValueError("the codes are cut short")
    return _unpack_bits(packed, count, bits)


@kernel
def _unpack_bits(packed, count, bits):
    codes = np.empty(count, np.uint16)
    window, filled, at = np.uint64(0), 0, 0
    mask = np.uint64((1 << bits) - 1)
    for i in range(count):
        while filled < bits:
            window |= np.uint64(packed[at]) << np.uint64(filled)
            filled += 8
            at += 1
        codes[i] = window & mask
        window >>= np.uint64(bits)
        filled -= bits
    return codes


def pack_bitmap(positions: Array, n: int) -> Array:
    """See ``reference.pack_bitmap``."""
    packed = np.zeros((n + 7) // 8, np.uint8)
    _set_bits(positions, 0, 0, packed)
    return packed


@kernel
def _set_bits(positions, low_bits, stride, packed):
    """Set bit (position_i >> low_bits) + i * stride for every i."""
    for i in range(positions.size):
        bit = (positions[i] >> low_bits) + i * stride
        packed[bit >> 3] |= np.uint8(1 << (bit & 7))


def unpack_bitmap(packed: Array, n: int, k: int) -> Array:
    """See ``reference.unpack_bitmap``."""
    positions = np.empty(k, np.int64)
    if not _find_bits(packed, n, positions):
        raise ValueError("the bitmap does not have k bits set")
    return positions


@kernel
def _find_bits(packed, n, positions):
    """Fill ``positions`` with the set bits; False unless there are just as many, below n."""
    found = 0
    for at in range(packed.size):
        byte = packed[at]
        if byte == 0:
            continue
        for bit in range(8):
            if byte >> bit & 1:
                if found == positions.size:
                    return False
                positions[found] = 8 * at + bit
                found += 1
    return found == positions.size and (found == 0 or positions[found - 1] < n)


def pack_offsets(positions: Array, n: int, low_bits: int) -> Array:
    """See ``reference.pack_offsets``."""
    n_unary = (unary_bits(n, positions.size, low_bits) + 7) // 8
    packed = np.zeros(n_unary + (positions.size * low_bits + 7) // 8, np.uint8)
    _set_bits(positions, low_bits, 1, packed[:n_unary])
    _pack_bits(positions & ((1 << low_bits) - 1), low_bits, packed[n_unary:])
    return packed


def unpack_offsets(packed: Array, n: int, k: int, low_bits: int) -> Array:
    """See ``reference.unpack_offsets``."""
    n_unary = unary_bits(n, k, low_bits)
    split = (n_unary + 7) // 8
    positions = unpack_bitmap(packed[:split], n_unary, k)
    offsets = unpack_bits(packed[split:], k, low_bits)
    if not _join_offsets(positions, offsets, low_bits, n):
        raise ValueError("the positions do not ascend below n")
    return positions


@kernel
def _join_offsets(positions, offsets, low_bits, n):
    """Turn the places of unary ones into positions, in place; False unless they ascend below n."""
    last = np.int64(-1)
    for i in range(positions.size):
        position = ((positions[i] - i) << low_bits) | np.int64(offsets[i])
        if position <= last:
            return False
        positions[i] = last = position
    return last < n


def add_at(total: Array, positions: Array, values: Array) -> None:
    """See ``reference.add_at``."""
    _add_at(total, positions, values)


@kernel
def _add_at(total, positions, values):
    for i in range(positions.size):
        total[positions[i]] += values[i]
