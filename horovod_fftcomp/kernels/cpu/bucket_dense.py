"""CPU kernels of dense codecs for buckets of small tensors: one call for all of them.

As ``bucket_sparse``: every tensor goes through all stages, by the functions of the kernels for
single tensors, before the next one.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.cpu.addresses import floats_at, residual_at
from horovod_fftcomp.kernels.cpu.arrays import as_float32, as_int32, as_uint32, copy_into, largest
from horovod_fftcomp.kernels.cpu.dense import (
    add_level_groups,
    add_octave_groups,
    encode_level_groups,
    encode_octave_groups,
    moments_by_group,
)
from horovod_fftcomp.kernels.cpu.headers import NAN_BITS, scale_and_grid, write_header
from horovod_fftcomp.kernels.cpu.jit import inlined, kernel
from horovod_fftcomp.kernels.cpu.signs import (
    SIGNS,
    add_sign_groups,
    encode_sign_groups,
    subtract_sign_rows,
)
from horovod_fftcomp.kernels.cpu.sparse import add_groups
from horovod_fftcomp.kernels.cpu.value_codes import float_of
from horovod_fftcomp.wire.radix import GIVEN, GROUP, LANES

# A tensor, as its plan and its codec say: as in ``bucket_sparse``; ``scales``: number of float32
# before the packed words; ``length``: of a row of signs; ``piece`` and ``pieces``: the first of the
# starts of its rows and groups, and their number.
_FIELDS = (
    "numel header_nbytes values_offset payload_nbytes kept total header changes method "
    "scales length piece pieces"
)
MEMBER = np.dtype([(name, np.int64) for name in _FIELDS.split()])
LEVELS, OCTAVES, ONE_BIT, SCALED_SIGN, SIGN = range(5)

_BELOW_POWER = 0x7FFFFF  # the mantissa's bits of a float32
_ROUNDING = 1e-12  # as in ``codec.methods.terngrad``
_NOT_FINITE = np.int64(0x7F800000)


@inlined
def _bits_of(value):
    number = np.empty(1, np.float32)
    number[0] = value
    return np.int64(as_int32(number)[0])


@inlined
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
    members, grads, residuals, offsets, keys, peaks, kept, message, headers, changes, levels, clips,
    starts, decay, subtract,
):  # fmt: skip
    """Write the payloads of tensors, and the bits of their peaks; see ``encode_sparse``.

    A peak that a method does not need is given as 0.
    """
    most = np.int64(0)
    for m in range(members.size):
        most = max(most, members[m].numel)
    scratch, scaled = np.empty(most, np.float32), np.empty(most, np.float32)
    nothing = np.empty(0, np.float32)
    for m in range(members.size):
        row = members[m]
        values = floats_at(kept + 4 * row.kept, row.numel) if kept else scratch[: row.numel]
        grad = floats_at(grads[m], row.numel)
        addend = residual_at(residuals[m], row.numel, decay, scaled)
        payload = message[offsets[m] : offsets[m] + row.payload_nbytes]
        body = payload[row.values_offset :]
        if row.method >= ONE_BIT:
            pieces = starts[row.piece : row.piece + row.pieces]
            if not addend.size:
                copy_into(values, grad)
                grad = nothing
            peak, scale_bits = _encode_signs(
                row, grad, addend, values, pieces, keys[m], subtract, body
            )
        else:
            peak, scale_bits = _encode_elements(
                row, grad, addend, values, levels[m], clips[m], keys[m], subtract, body
            )
        peaks[m] = peak
        start = headers[row.header : row.header + row.header_nbytes // 8]
        write_header(payload, start, changes[row.changes], scale_bits, 0, scale_bits == NAN_BITS)


@inlined
def _encode_elements(row, grad, residual, values, levels, clip, key, subtract, body):
    """Write the body of gradient plus residual; return bits of the peak and the header's scale."""
    none = np.int64(0)
    peak, _, _, _ = add_groups(grad, residual, values, none, none, np.empty(0, np.int32))
    if peak > LARGEST_FINITE_BITS:
        return peak, np.int64(NAN_BITS)
    if row.method == OCTAVES:
        top = max(1, min((peak + _BELOW_POWER) >> 23, 254))
        words = as_uint32(body)
        encode_octave_groups(values, words, max(top - 126, 1), top, key, 0, subtract)
        return peak, np.int64(top << 23)
    return peak, _encode_levels(row, values, levels, clip, key, peak, subtract, body)


@inlined
def _encode_levels(row, values, levels, clip, key, peak, subtract, body):
    """Write scales and levels; return the bits of the header's scale."""
    scales, words = as_float32(body[: 4 * row.scales]), as_uint32(body[4 * row.scales :])
    if levels[2] != GIVEN:
        encode_level_groups(values, levels, scales, words, key, 0, subtract)
        return _bits_of(largest(scales))
    given = np.empty(1, np.float32)
    given[0] = float_of(peak)
    if clip > 0:
        given[0] = _clipped(values, clip, given[0])
    encode_level_groups(values, levels, given, words, key, 0, subtract)
    return _bits_of(given[0])


@inlined
def _clipped(values, clip, scale):
    """Return the scale of clipped values; see ``TernGrad.encode``."""
    n_groups = (values.size + GROUP - 1) // GROUP
    sums, squares = np.empty(n_groups), np.empty(n_groups)
    moments_by_group(values, sums, squares)
    mean, square = _total(sums) / values.size, _total(squares) / values.size
    variance = square - mean * mean
    deviation = np.sqrt(variance) if variance > _ROUNDING * square else 0.0
    clipped = np.float32(min(clip * deviation, np.float64(scale)))
    return clipped if clipped > 0 else scale


@inlined
def _encode_signs(row, grad, residual, values, starts, key, subtract, body):
    """Write signs of gradient plus residual; return bits of a peak and of the header's scale."""
    n_pieces = starts.size - 1
    sums, counts = np.empty((n_pieces, 2)), np.empty(n_pieces, np.int64)
    words = as_uint32(body[4 * row.scales :])
    zero = SIGNS[1] if row.method == SIGN and key else SIGNS[0]
    encode_sign_groups(grad, residual, values, starts, words, sums, counts, zero)
    if not np.isfinite(sums).all():
        body[:] = np.uint8(0)
        return _NOT_FINITE, np.int64(NAN_BITS)
    sides = np.zeros((max(row.scales // 2, 1), 2), np.float32)
    if row.method == ONE_BIT:
        _write_means(row, starts, sums, counts, sides)
        copy_into(as_float32(body[: 4 * row.scales]), as_float32(sides))
        scale = np.abs(sides).max()
    elif row.method == SIGN:
        scale = np.float32(sums.any())
    else:
        scale = np.float32((_total(sums[:, 0]) - _total(sums[:, 1])) / values.size)
    if row.method != ONE_BIT:
        sides[0, 0], sides[0, 1] = scale, -scale
    if subtract:
        subtract_sign_rows(values, sides, row.length, 0, zero)
    return np.int64(0), _bits_of(scale)


@inlined
def _write_means(row, starts, sums, counts, sides):
    """Write the means of either sign in each row; see ``OneBit.encode_signs``."""
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
    members, offsets, scales, bad, payloads, n_ranks, message_nbytes, headers, changes, levels,
    totals,
):  # fmt: skip
    """Write the sums over ranks of the payloads of tensors; see ``sum_sparse``."""
    for m in range(members.size):
        row = members[m]
        total = floats_at(totals + 4 * row.total, row.numel)
        total[:] = np.float32(0)
        start = headers[row.header : row.header + row.header_nbytes // 8]
        for p in range(n_ranks):
            at = p * message_nbytes + offsets[m]
            payload = payloads[at : at + row.payload_nbytes]
            scales[m, p], _ = scale_and_grid(payload, start, changes[row.changes])
            if scales[m, p] < 0 or not _add_body(
                row, payload[row.values_offset :], scales[m, p], levels[m], total
            ):
                bad[m] = 1
                break


@inlined
def _add_body(row, body, scale_bits, levels, total):
    """Add the values of a body; return False for one that ``encode_dense`` never writes."""
    scale = float_of(scale_bits)
    words = as_uint32(body[4 * row.scales :])
    if row.method == OCTAVES:
        if scale_bits & _BELOW_POWER or not scale_bits:
            return False
        top = scale_bits >> 23
        base = max(top - 126, 1)
        return add_octave_groups(total, words, base, top) <= top - base + 1
    given = row.scales == 0
    if given and row.method == LEVELS:
        sizes = np.empty(1, np.float32)
        sizes[0] = scale
    elif given:
        sizes = np.empty(2, np.float32)
        sizes[0], sizes[1] = scale, -scale
    else:
        sizes = as_float32(body[: 4 * row.scales])
        for size in sizes:
            if not np.abs(size) <= scale or (size < 0 and row.method == LEVELS):
                return False
    if row.method == LEVELS:
        return add_level_groups(total, words, sizes, levels) <= levels[0]
    if row.method == SIGN and scale != 0 and scale != 1:
        return False
    add_sign_groups(total, words, sizes.reshape((sizes.size // 2, 2)), row.length, 0)
    return True
