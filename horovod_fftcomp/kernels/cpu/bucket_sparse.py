"""CPU kernels of sparse codecs for buckets of small tensors: one call for all of them.

Every tensor goes through all stages, by the functions of the kernels for single tensors, before the
next one: it stays in the cache. Tensors are given by addresses and by rows of a table.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from horovod_fftcomp.codec.quantizers import (
    LARGEST_FINITE_BITS,
    RANGE,
    fitted_grid,
    key_exponent,
)
from horovod_fftcomp.kernels.cpu.addresses import floats_at, residual_at
from horovod_fftcomp.kernels.cpu.arrays import as_uint8
from horovod_fftcomp.kernels.cpu.headers import NAN_BITS, scale_and_grid, write_header
from horovod_fftcomp.kernels.cpu.jit import inlined, kernel
from horovod_fftcomp.kernels.cpu.positions import bitmap_has, read_offsets, write_offsets
from horovod_fftcomp.kernels.cpu.sparse import add_groups, sum_groups, take_groups
from horovod_fftcomp.kernels.cpu.topk import GROUP, kth_of_few
from horovod_fftcomp.kernels.cpu.transforms import forward_tiles, inverse_of_sum
from horovod_fftcomp.kernels.cpu.value_codes import PADDING, fill_coding, float_of
from horovod_fftcomp.kernels.cpu.vector_ir import LANES
from horovod_fftcomp.wire.positions import Layout

# A tensor, as its plan and its codec say. ``reals``: of its coefficients; ``kept`` and ``total``:
# the first of its residual in the arena of residuals, of its sum in that of sums; ``header``: the
# first 64-bit word of its header; ``changes``: row of the table of checksums.
_FIELDS = (
    "numel reals n k layout low_bits n_unary header_nbytes positions_nbytes "
    "values_offset payload_nbytes kind bits kept total header changes"
)
MEMBER = np.dtype([(name, np.int64) for name in _FIELDS.split()])

_ALL, _BITMAP, _OFFSETS = int(Layout.ALL), int(Layout.BITMAP), int(Layout.OFFSETS)
_EVERY_BIT = ~np.uint64(0)


@inlined
def copy_bytes(source, n, out, at):
    """Copy the first ``n`` bytes of an array of words to ``out``, uint8, from ``at`` on."""
    whole = as_uint8(source)
    for i in range(n):
        out[at + i] = whole[i]


@inlined
def fill_words(packed, words):
    """Fill 64-bit words with bytes and, after them, zeros; bytes beyond the words are dropped."""
    whole = as_uint8(words)
    used = min(packed.size, whole.size)
    for i in range(used):
        whole[i] = packed[i]
    whole[used:] = np.uint8(0)


# Kernels are compiled once without a transform, which is None, and once with the arguments
# ``transforms.constants_of`` of any.


@inlined
def _block_of(transform):
    """Return (block of a transform, 0 for none; whether coefficients are complex numbers)."""
    if transform is None:
        return 0, False
    return transform[1], not transform[0]


def _coefficients(grad, addend, coeffs, transform, tiles):
    """Write the coefficients of gradient plus residual; return the bits of the peak."""


@overload(_coefficients)
def _coefficients_by(grad, addend, coeffs, transform, tiles):
    def identity(grad, addend, coeffs, transform, tiles):
        none = np.int64(0)
        peak, _, _, _ = add_groups(grad, addend, coeffs, none, none, np.empty(0, np.int32))
        return peak

    def transformed(grad, addend, coeffs, transform, tiles):
        return forward_tiles(grad, addend, coeffs, *transform, tiles)

    return identity if transform is types.none else transformed


def _sum(total, span, bitmaps, streams, codings, bits, transform, tiles):
    """Write the sum of all payloads; return a corrupt payload or -1."""


@overload(_sum)
def _sum_by(total, span, bitmaps, streams, codings, bits, transform, tiles):
    def identity(total, span, bitmaps, streams, codings, bits, transform, tiles):
        return sum_groups(total, np.int64(0), np.int64(1), bitmaps, streams, codings, bits)

    def transformed(total, span, bitmaps, streams, codings, bits, transform, tiles):
        return inverse_of_sum(
            total, np.int64(0), span, bitmaps, streams, codings, bits, *transform, tiles
        )

    return identity if transform is types.none else transformed


@kernel
def encode_sparse(
    members, grads, residuals, offsets, _, peaks, kept, message, headers, changes,
    transform, decay, subtract,
):  # fmt: skip
    """Write the payloads of tensors of one transform, and the bits of their peaks.

    ``grads``, ``residuals``: addresses; a residual's may be 0. ``kept``: address of the arena of
    residuals, 0 if none are wanted. ``subtract``: residuals lack what was sent.
    """
    most = np.int64(0)
    for m in range(members.size):
        most = max(most, members[m].reals)
    # Groups of bitmaps and keys are whole.
    padded = (most + GROUP - 1) // GROUP * GROUP
    scratch, scaled = np.empty(most, np.float32), np.empty(most, np.float32)
    found = np.empty(padded, np.int32)
    bitmap = np.empty(padded // 64, np.uint64)
    packed = np.empty(most // 2 + PADDING, np.uint64)
    block, _ = _block_of(transform)
    tiles = np.empty(5 * LANES * block, np.float32)
    for m in range(members.size):
        row = members[m]
        coeffs = floats_at(kept + 4 * row.kept, row.reals) if kept else scratch[: row.reals]
        addend = residual_at(residuals[m], row.reals, decay, scaled)
        peak = _coefficients(floats_at(grads[m], row.numel), addend, coeffs, transform, tiles)
        peaks[m] = peak
        payload = message[offsets[m] : offsets[m] + row.payload_nbytes]
        start = headers[row.header : row.header + row.header_nbytes // 8]
        finite, grid = peak <= LARGEST_FINITE_BITS, np.int64(0)
        if finite:
            grid = _write_body(
                row, coeffs, peak, transform, subtract, found, bitmap, packed, payload
            )
        scale = peak if finite else NAN_BITS
        write_header(payload, start, changes[row.changes], scale, grid, not finite)


@inlined
def _write_body(row, coeffs, peak, transform, subtract, found, bitmap, packed, payload):
    """Select and write positions and values; return the header's grid.

    What the values encode is subtracted from the coefficients.
    """
    block, is_complex = _block_of(transform)
    bins_per_block = max(block, 1) // (2 if is_complex else 1)
    scale = float_of((127 - key_exponent(peak)) << 23) if is_complex else np.float32(1)
    options = is_complex, bins_per_block, scale
    key, ties = 0, row.n
    if row.layout != _ALL:
        key, ties = kth_of_few(coeffs, row.n, row.k, options, found)
    grid = fitted_grid(row.bits, key, peak, is_complex) if row.kind == RANGE else np.int64(0)
    coding = np.empty(7, np.int64)
    fill_coding(row.kind, row.bits, peak, grid, coding)
    words = bitmap[: (row.n + GROUP - 1) // GROUP * (GROUP // 64)]
    n_bits = take_groups(coeffs, *options, key, ties, coding, subtract, words, packed)
    copy_bytes(packed, (n_bits + 7) // 8, payload, row.values_offset)
    used, at = bitmap[: (row.n + 63) // 64], row.header_nbytes
    if row.layout == _BITMAP:
        copy_bytes(used, row.positions_nbytes, payload, at)
    elif row.layout == _OFFSETS:
        packed[: (row.n_unary + 63) // 64 + (row.k * row.low_bits + 63) // 64 + 1] = 0
        unary = packed[: (row.n_unary + 63) // 64]
        low = packed[unary.size :]
        write_offsets(used, row.low_bits, unary, low)
        split = (row.n_unary + 7) // 8
        copy_bytes(unary, split, payload, at)
        copy_bytes(low, row.positions_nbytes - split, payload, at + split)
    return grid


@kernel
def sum_sparse(
    members, offsets, scales, bad, payloads, n_ranks, message_nbytes, headers, changes,
    transform, span, totals,
):  # fmt: skip
    """Write the sums over ranks of the payloads of tensors of one transform.

    ``totals``: address of the arena of sums. ``scales``: of the payloads, float32 bits, int64
    ``[tensors, ranks]``. ``bad`` is set for a tensor with an unexpected payload.
    """
    most_reals = most_nbytes = most_unary = np.int64(0)
    for m in range(members.size):
        row = members[m]
        most_reals = max(most_reals, (row.reals + span - 1) // span * span)
        most_nbytes = max(most_nbytes, row.payload_nbytes - row.values_offset)
        most_unary = max(most_unary, row.positions_nbytes)
    block, is_complex = _block_of(transform)
    width = 2 if is_complex else 1
    bitmaps = np.empty((n_ranks, most_reals // width // 64), np.uint64)
    streams = np.empty((n_ranks, most_nbytes // 8 + PADDING), np.uint64)
    codings, bits = np.empty((n_ranks, 7), np.int64), np.empty(n_ranks, np.int64)
    scratch = np.empty(most_unary // 8 + 4, np.uint64)
    tiles = np.empty(2 * LANES * block, np.float32)
    for m in range(members.size):
        row = members[m]
        start = headers[row.header : row.header + row.header_nbytes // 8]
        bits[:] = 0
        for p in range(n_ranks):
            at = p * message_nbytes + offsets[m]
            payload = payloads[at : at + row.payload_nbytes]
            scales[m, p], grid = scale_and_grid(payload, start, changes[row.changes])
            if scales[m, p] < 0 or not _read_positions(row, payload, scratch, bitmaps[p]):
                bad[m] = 1
                break
            fill_coding(row.kind, row.bits, scales[m, p], grid, codings[p])
            fill_words(payload[row.values_offset :], streams[p])
        if not bad[m]:
            total = floats_at(totals + 4 * row.total, row.numel)
            bad[m] = _sum(total, span, bitmaps, streams, codings, bits, transform, tiles) >= 0


@inlined
def _read_positions(row, payload, scratch, bitmap):
    """Write the bitmap of a payload's positions, padded; return False for a corrupt one."""
    packed = payload[row.header_nbytes : row.header_nbytes + row.positions_nbytes]
    used = bitmap[: (row.n + 63) // 64]
    if row.layout == _BITMAP:
        fill_words(packed, bitmap)
        return bitmap_has(used, row.n, row.k)
    bitmap[:] = 0
    if row.layout == _ALL:
        used[:] = _EVERY_BIT
        if row.n % 64:
            used[-1] = (np.uint64(1) << np.uint64(row.n % 64)) - np.uint64(1)
        return True
    split = (row.n_unary + 7) // 8
    unary = scratch[: (row.n_unary + 63) // 64]
    low = scratch[unary.size : unary.size + (row.k * row.low_bits + 63) // 64 + 1]
    fill_words(packed[:split], unary)
    fill_words(packed[split:], low)
    if not bitmap_has(unary, row.n_unary, row.k):
        return False
    return read_offsets(unary, low, row.low_bits, row.n, used)
