"""Groups of a bucket's small tensors that the same compiled calls encode and sum."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.codec.base import PayloadCodec
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.signs import SignMethod
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.transforms import BlockDCT, Identity, Transform
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu import bucket_dense as dense
from horovod_fftcomp.kernels.cpu.bucket_sparse import MEMBER, encode_sparse, sum_sparse
from horovod_fftcomp.kernels.cpu.topk import GROUP, LEAST_GROUPS
from horovod_fftcomp.kernels.cpu.transforms import constants_of, span_of
from horovod_fftcomp.types import Array, Shape
from horovod_fftcomp.wire.header import Plan, header_and_changes
from horovod_fftcomp.wire.positions import Layout, unary_bits
from horovod_fftcomp.wire.radix import digits_of

Member = tuple[Any, Shape]  # a codec and the shape of its tensor
_ONE_THREADS = (2 * LEAST_GROUPS - 1) * GROUP  # elements that one thread encodes anyway
_MOST = 1 << 21  # elements of a tensor: a thread encodes with up to 40 MiB of scratch memory


class Group(abc.ABC):
    """Tensors whose rows of a table one compiled call goes through.

    ``_kernels``: that encodes, and that sums; methods give the arguments that groups have alone.
    """

    _kernels: tuple[Any, Any]

    def __init__(self, own: Sequence[Member], kept: Array, totals: Array) -> None:
        """``kept``, ``totals``: the first floats of residuals and sums in their arrays."""
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
        rows["kept"], rows["total"] = kept, totals
        rows["numel"] = [plan.numel for plan in plans]
        rows["header"] = np.cumsum(sizes) - sizes
        rows["changes"] = [list(kinds).index(size) for size in sizes]
        for name in ("header_nbytes", "values_offset", "payload_nbytes"):
            rows[name] = [getattr(plan, name) for plan in plans]
        self._ends = np.cumsum([-(-plan.numel // GROUP) for plan in plans])

    @abc.abstractmethod
    def _rows_of(self, own: Sequence[Member], plans: Sequence[Plan]) -> Array:
        """Return the rows of the table, without the fields that all groups have."""

    @abc.abstractmethod
    def _to_encode(self, here: slice) -> tuple:
        """Return the own arguments of the kernel that encodes these rows."""

    @abc.abstractmethod
    def _to_sum(self, here: slice) -> tuple:
        """Return the own arguments of the kernel that sums the payloads of these rows."""

    def encode(self, columns: Sequence[Array], kept: int, message: Array, *options: object) -> None:
        """Write payloads and peaks.

        ``columns``: by tensor, the addresses of gradients and residuals, 0 for none; the payloads'
        offsets; keys; peaks, to be written. ``kept``: address of the new residuals, 0 if none are
        wanted. ``options``: factor of the residuals, and whether new ones lack what was sent.
        """

        def work(here: slice) -> None:
            own = [column[here] for column in (self._rows, *columns)]
            constants = *self._headers, *self._to_encode(here)
            self._kernels[0](*own, kept, message, *constants, *options)

        self._each(work)

    def sum(self, columns: Sequence[Array], totals: int, *messages: object) -> None:
        """Write sums, the bits of scales, and which tensors have an unexpected payload.

        ``columns``: by tensor, the payloads' offsets, and what is written: scales and flags.
        ``totals``: address of the sums. ``messages``: of all ranks; their number; bytes of each.
        """

        def work(here: slice) -> None:
            own = [column[here] for column in (self._rows, *columns)]
            self._kernels[1](*own, *messages, *self._headers, *self._to_sum(here), totals)

        self._each(work)

    def _each(self, work: Callable[[slice], object]) -> None:
        """Call ``work`` with the rows for each thread."""
        ranges = threads.ranges(int(self._ends[-1]), LEAST_GROUPS)
        cuts = np.searchsorted(self._ends, [end for _, end in ranges], "left") + 1
        cuts[-1] = self._ends.size
        firsts = [0, *cuts[:-1].tolist()]
        threads.each(work, [(slice(*pair),) for pair in zip(firsts, cuts.tolist(), strict=True)])


class SparseGroup(Group):
    """Tensors of sparse codecs with the same transform."""

    _kernels = encode_sparse, sum_sparse

    def __init__(
        self, transform: Transform, own: Sequence[Member], kept: Array, totals: Array
    ) -> None:
        super().__init__(own, kept, totals)
        block = 0 if isinstance(transform, Identity) else transform.block
        kind = block, isinstance(transform, BlockDCT)
        self._forward, self._inverse = (
            constants_of(*kind, back) if block else None for back in (False, True)
        )
        self._span = span_of(block, transform.reals_per_bin)

    def _rows_of(self, own: Sequence[Member], plans: Sequence[Plan]) -> Array:
        rows = np.zeros(len(plans), MEMBER)
        for row, plan, (codec, _) in zip(rows, plans, own, strict=True):
            chosen = plan.positions
            row["n"], row["k"], row["layout"] = chosen.n, chosen.k, chosen.layout
            row["reals"] = chosen.n * codec.transform.reals_per_bin
            row["low_bits"], row["positions_nbytes"] = chosen.low_bits, chosen.nbytes
            row["kind"], row["bits"], *_ = codec.coding(1.0)
            if plan.layout is Layout.OFFSETS:
                row["n_unary"] = unary_bits(chosen.n, chosen.k, chosen.low_bits)
        return rows

    def _to_encode(self, here: slice) -> tuple:
        return (self._forward,)

    def _to_sum(self, here: slice) -> tuple:
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
            row["method"] = _METHODS[kind]
            if isinstance(method, SignMethod):
                row["length"] = length = method.row_length(shape)
                pieces = method.pieces(numel, length)
                row["piece"], row["pieces"] = sum(map(len, starts)), len(pieces)
                starts.append(pieces)
                row["scales"] = 2 * (numel // length) if kind == "means" else 0
            elif kind != "octaves":
                self._levels[number] = *grid, digits_of(grid.radix)
                row["scales"] = -(-numel // grid.bucket) if grid.bucket else 0
        self._starts = np.concatenate([np.zeros(0, np.int64), *starts])
        return rows

    def _to_encode(self, here: slice) -> tuple:
        return self._levels[here], self._clips[here], self._starts

    def _to_sum(self, here: slice) -> tuple:
        return (self._levels[here],)


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
    """Return each group's class and the indices of its tensors; large and RAW ones are in none."""
    sparse: dict[Transform, list[int]] = {}
    others: list[int] = []
    # With larger ones a bucket's tensors would not keep all threads busy.
    share = sum(map(math.prod, shapes)) // threads.get_num_threads()
    most = max(_ONE_THREADS, min(_MOST, share))
    for number, (codec, shape) in enumerate(zip(codecs, shapes, strict=True)):
        if math.prod(shape) > most or codec.plan(shape).layout is Layout.RAW:
            continue
        if isinstance(codec, Codec):
            sparse.setdefault(codec.transform, []).append(number)
        elif isinstance(codec, DenseCodec):
            described = codec.method.cuda
            others += [number] if described is not None and described.kind in _METHODS else []
    groups: list[tuple[Callable[..., Group], list[int]]] = [
        (functools.partial(SparseGroup, transform), members)
        for transform, members in sparse.items()
    ]
    return [*groups, (DenseGroup, others)] if others else groups
