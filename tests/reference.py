"""Reference kernels in plain NumPy: slow, the definition that the compiled ones must match.

Given equal coefficients all backends return equal bytes. Only transforms agree to a tolerance,
since FFT libraries round differently.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from horovod_fftcomp.codec.adaptive import bitmap_of
from horovod_fftcomp.codec.methods.signs import majority_sign  # noqa: F401
from horovod_fftcomp.codec.methods.sums import lane_sums, moments  # noqa: F401
from horovod_fftcomp.codec.quantizers import (
    BFLOAT16,
    FLOAT32,
    LARGEST_BFLOAT16_BITS,
    LARGEST_FINITE_BITS,
    RANGE,
    STEPS,
    decode_range,
    encode_range,
    key_exponent,
)
from horovod_fftcomp.types import Array, Body, Coding, Coefficients
from horovod_fftcomp.wire.counter_rng import random_words
from horovod_fftcomp.wire.positions import unary_bits
from horovod_fftcomp.wire.radix import GROUP, sketch_bits
from tests.reference_dither import add_coded, encode_coded  # noqa: F401

# NaN and Inf in a gradient are normal and detected in its coefficients: NumPy's warnings are noise.
_quiet = np.errstate(invalid="ignore", over="ignore")


def empty(n: int, dtype: type = np.float32) -> Array:
    """Return an uninitialized array of ``n`` elements."""
    return np.empty(n, dtype)


@_quiet
def add_residual(flat: Array, residual: Array | None, k: int) -> Coefficients:
    """Return ``flat`` plus ``residual``, a new array, with the threshold of its ``k`` largest.

    ``residual`` None stands for zeros. See ``topk_threshold``.
    """
    total = flat.copy() if residual is None else flat + residual
    return topk_threshold(total, k, 1)


def topk_threshold(coeffs: Array, k: int, bins_per_block: int) -> Coefficients:
    """Return ``coeffs``, not copied, with the threshold of the ``k`` largest: ``key`` and ``ties``.

    ``coeffs``: float32 or complex64, 1-D, in whole blocks if complex. ``key`` is the k-th largest
    of ``selection_keys``; ``ties`` is the number of keys equal to it among the k largest. With
    ``k`` 0 all are selected; for non-finite coefficients the threshold is meaningless.
    """
    peak = max_abs_bits(coeffs)
    if not k or peak > LARGEST_FINITE_BITS:
        return Coefficients(coeffs, peak, 0, coeffs.size)
    keys = selection_keys(coeffs, bins_per_block, key_exponent(peak))
    key = np.sort(keys)[-k]
    return Coefficients(coeffs, peak, int(key), k - int((keys > key).sum()))


def _rows(flat: Array, length: int) -> Array:
    """Return ``flat`` as rows of ``length`` values, padded with zeros."""
    rows = np.zeros((-(-flat.size // length), length), np.float32)
    rows.reshape(-1)[: flat.size] = flat
    return rows


@_quiet
def forward_blocks(
    flat: Array, block: int, residual: Array | None, k: int, is_dct: bool
) -> Coefficients:
    """Return the FFTs or DCTs of consecutive blocks plus ``residual``, with the top-k threshold.

    ``flat``: float32, padded to whole blocks with zeros. Spectra of the real FFT: complex64
    ``[B * block / 2]``, scaled by 1 / block; bin 0 of a block holds (DC, Nyquist) as its real and
    imaginary part. The input is scaled before the transform: no coefficient exceeds the largest
    input, so that no finite gradient overflows. DCT-IIs: float32 ``[B * block]``, the orthonormal
    DCT divided by sqrt(block). See ``topk_threshold``.
    """
    rows = _rows(flat, block)
    if is_dct:
        coeffs = (rows @ _dct_matrix(block).T / np.sqrt(block)).astype(np.float32).reshape(-1)
        return add_residual(coeffs, residual, k)
    full = np.fft.rfft(rows * np.float32(1 / block), axis=1)
    packed = full[:, :-1].astype(np.complex64)
    packed[:, 0] = full[:, 0].real + 1j * full[:, -1].real
    coeffs = packed.reshape(-1)
    total = coeffs if residual is None else coeffs + residual
    return topk_threshold(total, k, block // 2)


def inverse_blocks(coeffs: Array, block: int, numel: int, is_dct: bool) -> Array:
    """Return the first ``numel`` values of the blocks with these spectra or DCTs, float32."""
    if is_dct:
        rows = coeffs.reshape(-1, block) @ _dct_matrix(block) * np.sqrt(block)
        return rows.astype(np.float32).reshape(-1)[:numel]
    spectra = coeffs.reshape(-1, block // 2)
    full = np.empty((len(spectra), block // 2 + 1), np.complex64)
    full[:, :-1] = spectra
    full[:, 0] = spectra[:, 0].real
    full[:, -1] = spectra[:, 0].imag
    rows = np.fft.irfft(full, n=block, axis=1, norm="forward").astype(np.float32)
    return rows.reshape(-1)[:numel]


@functools.cache
def _dct_matrix(length: int) -> Array:
    """Return the orthonormal DCT-II, float64 ``[L, L]``: row j is the j-th cosine."""
    j, i = np.mgrid[:length, :length]
    matrix = np.sqrt(2 / length) * np.cos(np.pi * (i + 0.5) * j / length)
    matrix[0] /= np.sqrt(2)
    return matrix


def magnitude_bits(values: Array) -> Array:
    """Return the bit patterns of the absolute values, uint32; they sort as the values do."""
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def max_abs_bits(values: Array) -> int:
    """Return the largest bit pattern of any |component|; 0x7F800000 or more with Inf or NaN."""
    return int(magnitude_bits(values.view(np.float32)).max(initial=0))


def selection_keys(coeffs: Array, bins_per_block: int, exponent: int) -> Array:
    """Return the key by which each coefficient is ranked, uint32.

    Reals are ranked by magnitude, complex bins by energy: re^2 + im^2 in float32 without fused
    multiply-add, after an exact scaling by 2^-exponent. Bin 0 of a block counts half, since every
    other bin represents itself and its mirror image.
    """
    if coeffs.dtype == np.float32:
        return magnitude_bits(coeffs)
    scaled = coeffs * np.float32(2.0**-exponent)
    energy = scaled.real * scaled.real + scaled.imag * scaled.imag
    energy[::bins_per_block] *= np.float32(0.5)
    return energy.view(np.uint32)


def select_quantize_pack(
    coeffs: Coefficients, bins_per_block: int, coding: Coding, keep: bool
) -> tuple[Array, Array]:
    """Return (bitmap of the selected coefficients, their codes by ``coding``, packed).

    The bitmap is uint64 ``[ceil(n / 64)]``, coefficient i at bit i mod 64 of word i // 64. With
    ``keep`` the decoded values are subtracted from the array of ``coeffs``, in place.
    """
    array, peak, key, ties = coeffs[:4]
    keys = selection_keys(array, bins_per_block, key_exponent(peak))
    chosen = keys > key
    chosen[np.flatnonzero(keys == key)[:ties]] = True
    values = array[chosen].view(np.float32)
    codes = encode_values(values, coding)
    if keep:
        array[chosen] = (values - decode_values(codes, coding)).view(array.dtype)
    return bitmap_of(np.flatnonzero(chosen), array.size), pack_bits(codes, coding.bits)


@_quiet
def bin_winners(total: Array, grad: Array, length: int) -> tuple[Array, Array]:
    """Return (bitmap of the elements whose |total + grad| is at least their bin's maximum; maxima).

    A bin has ``length`` elements, the last one maybe fewer; its maximum is that of |total|,
    float32. In a bin of zeros nothing is chosen. (Chen et al. 2018.)
    """
    maxima = np.abs(_rows(total, length)).max(1)
    limits = np.repeat(maxima, length)[: total.size]
    chosen = (np.abs(total + grad) >= limits) & (limits > 0)
    return bitmap_of(np.flatnonzero(chosen), total.size), maxima


def sums_below(values: Array, limit: float) -> tuple[int, Array]:
    """Return (number of magnitudes of at least ``limit``; sums of the others by group, float64)."""
    sizes = np.abs(values)
    above = sizes >= np.float32(limit)
    return int(above.sum()), lane_sums(np.where(above, 0, sizes.astype(np.float64)), GROUP)


def draw_chosen(values: Array, limit: float, key: int) -> Array:
    """Return the bitmap of a random choice: each value with probability min(|value| / limit, 1).

    ``limit``: float32, at least 2^-126. ``key``: 64-bit key of the random numbers.
    """
    sizes = np.abs(values).astype(np.float64) * (2.0**32 / float(limit))
    return bitmap_of(np.flatnonzero(random_words(key, values.size) < sizes), values.size)


def take_chosen(
    array: Array, bitmap: Array, least: float, coding: Coding, keep: bool
) -> tuple[int, Array]:
    """Return (number of ones in the bitmap; packed codes of the float32 values there).

    Values of a magnitude below ``least`` are sent as ``least`` with their sign. With ``keep`` the
    decoded values are subtracted from ``array``, in place.
    """
    positions = positions_of(bitmap)
    values = array[positions]
    codes = encode_values(
        np.copysign(np.maximum(np.abs(values), np.float32(least)), values), coding
    )
    if keep:
        array[positions] = values - decode_values(codes, coding)
    return positions.size, pack_bits(codes, coding.bits)


@_quiet
def sum_values(parts: Sequence[Body], total: Array) -> Array:
    """Write the sum of sparse vectors, added in the order of ``parts``, to ``total``; return it.

    ``total``: float32 or complex64, of the size of the vectors. Raises ValueError, with the number
    of the part, for a code or a magnitude above the largest of its coding.
    """
    total.fill(0)
    for number, (bitmap, packed, coding) in enumerate(parts):
        positions = positions_of(bitmap)
        codes = unpack_bits(packed, len(positions) * total.itemsize // 4, coding.bits)
        values = decode_values(codes, coding)
        largest = codes if coding.kind in (RANGE, STEPS) else magnitude_bits(values)
        if largest.max(initial=0) > coding.largest:
            raise ValueError(f"payload {number}: a value exceeds the header's scale")
        total[positions] += values.view(total.dtype)
    return total


def sum_sparse(a: Body, b: Body) -> Array:
    """Return the float32 values of the sum of two sparse vectors, at the union of positions."""
    total = sum_values([a, b], np.empty(64 * a.bitmap.size, np.float32))
    return total[positions_of(a.bitmap | b.bitmap)]


def sum_blocks(parts: Sequence[Body], block: int, total: Array, is_dct: bool) -> Array:
    """Write ``inverse_blocks`` of the sum of ``parts`` to ``total``; see ``sum_values``."""
    n_reals = -(-total.size // block) * block
    bins = np.empty(n_reals, np.float32).view(np.float32 if is_dct else np.complex64)
    total[:] = inverse_blocks(sum_values(parts, bins), block, total.size, is_dct)
    return total


def encode_values(values: Array, coding: Coding) -> Array:
    """Return the code of each float32 value, uint32."""
    if coding.kind == FLOAT32:
        return values.view(np.uint32)
    sign, magnitude = values.view(np.uint32) & np.uint32(0x80000000), magnitude_bits(values)
    if coding.kind == BFLOAT16:
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) & np.uint32(0x7FFF0000)
        return (sign | np.minimum(rounded, np.uint32(LARGEST_BFLOAT16_BITS))) >> 16
    if coding.kind == STEPS:
        step = np.uint32(coding.base).view(np.float32)
        ratio = np.abs(values.astype(np.float64)) / step  # exact enough to floor
        levels = np.clip(np.floor(ratio), 1, coding.levels).astype(np.uint32)
        return 2 * (levels - 1) + (values < 0)
    return encode_range(values, coding)


def decode_values(codes: Array, coding: Coding) -> Array:
    """Return the float32 value of each uint32 code."""
    if coding.kind == FLOAT32:
        return codes.view(np.float32)
    if coding.kind == BFLOAT16:
        return (codes << 16).astype(np.uint32).view(np.float32)
    if coding.kind == STEPS:
        sizes = ((codes >> 1) + 1).astype(np.float32) * np.uint32(coding.base).view(np.float32)
        return np.where(codes & 1, -sizes, sizes)
    return decode_range(codes, coding)


def pack_bits(codes: Array, bits: int) -> Array:
    """Return uint32 codes packed into ``bits`` bits each, uint8.

    Code j begins at bit j * bits of the stream; stream bit b is bit (b mod 8) of byte b // 8.
    """
    flags = (codes[:, None] >> np.arange(bits, dtype=np.uint32)) & 1
    return np.packbits(flags.astype(np.uint8).ravel(), bitorder="little")


def unpack_bits(packed: Array, count: int, bits: int) -> Array:
    """Return the ``count`` codes that ``pack_bits`` packed, uint32."""
    flags = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    return (flags.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(1, dtype=np.uint32)


def positions_of(bitmap: Array) -> Array:
    """Return the positions of the ones of a bitmap, int64, ascending."""
    return np.flatnonzero(np.unpackbits(bitmap.view(np.uint8), bitorder="little"))


def pack_bitmap(bitmap: Array, n: int) -> Array:
    """Return the payload form of a bitmap of ``n`` bits: uint8 ``[ceil(n / 8)]``."""
    return bitmap.view(np.uint8)[: (n + 7) // 8]


def unpack_bitmap(packed: Array, n: int, k: int) -> Array:
    """Return the bitmap that ``pack_bitmap`` packed; ValueError unless it has ``k`` ones."""
    positions = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
    if len(positions) != k or (k and positions[-1] >= n):
        raise ValueError(f"the bitmap does not have {k} bits set below {n}")
    return bitmap_of(positions, n)


def pack_offsets(bitmap: Array, n: int, k: int, low_bits: int) -> Array:
    """Return the ``k`` positions as offsets in blocks of 2^low_bits bits, uint8.

    First the blocks' counts in unary, k ones and one zero for each block: the i-th one is stream
    bit (position_i >> low_bits) + i. Then, from the next whole byte on, the offset of each
    position in its block, ``low_bits`` bits each. (Elias 1974, Fano 1971.)
    """
    positions, n_unary = positions_of(bitmap), unary_bits(n, k, low_bits)
    unary = bitmap_of((positions >> low_bits) + np.arange(k), n_unary)
    offsets = (positions & ((1 << low_bits) - 1)).astype(np.uint32)
    return np.concatenate([pack_bitmap(unary, n_unary), pack_bits(offsets, low_bits)])


def unpack_offsets(packed: Array, n: int, k: int, low_bits: int) -> Array:
    """Return the bitmap of the ``k`` positions that ``pack_offsets`` packed.

    ValueError unless they are ``k`` ascending numbers below ``n``.
    """
    n_unary = unary_bits(n, k, low_bits)
    split = (n_unary + 7) // 8
    if (packed.size - split) * 8 < k * low_bits:
        raise ValueError("the offsets are cut short")
    ones = positions_of(unpack_bitmap(packed[:split], n_unary, k))
    positions = ((ones - np.arange(k)) << low_bits) | unpack_bits(packed[split:], k, low_bits)
    if k and (positions[-1] >= n or (np.diff(positions) <= 0).any()):
        raise ValueError(f"the positions do not ascend, or are not below {n}")
    return bitmap_of(positions, n)


def count_above(values: Array, key: int) -> int:
    """Return the number of values whose magnitude has a bit pattern above ``key``."""
    return int((magnitude_bits(values) > key).sum())


@_quiet
def low_pass(flat: Array, residual: Array | None, beta: float) -> tuple[Array, int]:
    """Return (``residual`` + ``beta`` * ``flat``, new; bits of the largest |flat + residual|).

    ``residual`` None stands for zeros.
    """
    if residual is None:
        return np.float32(beta) * flat, max_abs_bits(flat)
    return residual + np.float32(beta) * flat, max_abs_bits(flat + residual)


@_quiet
def chunk_winners(flat: Array, residual: Array | None, chunk: int) -> Array:
    """Return the index in each chunk of the largest |flat + residual|, uint32; ties: the first."""
    n_chunks = -(-flat.size // chunk)
    keys = np.full(n_chunks * chunk, -1, np.int64)  # below every key
    keys[: flat.size] = magnitude_bits(flat if residual is None else flat + residual)
    return keys.reshape(n_chunks, chunk).argmax(1).astype(np.uint32)


@_quiet
def to_float16(values: Array, limit: float) -> Array:
    """Return finite float32 ``values`` as float16, clipped to +-``limit``."""
    return np.clip(values, -np.float32(limit), np.float32(limit)).astype(np.float16)


def from_float16(values: Array) -> Array:
    """Return float16 ``values`` as float32."""
    return values.astype(np.float32)


@_quiet
def momentum_accumulate(
    flat: Array,
    velocity: Array | None,
    residual: Array | None,
    momentum: float,
    nesterov: bool,
    factor: float,
) -> tuple[Coefficients, Array]:
    """Return (the new residual, with its peak; the new velocity).

    With g = ``factor`` * ``flat``: velocity <- momentum * velocity + g, residual <- residual +
    velocity; with ``nesterov`` velocity <- momentum * (velocity + g), residual <- residual +
    (velocity + g). None stands for zeros.
    """
    zeros = np.zeros(flat.size, np.float32)
    old = zeros if velocity is None else velocity
    scaled, mu = np.float32(factor) * flat, np.float32(momentum)
    new = mu * (old + scaled) if nesterov else mu * old + scaled
    total = (zeros if residual is None else residual) + (new + scaled if nesterov else new)
    return topk_threshold(total, 0, 1), new


def zero_at(values: Array, bitmap: Array) -> None:
    """Set ``values`` to 0 where the bitmap has ones, in place."""
    values[positions_of(bitmap)] = 0


def orthonormal(matrix: Array) -> Array:
    """Return ``matrix``, finite float32 ``[rows, columns]``, with its columns orthonormalized.

    Modified Gram-Schmidt in float64, done twice, so that the rounding error of a dependent column
    is orthogonal to the other columns; a column that vanishes becomes zeros. Sums are in the fixed
    order of ``_lane_dot``, since all ranks must compute the same bits.
    """
    columns = matrix.T.astype(np.float64)
    for k, column in enumerate(columns):
        before = np.sqrt(_lane_dot(column, column))
        for _ in range(2):
            for other in columns[:k]:
                column -= _lane_dot(column, other) * other
        norm = np.sqrt(_lane_dot(column, column))
        column[:] = column / norm if norm > 1e-10 * before else 0
    return np.ascontiguousarray(columns.T, np.float32)


def _lane_dot(a: Array, b: Array) -> float:
    """Return the dot product, summed in a fixed order.

    Product i is added to partial sum i mod 256; then the upper half of the partial sums is added to
    the lower half until one remains.
    """
    lanes = np.zeros((1 + -(-a.size // 256), 256))
    lanes[1:].reshape(-1)[: a.size] = a * b
    total = np.cumsum(lanes, axis=0)[-1]
    while total.size > 1:
        half = total.size // 2
        total = total[:half] + total[half:]
    return float(total[0])


@_quiet
def low_rank(left: Array, right: Array, minuend: Array | None) -> Array:
    """Return ``left`` ``[rows, r]`` times the transpose of ``right`` ``[columns, r]``, float32.

    With ``minuend``, subtract that from it in place and return it. Products are added from the
    first column of ``left`` on, unfused: all ranks must compute the same bits.
    """
    total = np.zeros((len(left), len(right)), np.float32)
    for a, b in zip(left.T, right.T, strict=True):
        total += a[:, None] * b
    if minuend is None:
        return total
    minuend -= total
    return minuend


def columns_and_signs(n: int, hashes: Array, columns: int) -> tuple[Array, Array]:
    """Return (column, sign) of each element in each row of a sketch, ``[rows, n]`` each.

    Computed from the upper half h of factor * i + addend, mod 2^64: bit 0 is the sign, the others
    give the column, floor(columns * (h >> 1) / 2^31). (Dietzfelbinger 1996.)
    """
    words = (hashes[:, :1] * np.arange(n, dtype=np.uint64) + hashes[:, 1:]) >> np.uint64(32)
    signs = np.where(words & np.uint64(1), np.float32(-1), np.float32(1))
    at = ((words >> np.uint64(1)) * np.uint64(columns)) >> np.uint64(31)
    return at.astype(np.int64), signs


def sketch(values: Array, hashes: Array, columns: int, peak: int) -> Array:
    """Return the count sketch of finite ``values``, float32 ``[rows, columns]``.

    In each row, each element times its sign is added to its column. ``hashes``: uint64
    ``[rows, 2]``, factor and addend. ``peak``: the bits of the largest magnitude. Elements are
    rounded to whole multiples of 2^-``sketch_bits``, so that sums are the same in any order.
    (Charikar et al. 2002.)
    """
    bits = sketch_bits(values.size, peak)
    steps = np.rint(values.astype(np.float64) * 2.0**bits).astype(np.int64)
    table = np.zeros((len(hashes), columns), np.int64)
    places = columns_and_signs(values.size, hashes, columns)
    for row, at, signs in zip(table, *places, strict=True):
        np.add.at(row, at, signs.astype(np.int64) * steps)
    with np.errstate(over="ignore"):
        return (table * 2.0**-bits).astype(np.float32)


def estimate(table: Array, hashes: Array, n: int) -> Array:
    """Return the estimates of ``n`` elements from a finite sketch, float32: medians over rows."""
    at, signs = columns_and_signs(n, hashes, table.shape[1])
    estimates = signs * np.take_along_axis(table, at, 1)
    return np.sort(estimates, 0)[len(table) // 2]
