"""CPU kernels of sparse codecs for buckets: one call for all pieces of a thread.

Tensors are given by addresses and by rows of a table, pieces by rows of another. A tensor in one
piece goes through all stages before the next one: it stays in the cache. Pieces of one tensor, of
several threads, go through a stage each: with the last of a stage the next one may begin.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, RANGE, fitted_grid
from horovod_fftcomp.kernels.cpu.addresses import floats_at, residual_at
from horovod_fftcomp.kernels.cpu.arrays import as_float32, as_int32, as_uint8, copy_into, multiply
from horovod_fftcomp.kernels.cpu.bucket_rank import block_of, limits_of, options_of, peak_of, rank
from horovod_fftcomp.kernels.cpu.headers import NAN_BITS
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.pieces import (
    ADD,
    RANK,
    SELECT,
    WRITE,
    longest_of,
    read_payload,
    start_payload,
)
from horovod_fftcomp.kernels.cpu.positions import (
    bitmap_has,
    count_bits,
    read_offsets,
    write_offsets,
)
from horovod_fftcomp.kernels.cpu.sparse import (
    add_groups,
    append_bits,
    peak_bits,
    sum_groups,
    take_groups,
)
from horovod_fftcomp.kernels.cpu.topk import GROUP
from horovod_fftcomp.kernels.cpu.transforms import forward_counted, inverse_of_sum
from horovod_fftcomp.kernels.cpu.value_codes import PADDING, fill_coding
from horovod_fftcomp.kernels.cpu.vector_ir import LANES
from horovod_fftcomp.wire.positions import Layout

# A tensor, as its plan and its codec say. ``reals``: of its coefficients; ``kept``: the
# first of its residual in the arena of residuals; ``header``: the first 64-bit word of its header;
# ``changes``: row of the table of checksums.
_FIELDS = (
    "numel reals n k layout low_bits n_unary header_nbytes positions_nbytes "
    "values_offset payload_nbytes kind bits kept header changes"
)
MEMBER = np.dtype([(name, np.int64) for name in _FIELDS.split()])

_ALL, _BITMAP, _OFFSETS = int(Layout.ALL), int(Layout.BITMAP), int(Layout.OFFSETS)
_RAW = int(Layout.RAW)
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
# ``transforms.constants_of`` of any. Numba leaves out the branch that is not taken.


@inlined
def _coefficients(grad, addend, coeffs, transform, span, tiles, low, high, found):
    """Write the coefficients of gradient plus residual; return as ``add_groups``."""
    if transform is None:
        return add_groups(grad, addend, coeffs, low, high, found)
    return forward_counted(grad, addend, coeffs, span, *transform, tiles, low, high, found)


@inlined
def _sum(total, span, bitmaps, streams, codings, bits, transform, tiles, factor):
    """Write the sum of all payloads times ``factor``; return a corrupt payload or -1."""
    if transform is None:
        return sum_groups(total, np.int64(1), bitmaps, streams, codings, bits, factor)
    return inverse_of_sum(total, span, bitmaps, streams, codings, bits, factor, *transform, tiles)


@kernel
def encode_sparse(
    stage, first, end, pieces, tallies, found, bitmaps, packed,
    members, grads, residuals, offsets, _, peaks, kept, message, headers, changes,
    transform, span, decay, subtract,
):  # fmt: skip
    """Take pieces ``first`` to ``end`` through a stage, those that are a tensor through all.

    Writes the payloads of tensors of one transform, and the bits of their peaks. ``tallies``: of
    ``TALLY``, one for each piece. ``found``, ``bitmaps``, ``packed``: memory of tensors of several
    pieces.
    ``grads``, ``residuals``: addresses; a residual's may be 0. ``kept``: address of the arena of
    residuals; 0, if all tensors are in one piece, for none. ``subtract``: residuals lack what was
    sent.
    """
    most = most_found = np.int64(0)
    for q in range(first, end):
        if pieces[q].parts == 1:
            most, most_found = max(most, pieces[q].end), max(most_found, pieces[q].room)
    padded = (most + GROUP - 1) // GROUP * GROUP  # groups of bitmaps are whole
    scratch = np.empty(0 if kept else most, np.float32)
    scaled = np.empty(0 if decay == 1 else longest_of(pieces, first, end), np.float32)
    own_found = np.empty(most_found, np.int32)
    own_bitmap = np.empty(padded // 64, np.uint64)
    own_packed = np.empty(most // 2 + PADDING, np.uint64)
    tiles = np.empty(5 * LANES * block_of(transform)[0], np.float32)
    for q in range(first, end):
        piece = pieces[q]
        m, whole = piece.member, piece.parts == 1
        row = members[m]
        coeffs = floats_at(kept + 4 * row.kept, row.reals) if kept else scratch[: row.reals]
        keys, words, codes = own_found, own_bitmap, own_packed
        if not whole:
            keys, words, codes = found, bitmaps[piece.bitmap :], packed[piece.packed :]
        if stage == ADD:
            arrays = grads[m], residuals[m], coeffs, tiles, scaled, keys
            _add(piece, row, *arrays, transform, span, decay, tallies[q])
        if whole or stage == RANK:
            rank(q, pieces, row, coeffs, transform, keys, tallies)
        if whole or stage == SELECT:
            _select(q, pieces, row, coeffs, transform, subtract, words, codes, tallies)
        if whole or stage == WRITE:
            peaks[m] = peak_of(q, pieces, tallies)
            scale = peaks[m] if peaks[m] <= LARGEST_FINITE_BITS else NAN_BITS
            header = headers, changes, scale, tallies[q].grid
            payload = start_payload(row, message, offsets[m], *header)
            if scale != NAN_BITS:
                _write_body(q, pieces, row, coeffs, words, codes, tallies, payload)


@allocating
def _add(
    piece, row, grad, residual, coeffs, tiles, scaled, keys, transform, span, decay, tally
):  # fmt: skip
    """Write the coefficients of a piece; count keys on the way if the tensor is large."""
    grad = floats_at(grad, row.numel)
    carried = floats_at(residual, row.reals if residual else 0)
    low, high = limits_of(piece, row, grad, carried, decay, transform, tiles)
    room = keys[piece.found : piece.found + piece.room] if high else keys[:0]
    begin, end = piece.begin, min(piece.end, row.numel)
    old = residual + 4 * begin if residual else residual
    addend = residual_at(old, piece.end - begin, decay, scaled)
    peak, above, between, n_kept = _coefficients(
        grad[begin:end], addend, coeffs[begin : piece.end], transform, span, tiles, low, high, room
    )
    tally.peak, tally.low, tally.high, tally.ties = peak, low, high, row.n
    tally.above, tally.between, tally.kept = above, between, n_kept


@allocating
def _select(q, pieces, row, coeffs, transform, subtract, words, codes, tallies):
    """Write bitmap and codes of a piece's selected coefficients, and subtract what these encode."""
    piece, peak = pieces[q], peak_of(q, pieces, tallies)
    if peak > LARGEST_FINITE_BITS or row.layout == _RAW:
        return
    options, key = options_of(peak, transform), tallies[q].key
    is_complex = options[0]
    grid = fitted_grid(row.bits, key, peak, is_complex) if row.kind == RANGE else np.int64(0)
    coding = np.empty(7, np.int64)
    fill_coding(row.kind, row.bits, peak, grid, coding)
    n_groups = ((piece.end - piece.begin) // (2 if is_complex else 1) + GROUP - 1) // GROUP
    tallies[q].grid = grid
    tallies[q].bits = take_groups(
        coeffs[piece.begin : piece.end], *options, key, tallies[q].ties, coding, subtract,
        words[: n_groups * (GROUP // 64)], codes,
    )  # fmt: skip


@allocating
def _write_body(q, pieces, row, coeffs, bitmap, codes, tallies, payload):
    """Write positions and codes of all pieces of a tensor, or the coefficients as they are."""
    parts = pieces[q].parts
    if row.layout == _RAW:
        copy_bytes(coeffs, 4 * row.reals, payload, row.values_offset)
        return
    bits = tallies[q].bits
    if parts > 1:
        own = codes
        for p in range(q + 1, q + parts):
            bits += tallies[p].bits
        codes, bits = np.zeros(bits // 64 + 2, np.uint64), np.int64(0)
        for p in range(q, q + parts):
            part = own[pieces[p].packed - pieces[q].packed :]
            append_bits(codes, bits, part, tallies[p].bits)
            bits += tallies[p].bits
    copy_bytes(codes, (bits + 7) // 8, payload, row.values_offset)
    used, at = bitmap[: (row.n + 63) // 64], row.header_nbytes
    if row.layout == _BITMAP:
        copy_bytes(used, row.positions_nbytes, payload, at)
    elif row.layout == _OFFSETS:
        n_words = (row.n_unary + 63) // 64
        both = np.zeros(n_words + (row.k * row.low_bits + 63) // 64 + 1, np.uint64)
        unary, low = both[:n_words], both[n_words:]
        write_offsets(used, row.low_bits, unary, low)
        split = (row.n_unary + 7) // 8
        copy_bytes(unary, split, payload, at)
        copy_bytes(low, row.positions_nbytes - split, payload, at + split)


@kernel
def sum_sparse(
    first, end, pieces, members, offsets, scales, bad, payloads, n_ranks, message_nbytes, headers,
    changes, transform, span, totals, factor,
):  # fmt: skip
    """Write the sums over ranks of the payloads of tensors of one transform, piece by piece.

    ``totals``: addresses of the sums, which are multiplied by ``factor``. ``scales``: of the
    payloads, float32 bits, int64 ``[tensors, ranks]``. ``bad`` is set for a tensor with an
    unexpected payload.
    """
    block, is_complex = block_of(transform)
    width, tiles = 2 if is_complex else 1, np.empty(2 * LANES * block, np.float32)
    memory = _memory(first, end, pieces, members, n_ranks, width, span // width)
    bitmaps, streams, whole, scratch = memory
    codings, bits = np.empty((n_ranks, 7), np.int64), np.empty(n_ranks, np.int64)
    for q in range(first, end):
        piece = pieces[q]
        m = piece.member
        row = members[m]
        begin, after = piece.begin, min(piece.end, row.numel)
        total = floats_at(totals[m], row.numel)[begin:after]
        if row.layout == _RAW:
            total[:] = np.float32(0)
        ok = True
        for p in range(n_ranks):
            at = p * message_nbytes + offsets[m]
            payload, scales[m, p], grid = read_payload(row, payloads, at, headers, changes)
            if scales[m, p] < 0:
                ok = False
            elif row.layout == _RAW:
                values = as_float32(payload[row.values_offset :])[begin:after]
                ok = _add_values(values, scales[m, p], total)
            else:
                fill_coding(row.kind, row.bits, scales[m, p], grid, codings[p])
                parts = scratch, whole, bitmaps[p], streams[p]
                bits[p] = _read(row, piece, width, payload, *parts)
                ok = bits[p] >= 0
            if not ok:
                break
        if row.layout == _RAW:
            multiply(total, factor)
        elif ok:
            arguments = bitmaps, streams, codings, bits, transform, tiles, factor
            ok = _sum(total, span, *arguments) < 0
        if not ok:
            bad[m] = 1


@allocating
def _memory(first, end, pieces, members, n_ranks, width, span):
    """Return memory for bitmaps and codes of a piece, for a whole bitmap and for packed positions.

    ``span``: bins that are summed at a time. The first two are of all ranks, the others of one.
    """
    longest, most, n_whole = longest_of(pieces, first, end), np.int64(0), np.int64(0)
    for q in range(first, end):
        row = members[pieces[q].member]
        most, n_whole = max(most, row.payload_nbytes), max(n_whole, row.n * (pieces[q].parts > 1))
    bitmaps = np.empty((n_ranks, (longest // width + span - 1) // span * span // 64), np.uint64)
    streams = np.empty((n_ranks, min(longest // 2, most // 8) + PADDING + 2), np.uint64)
    whole, scratch = (
        np.empty((n_whole + 63) // 64, np.uint64),
        np.empty(most // 8 + 4, np.uint64),
    )
    return bitmaps, streams, whole, scratch


@inlined
def _read(row, piece, width, payload, scratch, whole, bitmap, stream):
    """Write bitmap and codes of a piece; return the bit where its codes begin.

    -1 for corrupt positions. ``whole``: memory for the bitmap of a tensor in several pieces.
    """
    first, last = piece.begin // width // 64, (piece.end // width + 63) // 64
    target = bitmap if piece.parts == 1 else whole
    if not _read_positions(row, payload, scratch, target):
        return np.int64(-1)
    if piece.parts > 1:
        copy_into(bitmap[: last - first], whole[first:last])
        bitmap[last - first :] = np.uint64(0)
    bit = count_bits(target[:first]) * width * row.bits
    n_bits = (bit & 63) + count_bits(target[first:last]) * width * row.bits
    begin = row.values_offset + bit // 64 * 8
    codes = payload[begin : begin + (n_bits + 7) // 8]
    fill_words(codes, stream[: (n_bits + 63) // 64 + PADDING])
    return bit & 63


@inlined
def _add_values(values, scale, total):
    """Add float32 values; return False for one that is larger than the scale, float32 bits."""
    if peak_bits(as_int32(values)) > scale:
        return False
    for i in range(values.size):
        total[i] += values[i]
    return True


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
