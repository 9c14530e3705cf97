"""CPU kernels of dense codecs for buckets: one call for all pieces of a thread.

As ``bucket_sparse``.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.cpu.addresses import floats_at
from horovod_fftcomp.kernels.cpu.arrays import (
    as_float32,
    as_int32,
    as_uint32,
    copy_into,
    largest,
    multiply,
)
from horovod_fftcomp.kernels.cpu.dense import (
    add_level_groups,
    add_octave_groups,
    encode_level_groups,
    encode_octave_groups,
    moments_by_group,
)
from horovod_fftcomp.kernels.cpu.headers import NAN_BITS
from horovod_fftcomp.kernels.cpu.inlining import allocating
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.pieces import (
    ADD,
    SELECT,
    WRITE,
    arrays_of,
    longest_of,
    read_payload,
    start_payload,
    sum_to,
)
from horovod_fftcomp.kernels.cpu.signs import (
    SIGNS,
    add_sign_groups,
    encode_sign_groups,
    subtract_sign_rows,
)
from horovod_fftcomp.kernels.cpu.value_codes import float_of
from horovod_fftcomp.wire.radix import GIVEN, GROUP, LANES

# A tensor, as its plan and its codec say: as in ``bucket_sparse``; ``scales``: number of float32
# before the packed words; ``length``: of a row of signs; ``sums`` and ``n_sums``: the first of its
# sums, of rows and groups, and their number. Those of signs have a start each, and one for the end.
_FIELDS = (
    "numel reals header_nbytes values_offset payload_nbytes kept header changes method "
    "scales length sums n_sums"
)
MEMBER = np.dtype([(name, np.int64) for name in _FIELDS.split()])
LEVELS, OCTAVES, ONE_BIT, SCALED_SIGN, SIGN = range(5)

_BELOW_POWER = 0x7FFFFF  # the mantissa's bits of a float32
_ROUNDING = 1e-12  # as in ``codec.methods.terngrad``
_NOT_FINITE = np.int64(0x7F800000)


@allocating
def _bits_of(value):
    number = np.empty(1, np.float32)
    number[0] = value
    return np.int64(as_int32(number)[0])


@allocating
def _total(values):
    """Return the sum of float64 values, in the order of ``ordered_sum``."""
    partial = np.zeros(LANES)
    for i in range(values.size):
        partial[i % LANES] += values[i]
    total = 0.0
    for value in partial:
        total += value
    return total


@kernel
def encode_dense(
    stage, first, end, pieces, peaks_of, sums, counts,
    members, grads, residuals, offsets, keys, peaks, kept, message, headers, changes,
    levels, clips, starts, decay, subtract,
):  # fmt: skip
    """Take pieces ``first`` to ``end`` through a stage, those that are a tensor through all.

    As ``encode_sparse``. ``peaks_of``: bits of each piece's peak, 0 where a method needs none.
    ``sums``, ``counts``: of groups, float64 ``[n, 2]`` and int64 ``[n]``.
    """
    scratch = np.empty(0 if kept else longest_of(pieces, first, end), np.float32)
    for q in range(first, end):
        piece = pieces[q]
        m, whole = piece.member, piece.parts == 1
        row = members[m]
        factor = decay if stage == ADD and row.method < ONE_BIT else np.float32(1)
        grad, addend, values = arrays_of(piece, row, grads[m], residuals[m], kept, factor, scratch)
        body = message[offsets[m] + row.values_offset : offsets[m] + row.payload_nbytes]
        grid, clip, key = levels[m], clips[m], keys[m]
        own_sums, own_counts = sums[row.sums :][: row.n_sums], counts[row.sums :][: row.n_sums]
        own_starts = starts[row.sums : row.sums + row.n_sums]
        if stage == ADD:
            peaks_of[q] = _add(
                piece, row, grad, addend, decay, values, grid, clip, key, subtract, own_starts,
                own_sums, own_counts, body, kept,
            )  # fmt: skip
        peak = _peak_of(piece, row, peaks_of, own_sums)
        finite, by_bucket = peak <= LARGEST_FINITE_BITS, row.method == LEVELS and grid[2] != GIVEN
        if (whole or stage == SELECT) and finite and not by_bucket:
            _encode(
                piece, row, values, grid, clip, key, subtract, own_starts, own_sums, own_counts,
                peak, body,
            )  # fmt: skip
        if whole or stage == WRITE:
            scale = np.int64(NAN_BITS)
            if finite:
                scale = _scale_of(row, grid, clip, own_starts, own_sums, own_counts, peak, body)
            peaks[m] = peak
            start_payload(row, message, offsets[m], headers, changes, scale, 0)


@allocating
def _peak_of(piece, row, peaks_of, sums):
    """Return the bits of the peak of a piece's tensor; of signs 0, or those of infinity."""
    if row.method >= ONE_BIT:
        return np.int64(0) if np.isfinite(sums[: row.n_sums - 1]).all() else _NOT_FINITE
    peak = np.int64(0)
    for p in range(piece.first, piece.first + piece.parts):
        peak = max(peak, peaks_of[p])
    return peak


@allocating
def _words_of(row, grid, body, begin, end):
    """Return the packed words of a piece."""
    digits = 32 if row.method >= ONE_BIT else 4 if row.method == OCTAVES else grid[4]
    per_group = (GROUP + digits - 1) // digits
    words = as_uint32(body[4 * row.scales :])
    at = begin // GROUP * per_group
    return words[at : at + (end - begin + GROUP - 1) // GROUP * per_group]


@allocating
def _add(
    piece, row, grad, addend, decay, values, grid, clip, key, subtract, starts, sums, counts, body,
    kept,
):  # fmt: skip
    """Write gradient plus residual, and what needs no sum over the tensor; return the peak."""
    words = _words_of(row, grid, body, piece.begin, piece.end)
    if row.method >= ONE_BIT:
        if not addend.size and kept:
            copy_into(values, grad)
        here, after = _first_from(starts, piece.begin), _first_from(starts, piece.end)
        own = starts[here : after + 1] - piece.begin
        encode_sign_groups(
            grad if addend.size else addend, addend, decay, values, own, words, sums[here:after],
            counts[here:after], _sign_of_zero(row, key),
        )  # fmt: skip
        return np.int64(0)
    peak = sum_to(values, grad, addend, kept)
    if row.method == LEVELS and grid[2] != GIVEN and peak <= LARGEST_FINITE_BITS:
        scales = as_float32(body[: 4 * row.scales])
        here = scales[piece.begin // grid[3] : (piece.end + grid[3] - 1) // grid[3]]
        group = piece.begin // GROUP
        encode_level_groups(values, grid, here, words, key, group, subtract)
    elif row.method == LEVELS and clip > 0 and peak <= LARGEST_FINITE_BITS:
        group = piece.begin // GROUP
        moments_by_group(values, sums[group:])
    return peak


@allocating
def _first_from(starts, at):
    """Return the index of the first start, of ascending ones, that is not below ``at``."""
    low, high = 0, starts.size
    while low < high:
        middle = (low + high) // 2
        if starts[middle] < at:
            low = middle + 1
        else:
            high = middle
    return low


@allocating
def _sign_of_zero(row, key):
    return SIGNS[1] if row.method == SIGN and key else SIGNS[0]


@allocating
def _encode(
    piece, row, values, grid, clip, key, subtract, starts, sums, counts, peak, body
):  # fmt: skip
    """Write the words that depend on the whole tensor; subtract what is sent."""
    words, group = _words_of(row, grid, body, piece.begin, piece.end), piece.begin // GROUP
    if row.method == OCTAVES:
        top = _top_of(peak)
        encode_octave_groups(values, words, max(top - 126, 1), top, key, group, subtract)
    elif row.method == LEVELS:
        given = np.empty(1, np.float32)
        given[0] = _given(row, clip, sums, peak)
        encode_level_groups(values, grid, given, words, key, group, subtract)
    elif subtract:
        sides = _sides_of(row, starts, sums, counts)
        zero = _sign_of_zero(row, key)
        subtract_sign_rows(values, sides, row.length, piece.begin, zero)


@allocating
def _scale_of(row, grid, clip, starts, sums, counts, peak, body):
    """Write what precedes the words; return the bits of the header's scale."""
    if row.method == OCTAVES:
        return np.int64(_top_of(peak) << 23)
    scales = as_float32(body[: 4 * row.scales])
    if row.method == LEVELS:
        return _bits_of(_given(row, clip, sums, peak) if grid[2] == GIVEN else largest(scales))
    sides = _sides_of(row, starts, sums, counts)
    if row.method == ONE_BIT:
        copy_into(scales, as_float32(sides))
        return _bits_of(np.abs(sides).max())
    return _bits_of(sides[0, 0])


@allocating
def _top_of(peak):
    return max(1, min((peak + _BELOW_POWER) >> 23, 254))


@allocating
def _given(row, clip, sums, peak):
    """Return the scale of a tensor's levels, of clipped values if ``clip``; see ``TernGrad``."""
    scale = float_of(peak)
    if not clip > 0:
        return scale
    mean, square = _total(sums[:, 0]) / row.numel, _total(sums[:, 1]) / row.numel
    variance = square - mean * mean
    deviation = np.sqrt(variance) if variance > _ROUNDING * square else 0.0
    clipped = np.float32(min(clip * deviation, np.float64(scale)))
    return clipped if clipped > 0 else scale


@allocating
def _sides_of(row, starts, sums, counts):
    """Return what bits of 0 and of 1 stand for in each row."""
    sides, n = np.zeros((max(row.scales // 2, 1), 2), np.float32), row.n_sums - 1
    if row.method == ONE_BIT:
        _write_means(row, starts, sums[:n], counts[:n], sides)
    else:
        scale = np.float32(sums[:n].any())
        if row.method == SCALED_SIGN:
            scale = np.float32((_total(sums[:n, 0]) - _total(sums[:n, 1])) / row.numel)
        sides[0, 0], sides[0, 1] = scale, -scale
    return sides


@allocating
def _write_means(row, starts, sums, counts, sides):
    """Write the means of either sign in each row; see ``OneBit.encode``."""
    piece = 0
    for r in range(sides.shape[0]):
        first, below = piece, 0
        while piece < counts.size and starts[piece] < (r + 1) * row.length:
            below += counts[piece]
            piece += 1
        sides[r, 0] = _total(sums[first:piece, 0]) / max(row.length - below, 1)
        sides[r, 1] = _total(sums[first:piece, 1]) / max(below, 1)


@kernel
def sum_dense(
    first, end, pieces, members, offsets, scales, bad, payloads, n_ranks, message_nbytes, headers,
    changes, levels, totals, factor,
):  # fmt: skip
    """Write the sums over ranks of the payloads of tensors; see ``sum_sparse``."""
    for q in range(first, end):
        piece = pieces[q]
        m = piece.member
        row = members[m]
        total = floats_at(totals[m] + 4 * piece.begin, piece.end - piece.begin)
        total[:] = np.float32(0)
        for p in range(n_ranks):
            at = p * message_nbytes + offsets[m]
            payload, scales[m, p], _ = read_payload(row, payloads, at, headers, changes)
            if scales[m, p] < 0 or not _add_body(
                piece, row, payload[row.values_offset :], scales[m, p], levels[m], total
            ):
                bad[m] = 1
                break
        multiply(total, factor)


@allocating
def _add_body(piece, row, body, scale_bits, grid, total):
    """Add the values of a body; return False for one that ``encode_dense`` never writes."""
    scale, words = float_of(scale_bits), _words_of(row, grid, body, piece.begin, piece.end)
    if row.method == OCTAVES:
        if scale_bits & _BELOW_POWER or not scale_bits:
            return False
        top = scale_bits >> 23
        base = max(top - 126, 1)
        return add_octave_groups(total, words, base, top) <= top - base + 1
    if row.scales == 0:
        sizes = np.empty(2, np.float32)
        sizes[0], sizes[1] = scale, -scale
    else:
        sizes = as_float32(body[: 4 * row.scales])
        for size in sizes:
            if not np.abs(size) <= scale or (size < 0 and row.method == LEVELS):
                return False
    if row.method == LEVELS:
        own = sizes if grid[2] == GIVEN else sizes[piece.begin // grid[3] :]
        return add_level_groups(total, words, own, grid) <= grid[0]
    if row.method == SIGN and scale != 0 and scale != 1:
        return False
    sides = sizes.reshape((sizes.size // 2, 2))
    add_sign_groups(total, words, sides, row.length, piece.begin)
    return True
