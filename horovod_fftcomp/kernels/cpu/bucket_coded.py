"""CPU kernels of dithered levels for buckets: one call for all pieces of a thread.

As ``bucket_sparse``, whose stages and pieces these are.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.cpu.addresses import floats_at, residual_at
from horovod_fftcomp.kernels.cpu.arrays import as_int32, as_uint32
from horovod_fftcomp.kernels.cpu.bucket_sparse import ADD, WRITE
from horovod_fftcomp.kernels.cpu.coded_levels import add_coded_chunks, encode_coded_chunks
from horovod_fftcomp.kernels.cpu.headers import NAN_BITS, scale_and_grid, write_header
from horovod_fftcomp.kernels.cpu.jit import inlined, kernel
from horovod_fftcomp.kernels.cpu.sparse import add_groups, peak_bits
from horovod_fftcomp.kernels.cpu.value_codes import float_of
from horovod_fftcomp.wire.coded_levels import CHUNK, KEY_WORDS

# A tensor, as in ``bucket_dense``. ``words``: of the body of a whole chunk; ``room`` and ``limit``:
# of a whole chunk, ``last_room`` and ``last_limit``: of the last one; see ``CodedLevels``.
_FIELDS = (
    "numel reals header_nbytes values_offset payload_nbytes kept total header changes "
    "words room limit last_room last_limit"
)
MEMBER = np.dtype([(name, np.int64) for name in _FIELDS.split()])
_HALF = np.uint64(32)


@inlined
def _chunks_of(row, piece, body):
    """Return the words of a piece's chunks, and the room and the limit of each, ``[chunks, 2]``."""
    first, n = piece.begin // CHUNK, (piece.end - piece.begin + CHUNK - 1) // CHUNK
    rooms = np.empty((n, 2), np.int64)
    rooms[:, 0], rooms[:, 1] = row.room, row.limit
    if piece.end == row.numel:
        rooms[n - 1, 0], rooms[n - 1, 1] = row.last_room, row.last_limit
    return as_uint32(body)[KEY_WORDS + first * row.words :], rooms


@kernel
def encode_coded_bucket(
    stage, first, end, pieces, scales, members, grads, residuals, offsets, keys, peaks, kept,
    message, headers, changes, numbers, costs, freqs, reciprocals, shifts, biases, decay, subtract,
):  # fmt: skip
    """Take pieces ``first`` to ``end`` through a stage, those that are a tensor through all.

    As ``encode_sparse``. ``scales``: of the pieces, float64; NaN or infinity if one is not finite.
    """
    most, none = np.int64(0), np.int64(0)
    for q in range(first, end):
        most = max(most, pieces[q].end - pieces[q].begin)
    scratch = np.empty(0 if kept else most, np.float32)
    scaled = np.empty(0 if decay == 1 else most, np.float32)
    for q in range(first, end):
        piece = pieces[q]
        m, n = piece.member, piece.end - piece.begin
        row = members[m]
        payload = message[offsets[m] : offsets[m] + row.payload_nbytes]
        body = payload[row.values_offset :]
        if stage == ADD:
            grad = floats_at(grads[m] + 4 * piece.begin, n)
            old = residuals[m] + 4 * piece.begin if residuals[m] else residuals[m]
            addend = residual_at(old, n, decay, scaled)
            if kept:
                values = floats_at(kept + 4 * (row.kept + piece.begin), n)
            else:  # with a residual, a tensor is in one piece
                values = scratch[:n] if addend.size else grad
            if kept or addend.size:
                peak, _, _, _ = add_groups(grad, addend, values, none, none, np.empty(0, np.int32))
            else:
                peak = peak_bits(as_int32(values))
            scales[q] = np.nan
            if peak <= LARGEST_FINITE_BITS:
                words, rooms = _chunks_of(row, piece, body)
                scales[q] = encode_coded_chunks(
                    values, words, rooms, keys[m], piece.begin // CHUNK, subtract,
                    numbers, costs, freqs, reciprocals, shifts, biases,
                )  # fmt: skip
        if piece.parts == 1 or stage == WRITE:
            whole = scales[piece.first : piece.first + piece.parts]
            scale_bits = np.int64(NAN_BITS)
            if np.isfinite(whole).all():
                largest = np.empty(1, np.float32)
                largest[0] = whole.max()
                scale_bits = np.int64(as_int32(largest)[0])
                words = as_uint32(body)
                words[0] = np.uint32(keys[m] & np.uint64(0xFFFFFFFF))
                words[1] = np.uint32(keys[m] >> _HALF)
            else:
                body[:] = np.uint8(0)
            peaks[m] = scale_bits
            start = headers[row.header : row.header + row.header_nbytes // 8]
            not_finite = scale_bits == NAN_BITS
            write_header(payload, start, changes[row.changes], scale_bits, 0, not_finite)


@kernel
def sum_coded_bucket(
    first, end, pieces, members, offsets, scales, bad, payloads, n_ranks, message_nbytes, headers,
    changes, numbers, decoders, totals,
):  # fmt: skip
    """Write the sums over ranks of the payloads of tensors; see ``sum_sparse``."""
    for q in range(first, end):
        piece = pieces[q]
        m = piece.member
        row = members[m]
        total = floats_at(totals + 4 * (row.total + piece.begin), piece.end - piece.begin)
        total[:] = np.float32(0)
        start = headers[row.header : row.header + row.header_nbytes // 8]
        for p in range(n_ranks):
            at = p * message_nbytes + offsets[m]
            payload = payloads[at : at + row.payload_nbytes]
            scales[m, p], _ = scale_and_grid(payload, start, changes[row.changes])
            body = payload[row.values_offset :]
            words, rooms = _chunks_of(row, piece, body)
            key = np.uint64(as_uint32(body)[0]) | np.uint64(as_uint32(body)[1]) << _HALF
            if scales[m, p] < 0 or add_coded_chunks(
                total, words, rooms, key, piece.begin // CHUNK, float_of(scales[m, p]), numbers,
                decoders,
            ):  # fmt: skip
                bad[m] = 1
                break
