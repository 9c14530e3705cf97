"""Every kernel in plain NumPy: slow, and the definition that the other backends are held to.

Given equal coefficients all backends return equal bytes. Transforms alone agree to a tolerance,
since libraries of FFTs round differently.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.backends import Array
from horovod_fftcomp.quantizers import RangeGrid

# NaN and Inf in a gradient are told by its coefficients; NumPy need not warn of them as well.
_quiet = np.errstate(invalid="ignore", over="ignore")


@_quiet
def rfft_blocks(blocks: Array) -> Array:
    """Return the packed half-spectrum of each row, complex64 ``[B, L/2]``, scaled by 1/L.

    ``blocks``: float32 ``[B, L]``. Bin 0 holds (DC, Nyquist) as its real and imaginary part.
    Scaling before the transform keeps every coefficient below the largest input, so that no
    finite gradient overflows.
    """
    length = blocks.shape[1]
    full = np.fft.rfft(blocks * np.float32(1 / length), axis=1)
    packed = full[:, :-1].astype(np.complex64)
    packed[:, 0] = full[:, 0].real + 1j * full[:, -1].real
    return packed


def irfft_blocks(spectrum: Array) -> Array:
    """Return the rows whose packed half-spectra are given: the inverse of ``rfft_blocks``."""
    n_bins = spectrum.shape[1]
    full = np.empty((len(spectrum), n_bins + 1), np.complex64)
    full[:, :-1] = spectrum
    full[:, 0] = spectrum[:, 0].real
    full[:, -1] = spectrum[:, 0].imag
    return np.fft.irfft(full, n=2 * n_bins, axis=1, norm="forward").astype(np.float32)


def _dct_matrix(length: int) -> Array:
    """Return the orthonormal DCT-II, float64 ``[L, L]``: row j is the j-th cosine."""
    j, i = np.mgrid[:length, :length]
    matrix = np.sqrt(2 / length) * np.cos(np.pi * (i + 0.5) * j / length)
    matrix[0] /= np.sqrt(2)
    return matrix


@_quiet
def dct_blocks(blocks: Array) -> Array:
    """Return the DCT-II of each row of float32 ``[B, L]``, orthonormal divided by sqrt(L)."""
    length = blocks.shape[1]
    return (blocks @ _dct_matrix(length).T / np.sqrt(length)).astype(np.float32)


def idct_blocks(coeffs: Array) -> Array:
    """Return the rows whose DCTs are given: the inverse of ``dct_blocks``."""
    length = coeffs.shape[1]
    return (coeffs @ _dct_matrix(length) * np.sqrt(length)).astype(np.float32)


def magnitude_bits(values: Array) -> Array:
    """Return the bit patterns of the absolute values, uint32; they order as the values do."""
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def peak_bits(values: Array) -> int:
    """Return the largest bit pattern of any |component|; 0x7F800000 or more: Inf or NaN inside."""
    return int(magnitude_bits(values.view(np.float32)).max(initial=0))


def selection_keys(coeffs: Array, bins_per_block: int, exponent: int) -> Array:
    """Return what a coefficient is ranked by, uint32.

    Reals rank by magnitude. Complex bins rank by the energy that they stand for, re^2 + im^2 in
    float32 without fused multiply-add, after an exact scaling by 2^-exponent; bin 0 of a block
    counts half, since an interior bin stands for itself and its mirror image.
    """
    if coeffs.dtype == np.float32:
        return magnitude_bits(coeffs)
    scaled = coeffs * np.float32(2.0**-exponent)
    energy = scaled.real * scaled.real + scaled.imag * scaled.imag
    energy[::bins_per_block] *= np.float32(0.5)
    return energy.view(np.uint32)


def select_top_k(coeffs: Array, k: int, bins_per_block: int, exponent: int) -> Array:
    """Return the positions of the ``k`` largest keys, int64, ascending; ties: lower index wins.

    ``coeffs``: finite float32 or complex64, 1-D. ``bins_per_block`` and ``exponent`` matter for
    complex coefficients alone, see ``selection_keys``.
    """
    keys = selection_keys(coeffs, bins_per_block, exponent)
    best_first = np.argsort(-keys.astype(np.int64), kind="stable")
    return np.sort(best_first[:k])


def quantize_range_float(values: Array, grid: RangeGrid) -> Array:
    """Return the codes of float32 ``values``, uint16, in the cells of ``grid``."""
    half = 1 << (grid.shift - 1)
    cells = (magnitude_bits(values).astype(np.int64) + half) >> grid.shift
    negative = values < 0
    most = np.where(negative, grid.negatives, grid.positives)
    levels = np.clip(cells - grid.base + 1, 0, most)
    return np.where(negative & (levels > 0), grid.positives + levels, levels).astype(np.uint16)


def dequantize_range_float(codes: Array, grid: RangeGrid) -> Array:
    """Return the float32 value of each uint16 code; code 0 is +0."""
    codes = codes.astype(np.int64)
    negative = codes > grid.positives
    levels = np.where(negative, codes - grid.positives, codes)
    magnitudes = ((grid.base + levels - 1) << grid.shift).astype(np.uint32).view(np.float32)
    values = np.where(negative, -magnitudes, magnitudes)
    return np.where(codes == 0, np.float32(0), values).astype(np.float32)


def pack_bits(codes: Array, bits: int) -> Array:
    """Return uint16 codes at ``bits`` bits each, uint8: code j lies at stream bits [j*bits, ...).

    Stream bit b is bit (b mod 8) of byte b // 8.
    """
    flags = (codes[:, None] >> np.arange(bits, dtype=np.uint16)) & 1
    return np.packbits(flags.astype(np.uint8).ravel(), bitorder="little")


def unpack_bits(packed: Array, count: int, bits: int) -> Array:
    """Return the ``count`` codes that ``pack_bits`` packed, uint16."""
    flags = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    return (flags.astype(np.uint16) << np.arange(bits, dtype=np.uint16)).sum(1, dtype=np.uint16)


def pack_bitmap(positions: Array, n: int) -> Array:
    """Return one bit for each of ``n`` places, set at ``positions``; uint8, ceil(n / 8)."""
    flags = np.zeros(n, np.uint8)
    flags[positions] = 1
    return np.packbits(flags, bitorder="little")


def unpack_bitmap(packed: Array, n: int, k: int) -> Array:
    """Return the positions of the ``k`` set bits, int64; ValueError if there are not ``k``."""
    flags = np.unpackbits(packed, bitorder="little")
    positions = np.flatnonzero(flags)
    if len(positions) != k or flags[n:].any():
        raise ValueError("the bitmap does not have k bits set")
    return positions


def pack_offsets(positions: Array, n: int, low_bits: int) -> Array:
    """Return ascending ``positions`` as offsets in blocks of 2^low_bits places; uint8.

    First the blocks' counts in unary, k ones and one zero for each block: the i-th one lies at
    stream bit (position_i >> low_bits) + i. Then, from the next whole byte on, the offset of each
    position in its block, ``low_bits`` bits each. (Elias 1974, Fano 1971.)
    """
    unary = pack_bitmap(
        (positions >> low_bits) + np.arange(len(positions)), unary_bits(n, len(positions), low_bits)
    )
    offsets = (positions & ((1 << low_bits) - 1)).astype(np.uint16)
    return np.concatenate([unary, pack_bits(offsets, low_bits)])


def unpack_offsets(packed: Array, n: int, k: int, low_bits: int) -> Array:
    """Return the ``k`` positions that ``pack_offsets`` packed, int64.

    ValueError unless they are ``k`` ascending numbers below ``n``.
    """
    n_unary = unary_bits(n, k, low_bits)
    unary = unpack_bitmap(packed[: (n_unary + 7) // 8], n_unary, k)
    offsets = unpack_bits(packed[(n_unary + 7) // 8 :], k, low_bits)
    positions = ((unary - np.arange(k)) << low_bits) | offsets
    if k and (positions[-1] >= n or (np.diff(positions) <= 0).any()):
        raise ValueError("the positions do not ascend below n")
    return positions


def unary_bits(n: int, k: int, low_bits: int) -> int:
    """Return the length in bits of the unary part of ``pack_offsets``."""
    return k + ((n + (1 << low_bits) - 1) >> low_bits)


def add_at(total: Array, positions: Array, values: Array) -> None:
    """Add ``values`` to ``total`` at distinct ``positions``, in place."""
    total[positions] += values
