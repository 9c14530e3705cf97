"""CPU kernels of dithered levels for buckets: one call for all pieces of a thread.

As ``bucket_sparse``.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.cpu.addresses import floats_at
from horovod_fftcomp.kernels.cpu.arrays import as_int32, as_uint32, multiply
from horovod_fftcomp.kernels.cpu.coded_levels import add_coded_chunks, encode_coded_chunks
from horovod_fftcomp.kernels.cpu.headers import NAN_BITS
from horovod_fftcomp.kernels.cpu.inlining import allocating
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.kernels.cpu.pieces import (
    ADD,
    WRITE,
    arrays_of,
    longest_of,
    read_payload,
    start_payload,
    sum_to,
)
from horovod_fftcomp.kernels.cpu.value_codes import float_of
from horovod_fftcomp.wire.coded_levels import CHUNK, KEY_WORDS

# A tensor, as in ``bucket_dense``. ``words``: of the body of a whole chunk; ``room`` and ``limit``:
# of a whole chunk, ``last_room`` and ``last_limit``: of the last one; see ``CodedLevels``.
_FIELDS = (
    "numel reals header_nbytes values_offset payload_nbytes kept header changes "
    "words room limit last_room last_limit"
)
MEMBER = np.dtype([(name, np.int64) for name in _FIELDS.split()])
_HALF = np.uint64(32)


@allocating
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
    scratch = np.empty(0 if kept else longest_of(pieces, first, end), np.float32)
    for q in range(first, end):
        piece = pieces[q]
        m = piece.member
        row = members[m]
        body = message[offsets[m] + row.values_offset : offsets[m] + row.payload_nbytes]
        if stage == ADD:
            grad, addend, values = arrays_of(
                piece, row, grads[m], residuals[m], kept, decay, scratch
            )
            scales[q] = np.nan
            if sum_to(values, grad, addend, kept) <= LARGEST_FINITE_BITS:
                words, rooms = _chunks_of(row, piece, body)
                scales[q] = encode_coded_chunks(
                    values, words, rooms, keys[m], piece.begin // CHUNK, subtract,
                    numbers, costs, freqs, reciprocals, shifts, biases,
                )  # fmt: skip
        if piece.parts == 1 or stage == WRITE:
            own, largest = scales[piece.first : piece.first + piece.parts], np.empty(1, np.float32)
            largest[0] = own.max()
            finite = np.isfinite(own).all()
            peaks[m] = np.int64(as_int32(largest)[0]) if finite else np.int64(NAN_BITS)
            words = as_uint32(body)
            words[0] = np.uint32(keys[m] & np.uint64(0xFFFFFFFF))
            words[1] = np.uint32(keys[m] >> _HALF)
            start_payload(row, message, offsets[m], headers, changes, peaks[m], 0)


@kernel
def sum_coded_bucket(
    first, end, pieces, members, offsets, scales, bad, payloads, n_ranks, message_nbytes, headers,
    changes, numbers, decoders, totals, factor,
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
            body = payload[row.values_offset :]
            words, rooms = _chunks_of(row, piece, body)
            key = np.uint64(as_uint32(body)[0]) | np.uint64(as_uint32(body)[1]) << _HALF
            if scales[m, p] < 0 or add_coded_chunks(
                total, words, rooms, key, piece.begin // CHUNK, float_of(scales[m, p]), numbers,
                decoders,
            ):  # fmt: skip
                bad[m] = 1
                break
        multiply(total, factor)
