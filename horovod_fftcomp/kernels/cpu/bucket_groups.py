"""Groups of a bucket's tensors that the same compiled calls encode and sum."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.codec.base import PayloadCodec
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.codec.methods.signs import SignMethod
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.transforms import BlockDCT, Identity, Transform
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu import bucket_coded as coded
from horovod_fftcomp.kernels.cpu import bucket_dense as dense
from horovod_fftcomp.kernels.cpu.bucket_rank import TALLY, room_of
from horovod_fftcomp.kernels.cpu.bucket_sparse import MEMBER, encode_sparse, sum_sparse
from horovod_fftcomp.kernels.cpu.buffer_pool import empty
from horovod_fftcomp.kernels.cpu.coded_levels import room_and_limit, tables_of
from horovod_fftcomp.kernels.cpu.pieces import ADD, RANK, SELECT, WRITE, pieces_of
from horovod_fftcomp.kernels.cpu.topk import GROUP
from horovod_fftcomp.kernels.cpu.transforms import constants_of, span_of
from horovod_fftcomp.kernels.cpu.value_codes import PADDING
from horovod_fftcomp.types import Array, Shape
from horovod_fftcomp.wire.coded_levels import CHUNK, CodedLevels
from horovod_fftcomp.wire.header import Plan, header_and_changes
from horovod_fftcomp.wire.positions import Layout, unary_bits
from horovod_fftcomp.wire.radix import digits_of

Member = tuple[Any, Shape]  # a codec and the shape of its tensor


class Group(abc.ABC):
    """Tensors whose pieces compiled calls go through, one for each thread and stage.

    ``_kernels``: that encodes, and that sums; methods give the arguments that groups have alone.
    """

    _kernels: tuple[Any, Any]

    def __init__(self, own: Sequence[Member], kept: Array) -> None:
        """``kept``: the first floats of residuals in their array."""
        plans = [codec.plan(shape) for codec, shape in own]
        headers = [
            header_and_changes(plan, codec.fingerprint)
            for plan, (codec, _) in zip(plans, own, strict=True)
        ]
        starts = [start.view(np.uint64) for start, _ in headers]
        kinds = {start.size: changes for start, (_, changes) in zip(starts, headers, strict=True)}
        self._headers = np.concatenate(starts), np.array(list(kinds.values()))
        self._rows = self._rows_of(own, plans)
        rows, sizes = self._rows, [start.size for start in starts]
        rows["kept"] = kept
        rows["numel"] = [plan.numel for plan in plans]
        rows["header"] = np.cumsum(sizes) - sizes
        rows["changes"] = [list(kinds).index(size) for size in sizes]
        for name in ("header_nbytes", "values_offset", "payload_nbytes"):
            rows[name] = [getattr(plan, name) for plan in plans]
        self._pieces = pieces_of(rows["reals"].tolist())

    @property
    def is_cut(self) -> bool:
        """Whether a tensor is in several pieces, whose coefficients need memory between stages."""
        return bool(self._pieces.parts)

    @abc.abstractmethod
    def _rows_of(self, own: Sequence[Member], plans: Sequence[Plan]) -> Array:
        """Return the rows of the table, without the fields that all groups have."""

    @abc.abstractmethod
    def _to_encode(self) -> tuple:
        """Return the own arguments of the kernel that encodes."""

    @abc.abstractmethod
    def _memory(self) -> tuple:
        """Return memory in which stages of the kernel that encodes leave what the next ones read.

        The last arguments before the table of tensors.
        """

    @abc.abstractmethod
    def _to_sum(self) -> tuple:
        """Return the own arguments of the kernel that sums payloads."""

    def encode(self, columns: Sequence[Array], kept: int, message: Array, *options: object) -> None:
        """Write payloads and peaks.

        ``columns``: by tensor, the addresses of gradients and residuals, 0 for none; the payloads'
        offsets; keys; peaks, to be written. ``kept``: address of the new residuals, 0 if none are
        wanted. ``options``: factor of the residuals, and whether new ones lack what was sent.
        """
        kernel, pieces = self._kernels[0], self._pieces
        tables = pieces.table, *self._memory(), self._rows, *columns, kept, message, *self._headers
        arguments = *tables, *self._to_encode(), *options

        def run(stage: int, ranges: list[tuple[int, int]]) -> None:
            threads.each(lambda first, end: kernel(stage, first, end, *arguments), ranges)

        run(ADD, pieces.ranges)
        if pieces.parts:
            run(RANK, pieces.firsts)
            run(SELECT, pieces.parts)
            run(WRITE, pieces.firsts)

    def sum(
        self, columns: Sequence[Array], totals: Array, factor: float, *messages: object
    ) -> None:
        """Write sums, the bits of scales, and which tensors have an unexpected payload.

        ``columns``: by tensor, the payloads' offsets, and what is written: scales and flags.
        ``totals``: addresses of the sums, times ``factor``. ``messages``: of all ranks; their
        number; bytes of each.
        """
        kernel, tables = self._kernels[1], (self._pieces.table, self._rows, *columns)
        options = *self._to_sum(), totals, np.float32(factor)
        arguments = *tables, *messages, *self._headers, *options
        threads.each(lambda *own: kernel(*own, *arguments), self._pieces.ranges)


class SparseGroup(Group):
    """Tensors of sparse codecs with the same transform."""

    _kernels = encode_sparse, sum_sparse

    def __init__(self, transform: Transform, own: Sequence[Member], kept: Array) -> None:
        super().__init__(own, kept)
        block = 0 if isinstance(transform, Identity) else transform.block
        kind = block, isinstance(transform, BlockDCT)
        self._forward, self._inverse = (
            constants_of(*kind, back) if block else None for back in (False, True)
        )
        self._span = span_of(block, transform.reals_per_bin)
        self._sizes = self._lay_out(transform.reals_per_bin)

    def _lay_out(self, width: int) -> list[int]:
        """Enter where pieces find their parts of ``_memory``; return the sizes of this."""
        sizes = [0, 0, 0]
        for piece in self._pieces.table:
            row, reals = self._rows[piece["member"]], int(piece["end"] - piece["begin"])
            piece["room"] = room_of(reals, piece["parts"])
            if piece["parts"] > 1:
                piece["found"], piece["bitmap"], piece["packed"] = sizes
                n_codes = min(reals, width * int(row["k"])) * int(row["bits"])
                groups = -(-reals // (width * GROUP))
                for at, size in enumerate(
                    (piece["room"], groups * (GROUP // 64), n_codes // 64 + PADDING + 1)
                ):
                    sizes[at] += int(size)
        return sizes

    def _rows_of(self, own: Sequence[Member], plans: Sequence[Plan]) -> Array:
        rows = np.zeros(len(plans), MEMBER)
        for row, plan, (codec, _) in zip(rows, plans, own, strict=True):
            row["layout"] = plan.layout
            if plan.layout is Layout.RAW:
                row["n"] = row["reals"] = plan.numel
                continue
            chosen = plan.positions
            row["n"], row["k"] = chosen.n, chosen.k
            row["reals"] = chosen.n * codec.transform.reals_per_bin
            row["low_bits"], row["positions_nbytes"] = chosen.low_bits, chosen.nbytes
            row["kind"], row["bits"], *_ = codec.coding(1.0)
            if plan.layout is Layout.OFFSETS:
                row["n_unary"] = unary_bits(chosen.n, chosen.k, chosen.low_bits)
        return rows

    def _memory(self) -> tuple:
        found, words, packed = self._sizes
        shared = empty(found, np.int32), empty(words, np.uint64), empty(packed, np.uint64)
        return np.zeros(len(self._pieces.table), TALLY), *shared

    def _to_encode(self) -> tuple:
        return self._forward, self._span

    def _to_sum(self) -> tuple:
        return self._inverse, self._span


class DenseGroup(Group):
    """Tensors of dense codecs."""

    _kernels = dense.encode_dense, dense.sum_dense

    def _rows_of(self, own: Sequence[Member], plans: Sequence[Plan]) -> Array:
        rows = np.zeros(len(plans), dense.MEMBER)
        self._levels = np.zeros((len(plans), 5), np.int64)
        self._clips = np.zeros(len(plans))
        starts: list[Array] = []
        for number, (row, (codec, shape)) in enumerate(zip(rows, own, strict=True)):
            method, numel = codec.method, math.prod(shape)
            kind, grid, self._clips[number] = method.cuda
            row["method"], row["reals"], row["sums"] = _METHODS[kind], numel, sum(map(len, starts))
            if isinstance(method, SignMethod):
                row["length"] = length = method.row_length(shape)
                starts.append(method.pieces(numel, length))
                row["scales"] = 2 * (numel // length) if kind == "means" else 0
            elif kind != "octaves":
                self._levels[number] = *grid, digits_of(grid.radix)
                row["scales"] = -(-numel // grid.bucket) if grid.bucket else 0
                if self._clips[number]:
                    starts.append(np.arange(0, numel, GROUP))
            row["n_sums"] = sum(map(len, starts)) - row["sums"]
        self._starts = np.concatenate([np.zeros(0, np.int64), *starts])
        return rows

    def _memory(self) -> tuple:
        n = self._starts.size
        return np.zeros(len(self._pieces.table), np.int64), np.empty((n, 2)), np.empty(n, np.int64)

    def _to_encode(self) -> tuple:
        return self._levels, self._clips, self._starts

    def _to_sum(self) -> tuple:
        return (self._levels,)


class CodedGroup(Group):
    """Tensors of dithered levels of one form."""

    _kernels = coded.encode_coded_bucket, coded.sum_coded_bucket

    def __init__(self, form: CodedLevels, own: Sequence[Member], kept: Array) -> None:
        self._form = form
        numbers, costs, decoders, *encoders = tables_of(form)
        self._encoding, self._decoding = (numbers, costs, *encoders), (numbers, decoders)
        super().__init__(own, kept)

    def _rows_of(self, own: Sequence[Member], plans: Sequence[Plan]) -> Array:
        rows = np.zeros(len(plans), coded.MEMBER)
        rows["reals"] = [plan.numel for plan in plans]
        rows["words"] = self._form.chunk_words(CHUNK)
        rows["room"], rows["limit"] = room_and_limit(self._form, CHUNK)
        for row, plan in zip(rows, plans, strict=True):
            row["last_room"], row["last_limit"] = room_and_limit(
                self._form, (plan.numel - 1) % CHUNK + 1
            )
        return rows

    def _memory(self) -> tuple:
        return (np.zeros(len(self._pieces.table)),)

    def _to_encode(self) -> tuple:
        return self._encoding

    def _to_sum(self) -> tuple:
        return self._decoding


# By the kind of scales, see ``CudaMethod``.
_METHODS = {
    **dict.fromkeys(("norms", "peaks", "clipped"), dense.LEVELS),
    "octaves": dense.OCTAVES,
    "means": dense.ONE_BIT,
    "votes": dense.SIGN,
    "magnitude": dense.SCALED_SIGN,
}


def groups_of(
    codecs: Sequence[PayloadCodec], shapes: Sequence[Shape]
) -> list[tuple[Callable[..., Group], list[int]]]:
    """Return each group's class and the indices of its tensors."""
    groups: dict[Any, list[int]] = {}
    for number, (codec, shape) in enumerate(zip(codecs, shapes, strict=True)):
        kind: Any = None
        if codec.plan(shape).layout is Layout.RAW:
            kind = Identity()
        elif isinstance(codec, Codec):
            kind = codec.transform
        elif isinstance(codec, DenseCodec) and isinstance(codec.method, Dither):
            kind = codec.method.form()
        elif isinstance(codec, DenseCodec) and getattr(codec.method.cuda, "kind", "") in _METHODS:
            kind = DenseGroup
        if kind is not None:
            groups.setdefault(kind, []).append(number)
    return [(_class_of(kind), members) for kind, members in groups.items()]


def _class_of(kind: Any) -> Callable[..., Group]:
    if kind is DenseGroup:
        return DenseGroup
    return functools.partial(CodedGroup if isinstance(kind, CodedLevels) else SparseGroup, kind)
