"""CPU kernels of block transforms: eight blocks at a time, one in each lane of a vector.

A real FFT of length L is a complex FFT of pairs of samples, of length N = L / 2, and a step that
separates the spectra of both; a DCT-II is a real FFT of reordered samples and a rotation (Makhoul
1980).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from horovod_fftcomp.kernels.cpu import vector_ir as c
from horovod_fftcomp.kernels.cpu.arrays import copy_into, largest, multiply
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined, optimized
from horovod_fftcomp.kernels.cpu.jit import kernel_of
from horovod_fftcomp.kernels.cpu.sparse import (
    NOTHING,
    add_group,
    check_streams,
    memory_of_group,
    streams_of,
    with_threshold,
)
from horovod_fftcomp.kernels.cpu.topk import GROUP, count_groups
from horovod_fftcomp.kernels.cpu.vector_ir import COMPLEX_NBYTES, LANES, VECTOR_NBYTES
from horovod_fftcomp.types import Array, Body, Coefficients

# Complex length -> radices of the passes: few passes, and butterflies that fit into the registers.
_RADICES = {
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
    512: (8, 8, 8),
    1024: (8, 8, 16),
    2048: (8, 16, 16),
}


@functools.cache
def constants_of(block: int, is_dct: bool, back: bool) -> tuple:
    """Return the constant arguments of kernels: from ``is_dct`` to ``scale``.

    ``back``: of the inverse transform. Complex constants are pairs of float32.
    """
    n = block // 2
    twiddles, left = [], n  # of all passes, concatenated
    for radix in _RADICES[n]:
        p, k = np.mgrid[: left // radix, 1:radix]
        twiddles.append(np.exp(-2j * np.pi * p * k / left).ravel())
        left //= radix
    k = np.arange(n)
    splits = -1j * np.exp(-2j * np.pi * k / block)
    turns = np.sqrt(2) * np.exp(-0.5j * np.pi * k / block)  # rotations of the DCT
    if back:
        splits, turns = splits.conj(), 1 / turns
    complexes = (np.concatenate(twiddles), splits, turns)
    reals = [part.astype(np.complex64).view(np.float32) for part in complexes]
    scale = np.array([0.5 / block, 1], np.float32)  # halved, since the split adds two values
    return is_dct, block, np.array(_RADICES[n]), *reals, scale


@optimized
def _passes(src, dst, n, radices, twiddles):
    """Transform n complex values of eight blocks (Stockham); return the address of the result."""
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


@optimized
def _places(start, at, length, is_dct):
    """Return (address and stride of the even samples from ``at`` on, and those of the odd ones).

    An FFT has the samples in order. A DCT has the even ones first, then the odd ones backwards.
    """
    if is_dct:
        even, odd = start + at // 2 * VECTOR_NBYTES, start + (length - 1 - at // 2) * VECTOR_NBYTES
        return even, VECTOR_NBYTES, odd, -VECTOR_NBYTES
    even = start + at * VECTOR_NBYTES
    return even, COMPLEX_NBYTES, even + VECTOR_NBYTES, COMPLEX_NBYTES


@optimized
def forward_tile(x, addend, out, is_dct, length, radices, twiddles, splits, turns, scale, scratch):
    """Transform tiles of eight blocks and add ``addend``; return the peak's bits."""
    n, row = length // 2, 4 * length
    tile = LANES * row
    peaks = np.zeros(LANES, np.int32)
    first = np.int64(scratch.ctypes.data)
    second = first + n * COMPLEX_NBYTES
    peak, factor = np.int64(peaks.ctypes.data), np.int64(scale.ctypes.data)
    w, s = np.int64(twiddles.ctypes.data), np.int64(splits.ctypes.data)
    t = np.int64(turns.ctypes.data)
    src, dst = np.int64(x.ctypes.data), np.int64(out.ctypes.data)
    add = np.int64(addend.ctypes.data)
    for _ in range(out.size // (LANES * length)):
        for at in range(0, length, LANES):
            c.prefetch(src + tile + at * VECTOR_NBYTES)
            if addend.size:
                c.prefetch(add + at * VECTOR_NBYTES)
            even, even_stride, odd, odd_stride = _places(first, at, length, is_dct)
            c.gather(src + 4 * at, row, even, even_stride, odd, odd_stride, factor)
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
    return np.int64(largest(peaks))


@inlined
def forward_tiles(
    x, addend, out, is_dct, length, radices, twiddles, splits, turns, scale, buffers
):  # fmt: skip
    """Transform blocks and add ``addend``; return the peak's bits. The last tile is padded.

    ``buffers``: of five tiles.
    """
    tile = LANES * length
    done = x.size // tile * tile
    values, more, to, peak = x[:done], addend[:done], out[:done], np.int64(0)
    rest, last = buffers[2 * tile : 4 * tile], buffers[4 * tile : 5 * tile]
    for turn in range(2 if done < out.size else 1):  # one call, as each is compiled into this
        if turn:
            rest[:] = np.float32(0)
            values, more, to = rest[:tile], rest[tile : tile + min(addend.size, tile)], last
            copy_into(values[: x.size - done], x[done:])
            if addend.size:
                copy_into(more[: addend.size - done], addend[done:])
        top = forward_tile(
            values, more, to, is_dct, length, radices, twiddles, splits, turns, scale,
            buffers[: 2 * tile],
        )  # fmt: skip
        peak = max(peak, top)
    if done < out.size:
        copy_into(out[done:], last)
    return peak


@optimized
def _rotate_all(z, dct, n, turns):
    ends = z + VECTOR_NBYTES  # DC and Nyquist are the DCT's coefficients 0 and N as they are
    c.copy(z, dct)
    c.copy(ends, dct + n * VECTOR_NBYTES)
    for k in range(1, n):
        low, high = dct + k * VECTOR_NBYTES, dct + (2 * n - k) * VECTOR_NBYTES
        c.rotate(z + k * COMPLEX_NBYTES, turns + 8 * k, low, high)
    return dct


@optimized
def _inverse(coeffs, out, is_dct, length, radices, twiddles, splits, turns, scale, scratch):
    """Apply the inverse transform to tiles of eight blocks."""
    n, row = length // 2, 4 * length
    tile = LANES * row
    first = np.int64(scratch.ctypes.data)
    second = first + n * COMPLEX_NBYTES
    one = np.int64(scale.ctypes.data) + 4
    w, s = np.int64(twiddles.ctypes.data), np.int64(splits.ctypes.data)
    t = np.int64(turns.ctypes.data)
    src, dst = np.int64(coeffs.ctypes.data), np.int64(out.ctypes.data)
    for _ in range(out.size // (LANES * length)):
        start = second if is_dct else first
        for at in range(0, length, LANES):
            c.prefetch(src + tile + at * VECTOR_NBYTES)
            even, even_stride, odd, odd_stride = _places(start, at, length, False)
            c.gather(src + 4 * at, row, even, even_stride, odd, odd_stride, one)
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
            even, even_stride, odd, odd_stride = _places(z, at, length, is_dct)
            if is_dct:
                c.scatter_dct(even, even_stride, odd, odd_stride, dst + 4 * at, row)
            else:
                c.scatter_fft(even, even_stride, odd, odd_stride, dst + 4 * at, row)
        src += tile
        dst += tile


run_inverse = kernel_of(_inverse)


@optimized
def forward_counted(
    x, addend, out, span, is_dct, length, radices, twiddles, splits, turns, scale, buffers,
    low, high, found,
):  # fmt: skip
    """Transform span by span; return as ``add_groups``. ``buffers``: see ``forward_tiles``."""
    peak = above = between = kept = np.int64(0)
    width = 1 if is_dct else 2
    for begin in range(0, out.size, span):
        end = min(begin + span, out.size)
        top = forward_tiles(
            x[begin:end], addend[begin:end], out[begin:end], is_dct, length, radices, twiddles,
            splits, turns, scale, buffers,
        )  # fmt: skip
        peak = max(peak, top)
        if found.size:
            more, inside, new = count_groups(
                out[begin:end], not is_dct, length // width, np.float32(1), low, high, found[kept:]
            )
            above, between, kept = above + more, between + inside, kept + new
    return peak, above, between, kept


run_forward_counted = kernel_of(forward_counted)


@allocating
def inverse_of_sum(
    out, span, bitmaps, streams, codings, bits, factor,
    is_dct, length, radices, twiddles, splits, turns, scale, scratch,
):  # fmt: skip
    """Sum all payloads, transform back and multiply by ``factor``; return a corrupt one or -1."""
    bad, memory = -1, memory_of_group()
    width = 1 if is_dct else 2
    tile = LANES * length
    coeffs, rest = np.empty(span, np.float32), np.empty(span, np.float32)
    for begin in range(0, out.size, span):
        end = min(begin + span, out.size)
        used = (end - begin + tile - 1) // tile * tile
        coeffs[:used] = np.float32(0)
        for at in range(0, used, GROUP * width):
            word = (begin + at) // width // 64
            group = coeffs[at : at + GROUP * width]
            bad = max(bad, add_group(group, width, word, bitmaps, streams, codings, bits, *memory))
        to = out[begin:end] if end - begin == used else rest[:used]
        _inverse(
            coeffs[:used], to, is_dct, length, radices, twiddles, splits, turns, scale, scratch
        )
        if end - begin < used:
            copy_into(out[begin:end], rest)
        multiply(out[begin:end], factor)
    return bad


run_inverse_of_sum = kernel_of(inverse_of_sum)


def span_of(block: int, width: int) -> int:
    """Return the reals that are transformed and ranked at a time, in a cache: whole groups."""
    return max(GROUP * width, LANES * block)


def forward_blocks(
    flat: Array, block: int, residual: Array | None, k: int, is_dct: bool
) -> Coefficients:
    """Return the FFTs or DCTs of consecutive blocks plus ``residual``, with the top-k threshold."""
    constants, width = constants_of(block, is_dct, False), 1 if is_dct else 2
    out = empty(-(-flat.size // block) * block)
    addend = NOTHING if residual is None else residual.view(np.float32)
    buffers, none = np.empty(5 * LANES * block, np.float32), np.empty(0, np.int32)
    span = span_of(block, width)
    peak, *_ = run_forward_counted(flat, addend, out, span, *constants, buffers, 0, 0, none)
    return with_threshold(out if is_dct else out.view(np.complex64), peak, k, block // width)


def sum_blocks(parts: Sequence[Body], block: int, total: Array, is_dct: bool) -> Array:
    """Write ``inverse_blocks`` of the sum of ``parts`` to ``total``; see ``sum_values``."""
    constants, width = constants_of(block, is_dct, True), 1 if is_dct else 2
    span = span_of(block, width)
    streams = streams_of(parts, -(-total.size // span) * (span // width))
    scratch = np.empty(2 * LANES * block, np.float32)
    one = np.float32(1)
    check_streams(run_inverse_of_sum(total, span, *streams, one, *constants, scratch))
    return total


def inverse_blocks(coeffs: Array, block: int, numel: int, is_dct: bool) -> Array:
    """Return the first ``numel`` values of the blocks with these spectra or DCTs, float32."""
    tile = LANES * block
    reals, out = np.zeros((2, -(-numel // tile) * tile), np.float32)
    values = coeffs.view(np.float32)
    reals[: values.size] = values
    run_inverse(reals, out, *constants_of(block, is_dct, True), np.empty(2 * tile, np.float32))
    return out[:numel]
