"""Block transforms on a CPU: eight blocks at a time, one in each lane of a vector.

A real FFT of length L is a complex FFT of pairs, of length N = L / 2, and a step that splits the
pairs' bins; a DCT-II is a real FFT of reordered samples and a rotation (Makhoul 1980).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from horovod_fftcomp import threads
from horovod_fftcomp.backends import Array
from horovod_fftcomp.backends.cpu import codelets as c
from horovod_fftcomp.backends.cpu.codelets import COMPLEX_NBYTES, LANES, VECTOR_NBYTES

# No fastmath: contraction or reordering would change bytes from one machine to the next.
kernel: Any = njit(cache=True, nogil=True)

# complex length -> radices of its passes, the fastest of those tried
_RADICES = {
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
    512: (8, 8, 8),
    1024: (8, 8, 16),
    2048: (8, 16, 16),
}
_LEAST_TILES = 16  # for a thread of its own


class Tables(NamedTuple):
    """The constants of a transform of ``length`` samples; complex ones as pairs of float32."""

    length: int
    radices: Array
    twiddles: Array  # of the passes, one after another
    splits: Array  # -i exp(-2 pi i k / L), and its conjugates
    splits_back: Array
    turns: Array  # sqrt(2) exp(-i pi k / 2L), and their inverses
    turns_back: Array
    scale: Array  # halved, since splitting adds two values


@functools.cache
def _tables(length: int) -> Tables:
    n = length // 2
    twiddles, left = [], n
    for radix in _RADICES[n]:
        p, k = np.mgrid[: left // radix, 1:radix]
        twiddles.append(np.exp(-2j * np.pi * p * k / left).ravel())
        left //= radix
    k = np.arange(n)
    splits = -1j * np.exp(-2j * np.pi * k / length)
    turns = np.sqrt(2) * np.exp(-0.5j * np.pi * k / length)
    complexes = (np.concatenate(twiddles), splits, splits.conj(), turns, 1 / turns)
    reals = [part.astype(np.complex64).view(np.float32) for part in complexes]
    scale = np.array([0.5 / length, 1], np.float32)
    return Tables._make([length, np.array(_RADICES[n]), *reals, scale])


@kernel
def _passes(src, dst, n, radices, twiddles):
    """Transform n complex values of eight blocks (Stockham); return where the result lies."""
    stride, left = 1, n
    for radix in radices:
        m = left // radix
        from_stride, to_stride = stride * m * COMPLEX_NBYTES, stride * COMPLEX_NBYTES
        for p in range(m):
            w = twiddles + p * (radix - 1) * 8
            for q in range(stride):
                a = src + (q + stride * p) * COMPLEX_NBYTES
                b = dst + (q + stride * radix * p) * COMPLEX_NBYTES
                if radix == 16:
                    if m == 1:
                        c.butterfly_16(a, from_stride, b, to_stride, w)
                    else:
                        c.twiddled_16(a, from_stride, b, to_stride, w)
                elif radix == 8:
                    if m == 1:
                        c.butterfly_8(a, from_stride, b, to_stride, w)
                    else:
                        c.twiddled_8(a, from_stride, b, to_stride, w)
                else:
                    c.twiddled_4(a, from_stride, b, to_stride, w)
        twiddles += m * (radix - 1) * 8
        stride *= radix
        left = m
        src, dst = dst, src
    return src


@kernel
def _forward(x, addend, out, is_dct, length, radices, twiddles, splits, turns, scale, scratch):
    """Transform whole tiles of eight blocks and add ``addend``; return the peak's bits."""
    n, row = length // 2, 4 * length
    tile = LANES * row
    peaks = np.zeros(LANES, np.int32)
    first = np.int64(scratch.ctypes.data)
    second = first + n * COMPLEX_NBYTES
    peak, factor = np.int64(peaks.ctypes.data), np.int64(scale.ctypes.data)
    w, s, t = (
        np.int64(twiddles.ctypes.data),
        np.int64(splits.ctypes.data),
        np.int64(turns.ctypes.data),
    )
    src, dst = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    add = np.int64(addend.ctypes.data)
    for _ in range(out.size // (LANES * length)):
        for at in range(0, length, LANES):
            c.prefetch(src + tile + at * VECTOR_NBYTES)
            if addend.size:
                c.prefetch(add + at * VECTOR_NBYTES)
            if is_dct:
                even, odd = (
                    first + at // 2 * VECTOR_NBYTES,
                    first + (length - 1 - at // 2) * VECTOR_NBYTES,
                )
                c.gather(src + 4 * at, row, even, VECTOR_NBYTES, odd, -VECTOR_NBYTES, factor)
            else:
                even = first + at * VECTOR_NBYTES
                odd = even + VECTOR_NBYTES
                c.gather(src + 4 * at, row, even, COMPLEX_NBYTES, odd, COMPLEX_NBYTES, factor)
        z = _passes(first, second, n, radices, w)
        c.split_ends(z, z + n // 2 * COMPLEX_NBYTES)
        for k in range(1, n // 2):
            c.split(z + k * COMPLEX_NBYTES, z + (n - k) * COMPLEX_NBYTES, s + 8 * k)
        if is_dct:
            z = _rotate_all(z, second if z == first else first, n, t)
        for at in range(0, length, LANES):
            here = z + at * VECTOR_NBYTES
            if addend.size:
                c.scatter_coeffs_add(here, dst + 4 * at, add + 4 * at, row, peak)
            else:
                c.scatter_coeffs(here, dst + 4 * at, add, row, peak)
        src += tile
        dst += tile
        add += tile
    return peaks.max()


@kernel
def _rotate_all(z, dct, n, turns):
    ends = z + VECTOR_NBYTES  # DC and Nyquist are the DCT's coefficients 0 and N as they are
    c.copy(z, dct)
    c.copy(ends, dct + n * VECTOR_NBYTES)
    for k in range(1, n):
        low, high = dct + k * VECTOR_NBYTES, dct + (2 * n - k) * VECTOR_NBYTES
        c.rotate(z + k * COMPLEX_NBYTES, turns + 8 * k, low, high)
    return dct


@kernel
def _inverse(coeffs, out, is_dct, length, radices, twiddles, splits, turns, scale, scratch):
    """Transform whole tiles of eight blocks back."""
    n, row = length // 2, 4 * length
    tile = LANES * row
    first = np.int64(scratch.ctypes.data)
    second = first + n * COMPLEX_NBYTES
    one = np.int64(scale.ctypes.data) + 4
    w, s, t = (
        np.int64(twiddles.ctypes.data),
        np.int64(splits.ctypes.data),
        np.int64(turns.ctypes.data),
    )
    src, dst = np.int64(coeffs.ctypes.data), np.int64(out.ctypes.data)
    for _ in range(out.size // (LANES * length)):
        start = second if is_dct else first
        for at in range(0, length, LANES):
            c.prefetch(src + tile + at * VECTOR_NBYTES)
            even = start + at * VECTOR_NBYTES
            odd = even + VECTOR_NBYTES
            c.gather(src + 4 * at, row, even, COMPLEX_NBYTES, odd, COMPLEX_NBYTES, one)
        if is_dct:
            c.copy(second, first)
            c.copy(second + n * VECTOR_NBYTES, first + VECTOR_NBYTES)
            for k in range(1, n):
                low, high = second + k * VECTOR_NBYTES, second + (length - k) * VECTOR_NBYTES
                c.rotate_back(first + k * COMPLEX_NBYTES, t + 8 * k, low, high)
        c.split_ends_back(first, first + n // 2 * COMPLEX_NBYTES)
        for k in range(1, n // 2):
            c.split_back(first + k * COMPLEX_NBYTES, first + (n - k) * COMPLEX_NBYTES, s + 8 * k)
        z = _passes(first, second, n, radices, w)
        for at in range(0, length, LANES):
            if is_dct:
                even, odd = z + at // 2 * VECTOR_NBYTES, z + (length - 1 - at // 2) * VECTOR_NBYTES
                c.scatter_dct(even, VECTOR_NBYTES, odd, -VECTOR_NBYTES, dst + 4 * at, row)
            else:
                even = z + at * VECTOR_NBYTES
                odd = even + VECTOR_NBYTES
                c.scatter_fft(even, COMPLEX_NBYTES, odd, COMPLEX_NBYTES, dst + 4 * at, row)
        src += tile
        dst += tile


_NOTHING = np.empty(0, np.float32)


def _run_forward(
    flat: Array, residual: Array | None, block: int, is_dct: bool
) -> tuple[Array, int]:
    """Return (coefficients as reals, bits of the largest magnitude)."""
    tables = _tables(block)
    tile = LANES * block
    out = np.empty(-(-flat.size // block) * block, np.float32)
    addend = _NOTHING if residual is None else residual

    def transform(x: Array, addend: Array, out: Array) -> Any:
        scratch = np.empty(2 * tile, np.float32)
        constants = (*tables[:4], tables.turns, tables.scale)
        return _forward(x, addend, out, is_dct, *constants, scratch)

    def work(begin: int, end: int) -> int:
        here = slice(begin * tile, end * tile)
        return transform(flat[here], addend[here], out[here])

    n_tiles = flat.size // tile
    peaks = threads.each(work, threads.ranges(n_tiles, _LEAST_TILES))
    done = n_tiles * tile
    if done < out.size:
        coeffs = np.empty(tile, np.float32)
        rest = addend if residual is None else _padded(addend[done:], tile)
        peaks.append(transform(_padded(flat[done:], tile), rest, coeffs))
        out[done:] = coeffs[: out.size - done]
    return out, max(peaks)


def _padded(array: Array, size: int) -> Array:
    padded = np.zeros(size, np.float32)
    padded[: array.size] = array
    return padded


def _run_inverse(coeffs: Array, block: int, numel: int, is_dct: bool) -> Array:
    tables = _tables(block)
    tile = LANES * block
    out = np.empty(numel, np.float32)

    def transform(coeffs: Array, out: Array) -> None:
        scratch = np.empty(2 * tile, np.float32)
        constants = (*tables[:3], tables.splits_back, tables.turns_back, tables.scale)
        _inverse(coeffs, out, is_dct, *constants, scratch)

    def work(begin: int, end: int) -> None:
        transform(coeffs[begin * tile : end * tile], out[begin * tile : end * tile])

    n_tiles = numel // tile
    threads.each(work, threads.ranges(n_tiles, _LEAST_TILES))
    done = n_tiles * tile
    if done < numel:
        last = np.empty(tile, np.float32)
        transform(_padded(coeffs[done:], tile), last)
        out[done:] = last[: numel - done]
    return out


def rfft_blocks(flat: Array, block: int, residual: Array | None) -> tuple[Array, int]:
    """See ``reference.rfft_blocks``."""
    reals = None if residual is None else residual.view(np.float32)
    coeffs, peak = _run_forward(flat, reals, block, is_dct=False)
    return coeffs.view(np.complex64), peak


def irfft_blocks(coeffs: Array, block: int, numel: int) -> Array:
    """See ``reference.irfft_blocks``."""
    return _run_inverse(coeffs.view(np.float32), block, numel, is_dct=False)


def dct_blocks(flat: Array, block: int, residual: Array | None) -> tuple[Array, int]:
    """See ``reference.dct_blocks``."""
    return _run_forward(flat, residual, block, is_dct=True)


def idct_blocks(coeffs: Array, block: int, numel: int) -> Array:
    """See ``reference.idct_blocks``."""
    return _run_inverse(coeffs, block, numel, is_dct=True)
