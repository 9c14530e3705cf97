"""Pieces of a bucket's tensors, which the compiled calls of all kinds of codecs go through."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.addresses import floats_at, residual_at
from horovod_fftcomp.kernels.cpu.arrays import as_int32
from horovod_fftcomp.kernels.cpu.headers import NAN_BITS, scale_and_grid, write_header
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.sparse import add_groups, peak_bits
from horovod_fftcomp.kernels.cpu.topk import GROUP, LEAST_GROUPS
from horovod_fftcomp.types import Array

# A piece of a tensor: its reals from ``begin`` to ``end``, the same numbers of its elements and of
# its coefficients; the number of the tensor's first piece, and of all. ``found``, ``bitmap``,
# ``packed``: where its part begins in the memory that the stages share; ``room``: for keys.
_FIELDS = "member begin end first parts found room bitmap packed"
PIECE = np.dtype([(name, np.int64) for name in _FIELDS.split()])
CUT = 1 << 15  # pieces begin at multiples of it: whole groups of keys, and whole tiles of blocks
# Stages; a tensor in one piece goes through all of them in the first. Ranks are found, and payloads
# written, by one thread for all pieces of a tensor.
ADD, RANK, SELECT, WRITE = range(4)

_LEAST_CUT = 1 << 18  # reals of a tensor that is cut in pieces for several threads


class Pieces(NamedTuple):
    """Table of the pieces of a group's tensors; see ``PIECE``.

    ``ranges``: of the pieces, (first, end), for each thread. ``parts``: the pieces of tensors of
    several pieces, as such ranges; ``firsts``: the first one of each such tensor.
    """

    table: Array
    ranges: list[tuple[int, int]]
    parts: list[tuple[int, int]]
    firsts: list[tuple[int, int]]


def pieces_of(reals: Sequence[int]) -> Pieces:
    """Return the pieces of tensors of so many coefficients: as many elements for each thread.

    Only tensors where the share of a thread ends are cut, and no small ones.
    """
    ends = np.cumsum(reals)
    cuts: list[tuple[int, int]] = []  # (tensor, real) at which a thread's share ends
    for _, share in threads.ranges(int(ends[-1]) // GROUP, LEAST_GROUPS)[:-1]:
        member = int(np.searchsorted(ends, share * GROUP, "right"))
        size, at = reals[member], share * GROUP - int(ends[member]) + reals[member]
        at = round(at / CUT) * CUT if size >= _LEAST_CUT else size * (2 * at > size)
        cuts.append((member + 1, 0) if at >= size else (member, at))
    rows: list[tuple[int, ...]] = []
    for member, size in enumerate(reals):
        own = sorted({0, *(at for cut, at in cuts if cut == member)})
        for begin, end in itertools.pairwise([*own, size]):
            rows.append((member, begin, end, len(rows) - own.index(begin), len(own)))
    table = np.zeros(len(rows), PIECE)
    for name, column in zip(PIECE.names or (), zip(*rows, strict=True), strict=False):
        table[name] = column
    begins = [(row[0], row[1]) for row in rows]
    starts = sorted({0, *(begins.index(cut) for cut in cuts if cut in begins)})
    ranges = list(itertools.pairwise([*starts, len(rows)]))
    parts = [(number, number + 1) for number, row in enumerate(rows) if row[4] > 1]
    return Pieces(table, ranges, parts, [part for part in parts if not rows[part[0]][1]])


@allocating
def arrays_of(piece, row, grad, residual, kept, decay, scratch):
    """Return gradient and residual of a piece of a dense codec's tensor, and where their sum goes.

    ``grad``, ``residual``, ``kept``: addresses, of the tensor's gradient, of its residual or 0, and
    of the arena for the sum or 0: then it goes to ``scratch``, or is the gradient itself. Where the
    sum goes the residual is multiplied by ``decay``, unless that is 1.
    """
    n = piece.end - piece.begin
    values = floats_at(grad + 4 * piece.begin, n)
    out = floats_at(kept + 4 * (row.kept + piece.begin), n) if kept else scratch[:n]
    addend = residual_at(residual + 4 * piece.begin if residual else residual, n, decay, out)
    return values, addend, out if kept or addend.size else values


@allocating
def sum_to(out, grad, addend, kept):
    """Write gradient plus residual, unless it is the gradient itself; return bits of the peak."""
    if not kept and not addend.size:
        return peak_bits(as_int32(out))
    none = np.int64(0)
    peak, _, _, _ = add_groups(grad, addend, out, none, none, np.empty(0, np.int32))
    return peak


@inlined
def longest_of(pieces, first, end):
    """Return the number of reals of the longest of some pieces."""
    most = np.int64(0)
    for q in range(first, end):
        most = max(most, pieces[q].end - pieces[q].begin)
    return most


@allocating
def start_payload(row, message, offset, headers, changes, scale_bits, grid):
    """Write the header of a payload, which is returned; zeros after it if the scale is NaN."""
    payload = message[offset : offset + row.payload_nbytes]
    start = headers[row.header : row.header + row.header_nbytes // 8]
    not_finite = scale_bits == NAN_BITS
    write_header(payload, start, changes[row.changes], scale_bits, grid, not_finite)
    if not_finite:
        payload[row.header_nbytes :] = np.uint8(0)
    return payload


@allocating
def read_payload(row, payloads, at, headers, changes):
    """Return a payload, the bits of its scale and its grid; see ``scale_and_grid``."""
    payload = payloads[at : at + row.payload_nbytes]
    start = headers[row.header : row.header + row.header_nbytes // 8]
    scale, grid = scale_and_grid(payload, start, changes[row.changes])
    return payload, scale, grid
