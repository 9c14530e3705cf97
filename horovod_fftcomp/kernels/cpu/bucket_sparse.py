"""CPU kernels of sparse codecs for buckets: one call for all pieces of a thread.

Tensors are given by addresses and by rows of a table, pieces by rows of another. A tensor in one
piece goes through all stages before the next one: it stays in the cache. Pieces of one tensor, of
several threads, go through a stage each: with the last of a stage the next one may begin.
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
from horovod_fftcomp.kernels.cpu.arrays import as_float32, as_int32, as_uint8, copy_into
from horovod_fftcomp.kernels.cpu.headers import NAN_BITS, scale_and_grid, write_header
from horovod_fftcomp.kernels.cpu.jit import inlined, kernel
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
from horovod_fftcomp.kernels.cpu.topk import (
    FEW_SAMPLES,
    GROUP,
    SAMPLES,
    count_groups,
    fill_keys,
    keys_above,
    kth_by_bits,
    kth_by_passes,
    kth_of_few,
    limits_among,
)
from horovod_fftcomp.kernels.cpu.transforms import (
    forward_counted,
    forward_tile,
    inverse_of_sum,
)
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

# A piece of a tensor: its reals from ``begin`` to ``end``, the same numbers of its elements and of
# its coefficients; the number of the tensor's first piece, and of all. ``found``, ``bitmap``,
# ``packed``: where its part begins in the memory that the stages share; ``room``: for keys.
PIECE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "member",
            "begin",
            "end",
            "first",
            "parts",
            "found",
            "room",
            "bitmap",
            "packed",
        )
    ]
)
CUT = 1 << 15  # pieces begin at multiples of it: whole groups of keys, and whole tiles of blocks
# Stages; a tensor in one piece goes through all of them in the first. Ranks are found, and payloads
# written, by one thread for all pieces of a tensor.
ADD, RANK, SELECT, WRITE = range(4)

_ALL, _BITMAP, _OFFSETS = int(Layout.ALL), int(Layout.BITMAP), int(Layout.OFFSETS)
_RAW = int(Layout.RAW)
_EVERY_BIT = ~np.uint64(0)
_SAMPLED = 1 << 21  # reals of a tensor in one piece above which keys are counted on the way
_SAMPLED_REALS = 1 << 17  # at most, of transforms, plus a tile
_SPREAD = 3  # coefficients of a block are correlated: a sample of blocks varies more than its size

# What a piece tells the others: bits of its peak; the limits of the k-th key, both 0 if keys were
# not counted; how many keys lie above and between them, and how many of these were kept; the k-th
# key, and how many equal ones are sent; bits of codes; the header's grid.
_PEAK, _LOW, _HIGH, _ABOVE, _BETWEEN, _KEPT, _KEY, _TIES, _BITS, _GRID, TALLIES = range(11)


def room_of(reals: int, parts: int) -> int:
    """Return how many keys a piece has room for: a small tensor's, else those near the k-th."""
    if parts > 1 or reals > _SAMPLED:
        return reals // 512 * 64 + 2 * SAMPLES
    return -(-reals // GROUP) * GROUP


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


def _coefficients(grad, addend, coeffs, transform, span, tiles, low, high, found):
    """Write the coefficients of gradient plus residual; return as ``add_groups``."""


@overload(_coefficients)
def _coefficients_by(grad, addend, coeffs, transform, span, tiles, low, high, found):
    def identity(grad, addend, coeffs, transform, span, tiles, low, high, found):
        return add_groups(grad, addend, coeffs, low, high, found)

    def transformed(grad, addend, coeffs, transform, span, tiles, low, high, found):
        return forward_counted(grad, addend, coeffs, span, *transform, tiles, low, high, found)

    return identity if transform is types.none else transformed


def _sample(grad, addend, decay, transform, tiles, keys):
    """Write the keys of some coefficients, from all over the tensor; return their number."""


@overload(_sample)
def _sample_by(grad, addend, decay, transform, tiles, keys):
    def identity(grad, addend, decay, transform, tiles, keys):
        count = min(SAMPLES, max(FEW_SAMPLES, grad.size // 4096 * 64))
        stretch, random = grad.size // count, np.uint64(0)
        for i in range(count):
            random = _drawn(random)
            at = i * stretch + _below(random, stretch)
            as_float32(keys)[i] = grad[at] + addend[at] * decay if addend.size else grad[at]
            keys[i] &= np.int32(0x7FFFFFFF)
        return count

    def transformed(grad, addend, decay, transform, tiles, keys):
        is_dct, length = transform[0], transform[1]
        tile, n_blocks = LANES * length, grad.size // length
        rest, more = tiles[2 * tile : 3 * tile], tiles[3 * tile : 4 * tile]
        last, random = tiles[4 * tile : 5 * tile], np.uint64(0)
        count = max(1, min(max(64, _SAMPLED_REALS // length), n_blocks // 8) // LANES)
        stretch, size = n_blocks // (count * LANES), tile if is_dct else tile // 2
        for t in range(count):
            for lane in range(LANES):
                random = _drawn(random)
                at = ((t * LANES + lane) * stretch + _below(random, stretch)) * length
                copy_into(rest[lane * length : (lane + 1) * length], grad[at : at + length])
                if addend.size:
                    for i in range(length):
                        more[lane * length + i] = addend[at + i] * decay
            forward_tile(
                rest, more if addend.size else more[:0], last, *transform, tiles[: 2 * tile]
            )
            here, bins = keys[t * size : (t + 1) * size], length if is_dct else length // 2
            fill_keys(last, not is_dct, bins, np.float32(1), here)
        return count * size

    return identity if transform is types.none else transformed


@inlined
def _drawn(random):
    return random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)


@inlined
def _below(random, n):
    """Return a number from 0 to ``n`` - 1, at most 2^31, by random bits."""
    return np.int64(random >> np.uint64(33)) * n >> 31


def _sum(total, first_span, span, bitmaps, streams, codings, bits, transform, tiles):
    """Write the sum of all payloads; return a corrupt payload or -1."""


@overload(_sum)
def _sum_by(total, first_span, span, bitmaps, streams, codings, bits, transform, tiles):
    def identity(total, first_span, span, bitmaps, streams, codings, bits, transform, tiles):
        return sum_groups(total, first_span, np.int64(1), bitmaps, streams, codings, bits)

    def transformed(total, first_span, span, bitmaps, streams, codings, bits, transform, tiles):
        return inverse_of_sum(
            total, first_span, span, bitmaps, streams, codings, bits, *transform, tiles
        )

    return identity if transform is types.none else transformed


@kernel
def encode_sparse(
    stage, first, end, pieces, tallies, found, bitmaps, packed,
    members, grads, residuals, offsets, _, peaks, kept, message, headers, changes,
    transform, span, decay, subtract,
):  # fmt: skip
    """Take pieces ``first`` to ``end`` through a stage, those that are a tensor through all.

    Writes the payloads of tensors of one transform, and the bits of their peaks. ``tallies``:
    ``[pieces, TALLIES]``; ``found``, ``bitmaps``, ``packed``: memory of tensors of several pieces.
    ``grads``, ``residuals``: addresses; a residual's may be 0. ``kept``: address of the arena of
    residuals; 0, if all tensors are in one piece, for none. ``subtract``: residuals lack what was
    sent.
    """
    most = most_found = np.int64(0)
    longest = np.int64(0)
    for q in range(first, end):
        piece = pieces[q]
        longest = max(longest, piece.end - piece.begin)
        if piece.parts == 1:
            most = max(most, piece.end)
            most_found = max(most_found, piece.room)
    padded = (most + GROUP - 1) // GROUP * GROUP  # groups of bitmaps are whole
    scratch = np.empty(0 if kept else most, np.float32)
    scaled = np.empty(0 if decay == 1 else longest, np.float32)
    own_found = np.empty(most_found, np.int32)
    own_bitmap = np.empty(padded // 64, np.uint64)
    own_packed = np.empty(most // 2 + PADDING, np.uint64)
    block, _ = _block_of(transform)
    tiles = np.empty(5 * LANES * block, np.float32)
    for q in range(first, end):
        piece = pieces[q]
        m, whole = piece.member, piece.parts == 1
        row = members[m]
        coeffs = floats_at(kept + 4 * row.kept, row.reals) if kept else scratch[: row.reals]
        keys, words, codes = own_found, own_bitmap, own_packed
        if not whole:
            keys, words, codes = found, bitmaps[piece.bitmap :], packed[piece.packed :]
        if stage == ADD:
            grad = floats_at(grads[m], row.numel)
            tally = tallies[q]
            _add(piece, row, grad, residuals[m], coeffs, transform, span, tiles, decay, scaled,
                 keys, tally)  # fmt: skip
        if whole or stage == RANK:
            _rank(q, pieces, row, coeffs, transform, keys, tallies)
        if whole or stage == SELECT:
            _select(q, pieces, row, coeffs, transform, subtract, words, codes, tallies)
        if whole or stage == WRITE:
            payload = message[offsets[m] : offsets[m] + row.payload_nbytes]
            start = headers[row.header : row.header + row.header_nbytes // 8]
            peaks[m] = _write(q, pieces, row, coeffs, words, codes, tallies, payload, start,
                              changes[row.changes])  # fmt: skip


@inlined
def _add(
    piece, row, grad, residual, coeffs, transform, span, tiles, decay, scaled, keys, tally
):  # fmt: skip
    """Write the coefficients of a piece; count keys on the way if the tensor is large."""
    low = high = np.int64(0)
    room = keys[:0]
    if (piece.parts > 1 or row.reals > _SAMPLED) and row.layout != _ALL and row.layout != _RAW:
        sample = np.empty(_SAMPLED_REALS + 64 * LANES * 64, np.int32)
        carried = floats_at(residual, row.reals if residual else 0)
        n = _sample(grad, carried, decay, transform, tiles, sample)
        low, high = limits_among(sample[:n], row.k, row.n, 1 if transform is None else _SPREAD)
        low = max(low, 1)  # keys of 0, of which there may be many, are counted as the rest
        room = keys[piece.found : piece.found + piece.room]
    begin, end = piece.begin, min(piece.end, row.numel)
    addend = residual_at(
        residual + 4 * begin if residual else residual, piece.end - begin, decay, scaled
    )
    peak, above, between, n_kept = _coefficients(
        grad[begin:end], addend, coeffs[begin : piece.end], transform, span, tiles, low, high, room
    )
    tally[_PEAK], tally[_LOW], tally[_HIGH] = peak, low, high
    tally[_ABOVE], tally[_BETWEEN], tally[_KEPT] = above, between, n_kept


@inlined
def _options(peak, transform):
    """Return whether coefficients are complex, bins of a block, and the scale of their keys."""
    block, is_complex = _block_of(transform)
    scale = float_of((127 - key_exponent(peak)) << 23) if is_complex else np.float32(1)
    return is_complex, max(block, 1) // (2 if is_complex else 1), scale


@inlined
def _peak_of(q, pieces, tallies):
    """Return the bits of the peak of a piece's tensor."""
    peak = np.int64(0)
    for p in range(pieces[q].first, pieces[q].first + pieces[q].parts):
        peak = max(peak, tallies[p, _PEAK])
    return peak


@inlined
def _rank(q, pieces, row, coeffs, transform, keys, tallies):
    """Write the k-th largest key of a tensor, and how many ties of it each piece sends.

    ``q``: the first piece. ``keys``: those that pieces kept; scratch memory for a small tensor.
    """
    peak = _peak_of(q, pieces, tallies)
    if peak > LARGEST_FINITE_BITS or row.layout == _RAW:
        return
    parts, ties = pieces[q].parts, row.n
    if row.layout == _ALL:
        for p in range(q, q + parts):
            tallies[p, _KEY], tallies[p, _TIES] = 0, row.n
        return
    options = _options(peak, transform)
    if tallies[q, _HIGH] == 0:
        tallies[q, _KEY], tallies[q, _TIES] = kth_of_few(coeffs, row.n, row.k, options, keys)
        return
    above, between, kept = np.int64(0), np.int64(0), np.int64(0)
    for p in range(q, q + parts):
        above += tallies[p, _ABOVE]
        between += tallies[p, _BETWEEN]
        kept += tallies[p, _KEPT]
    # Keys were counted as they are, some are above the limits, and not too many are.
    is_known, need = options[2] == 1 and 0 < row.k - above, row.k - above
    joined = np.empty((kept + 63) // 64 * 64, np.int32)
    are_zeros = is_known and need > between and tallies[q, _LOW] == 1
    are_kept = is_known and need <= between and kept == between
    key = np.int64(0)
    if are_zeros:
        ties = need - between
    elif are_kept:
        at = np.int64(0)
        for p in range(q, q + parts):
            n = tallies[p, _KEPT]
            copy_into(joined[at : at + n], keys[pieces[p].found : pieces[p].found + n])
            at += n
        joined[kept:] = np.int32(-2)  # below every key
        key = kth_by_bits(joined, need, tallies[q, _LOW], tallies[q, _HIGH], 0)
        ties = need - keys_above(joined, key)
    else:
        key, ties = kth_by_passes(coeffs, row.k, options)
    for p in range(q, q + parts):
        tallies[p, _KEY], tallies[p, _TIES] = key, max(0, ties)
        piece = pieces[p]
        if are_zeros:
            n_bins = (piece.end - piece.begin) // (2 if options[0] else 1)
            ties -= n_bins - tallies[p, _ABOVE] - tallies[p, _BETWEEN]
        elif are_kept:
            for at in range(piece.found, piece.found + tallies[p, _KEPT]):
                ties -= np.int64(keys[at]) == key
        elif p + 1 < q + parts:
            part = coeffs[piece.begin : piece.end]
            _, equal, _ = count_groups(part, *options, key, key, keys[:0])
            ties -= equal


@inlined
def _select(q, pieces, row, coeffs, transform, subtract, words, codes, tallies):
    """Write bitmap and codes of a piece's selected coefficients, and subtract what these encode."""
    piece, peak = pieces[q], _peak_of(q, pieces, tallies)
    if peak > LARGEST_FINITE_BITS or row.layout == _RAW:
        return
    options, key, grid = _options(peak, transform), tallies[q, _KEY], np.int64(0)
    is_complex = options[0]
    if row.kind == RANGE:
        grid = fitted_grid(row.bits, key, peak, is_complex)
    coding = np.empty(7, np.int64)
    fill_coding(row.kind, row.bits, peak, grid, coding)
    n_groups = ((piece.end - piece.begin) // (2 if is_complex else 1) + GROUP - 1) // GROUP
    tallies[q, _GRID] = grid
    tallies[q, _BITS] = take_groups(
        coeffs[piece.begin : piece.end], *options, key, tallies[q, _TIES], coding, subtract,
        words[: n_groups * (GROUP // 64)], codes,
    )  # fmt: skip


@inlined
def _write(q, pieces, row, coeffs, bitmap, codes, tallies, payload, start, changes):
    """Write a tensor's payload; return the bits of its peak."""
    parts, peak = pieces[q].parts, _peak_of(q, pieces, tallies)
    if peak > LARGEST_FINITE_BITS:
        write_header(payload, start, changes, NAN_BITS, 0, True)
        return peak
    write_header(payload, start, changes, peak, tallies[q, _GRID], False)
    if row.layout == _RAW:
        copy_bytes(coeffs, 4 * row.reals, payload, row.values_offset)
        return peak
    bits = tallies[q, _BITS]
    if parts > 1:
        own = codes
        for p in range(q + 1, q + parts):
            bits += tallies[p, _BITS]
        codes, bits = np.zeros(bits // 64 + 2, np.uint64), np.int64(0)
        for p in range(q, q + parts):
            part = own[pieces[p].packed - pieces[q].packed :]
            append_bits(codes, bits, part, tallies[p, _BITS])
            bits += tallies[p, _BITS]
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
    return peak


@kernel
def sum_sparse(
    first, end, pieces, members, offsets, scales, bad, payloads, n_ranks, message_nbytes, headers,
    changes, transform, span, totals,
):  # fmt: skip
    """Write the sums over ranks of the payloads of tensors of one transform, piece by piece.

    ``totals``: address of the arena of sums. ``scales``: of the payloads, float32 bits, int64
    ``[tensors, ranks]``. ``bad`` is set for a tensor with an unexpected payload.
    """
    most_reals = most_nbytes = most_unary = np.int64(0)
    for q in range(first, end):
        row = members[pieces[q].member]
        if row.layout != _RAW:
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
    for q in range(first, end):
        piece = pieces[q]
        m = piece.member
        row = members[m]
        start = headers[row.header : row.header + row.header_nbytes // 8]
        begin, after = piece.begin, min(piece.end, row.numel)
        total = floats_at(totals + 4 * row.total, row.numel)[begin:after]
        if row.layout == _RAW:
            total[:] = np.float32(0)
        ok = True
        for p in range(n_ranks):
            at = p * message_nbytes + offsets[m]
            payload = payloads[at : at + row.payload_nbytes]
            scales[m, p], grid = scale_and_grid(payload, start, changes[row.changes])
            body = payload[row.values_offset :]
            ok = scales[m, p] >= 0
            if ok and row.layout == _RAW:
                ok = _add_values(as_float32(body)[begin:after], scales[m, p], total)
            elif ok:
                ok = _read_positions(row, payload, scratch, bitmaps[p])
            if not ok:
                break
            if row.layout != _RAW:
                fill_coding(row.kind, row.bits, scales[m, p], grid, codings[p])
                before = bitmaps[p][: begin // width // 64]
                bit = count_bits(before) * width * row.bits
                bits[p] = bit & 63
                fill_words(body[bit // 64 * 8 :], streams[p])
        if ok and row.layout != _RAW:
            at = begin // span
            corrupt = _sum(total, at, span, bitmaps, streams, codings, bits, transform, tiles)
            ok = corrupt < 0
        if not ok:
            bad[m] = 1


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
