"""Ops of a device on values at common positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.kernels.cuda import structs
from horovod_fftcomp.kernels.cuda.ops.common import CudaCommonOps
from horovod_fftcomp.kernels.index_plan import IndexPlan
from horovod_fftcomp.kernels.ops import Deferred, Flags
from horovod_fftcomp.types import Array, Arrays

_KERNELS = ("filter_low", "clear_sums", "choose_winners", "count_common", "take_shares",
            "check_shares", "add_shares")  # fmt: skip
_ON_TILES = ("filter_low", "clear_sums")


class _Tables(NamedTuple):
    """Descriptors of a plan's tensors without addresses; the tensor of each block of kernels."""

    plan: IndexPlan
    rows: Array
    tiles: Any
    groups: Any


class _DevicePositions(NamedTuple):
    """Fields of the descriptors that determine positions; ``turn``: see ``shared.cuh``."""

    fields: Mapping[str, Any]
    turn: np.uint32
    alive: Any = None


class _DeviceExchange:
    """One exchange: its descriptors with addresses, and the arrays to which they point."""

    def __init__(self, tables: _Tables, takes_part: Sequence[bool], measures: bool) -> None:
        self.plan, self.tables, self.rows = tables.plan, tables, tables.rows.copy()
        self.takes_part, self.measures = takes_part, measures
        self.alive: dict[str, Sequence[Any]] = {}
        self.squares: list[Deferred] = []
        self.peaks: Any = None
        self.arrived: Any = None


class CudaCommonIndexOps(CudaCommonOps):
    """Ops of schemes whose ranks send values at the same positions."""

    def common_index(
        self, plan: IndexPlan, grads: Arrays, residuals: Arrays, measures: bool
    ) -> _DeviceExchange:
        """Return a bucket's gradients and residuals on the device, in descriptors."""
        takes_part = [grad is not None for grad in grads]
        bucket = _DeviceExchange(self._tables(plan), takes_part, measures)
        known = zip(grads, plan.numels, strict=True)  # a frozen tensor sends zeros
        self._point(bucket, "grad", [self.zeros(n) if g is None else self.put(g) for g, n in known])
        pairs = zip(residuals, takes_part, strict=True)
        old = [self.put(array) if array is not None and is_in else None for array, is_in in pairs]
        self._point(bucket, "residual", old)
        return bucket

    def _tables(self, plan: IndexPlan) -> _Tables:
        """Return the tables of a plan; only the last result per bucket is cached."""
        key = ("common index", plan.names)
        if key not in self.device.cache or self.device.cache[key].plan is not plan:
            self.device.cache[key] = self._new_tables(plan)
        return self.device.cache[key]

    def _new_tables(self, plan: IndexPlan) -> _Tables:
        rows = np.zeros(len(plan.names), structs.SHARED)
        rows["n"], rows["k"] = plan.numels, plan.counts
        if plan.chunk:
            size = plan.slices(0).size
            rows["chunk"], rows["bits"], rows["n_ranks"] = plan.chunk, plan.bits, plan.n_ranks
            rows["factor"], rows["first"] = size, plan.begins[:-1]
            rows["message_words"] = plan.offsets_nbytes(size) // 4
        filters = np.array([plan.beta, 1 - plan.beta], np.float32).view(np.uint32)
        rows["beta"], rows["rest"] = filters
        if plan.unbiased:
            rows["gain"] = plan.gains.view(np.uint32)
        tiles = structs.enter_tiles(rows, rows["n"])
        counts = -(-np.array(plan.counts, np.int64) // structs.THREADS)
        rows["first_group"], rows["n_groups"] = np.cumsum(counts) - counts, counts
        groups = np.repeat(np.arange(len(rows), dtype=np.uint32), counts)
        return _Tables(plan, rows, self.device.upload(tiles), self.device.upload(groups))

    def _point(self, bucket: _DeviceExchange, field: str, arrays: Arrays) -> None:
        """Enter the address of each tensor's array in ``field``; 0 for None."""
        bucket.alive[field] = arrays
        bucket.rows[field] = [self.address(array) for array in arrays]

    def _new(self, bucket: _DeviceExchange, field: str, wanted: Sequence[bool]) -> list[Any]:
        """Return an array for each tensor with ``wanted``, and enter its address in ``field``."""
        pairs = zip(bucket.plan.numels, wanted, strict=True)
        made = [self.empty(n) if is_wanted else None for n, is_wanted in pairs]
        self._point(bucket, field, made)
        return made

    def _on(self, bucket: _DeviceExchange, name: str, table: Any, *arguments: Any) -> None:
        """Launch a kernel over all elements or positions of a bucket's tensors."""
        owners = bucket.tables.tiles if name in _ON_TILES else bucket.tables.groups
        if len(owners):
            kernel = self.kernels(*_KERNELS)[name]
            kernel(len(owners), structs.THREADS, [table, owners, *arguments], 0)

    def draw(self, plan: IndexPlan, progressions: Sequence[tuple[int, int]]) -> _DevicePositions:
        """Return the parameters of the positions (a j + c) mod n for j below k.

        The kernels compute the positions where they use them.
        """
        factors, firsts = zip(*progressions, strict=True)
        return _DevicePositions({"factor": factors, "first": firsts}, np.uint32(0))

    def winners(self, bucket: _DeviceExchange, begin: int, end: int, nbytes: int) -> Any:
        """Return the packed offset of the largest |gradient + residual| in each chunk, uint8."""
        own = self.zeros(nbytes, np.uint8)
        self._choose(bucket, own, begin, end)
        return own

    def _choose(self, bucket: _DeviceExchange, own: Any, begin: int, end: int) -> Any:
        """Write the packed offsets of winners to ``own``, which is zero; return the table."""
        bucket.rows["own"] = self.address(own)
        table = self.uploads.of("winners", bucket.rows)
        self._on(bucket, "choose_winners", table, np.uint64(begin), np.uint64(end))
        return table

    def locate(self, bucket: _DeviceExchange, gathered: Any, step: int) -> _DevicePositions:
        """Return the positions that all ranks' packed offsets denote."""
        turn = np.uint32(step % bucket.plan.n_ranks)
        return _DevicePositions({"chosen": self.address(gathered)}, turn, gathered)

    def count_common(
        self, bucket: _DeviceExchange, positions: _DevicePositions, begin: int, end: int
    ) -> Deferred:
        """Return a function that returns how many positions this rank selects itself."""
        total, common = bucket.plan.total, self.zeros(1, np.uint32)
        self._enter(bucket, positions)
        own = self.zeros(bucket.plan.offsets_nbytes(total), np.uint8)
        table = self._choose(bucket, own, 0, total)
        here = np.uint64(begin), np.uint64(end)
        self._on(bucket, "count_common", table, *here, positions.turn, common)
        return partial(_first, self.device.fetch(common))

    def _enter(self, bucket: _DeviceExchange, positions: _DevicePositions) -> None:
        for field, values in positions.fields.items():
            bucket.rows[field] = values

    def low_pass(self, bucket: _DeviceExchange) -> list[Any]:
        """Return residual + beta * gradient of each tensor, and find the peak of each tensor."""
        keeps = [bucket.plan.keeps and is_in for is_in in bucket.takes_part]
        new = self._new(bucket, "left", keeps)
        wanted = [bucket.measures and is_in for is_in in bucket.takes_part]
        self._new(bucket, "wanted", wanted)
        bucket.peaks = self.zeros(len(bucket.rows), np.uint32)
        table = self.uploads.of("low pass", bucket.rows)
        self._on(bucket, "filter_low", table, bucket.peaks)
        return new

    def take(self, bucket: _DeviceExchange, positions: _DevicePositions, halves: None) -> Any:
        """Return gradient + residual at the positions, float32; correct the new residuals there."""
        assert halves is None, "CommonIndex.runs_on_device"
        if bucket.measures:
            pairs = zip(bucket.alive["grad"], bucket.takes_part, strict=True)
            bucket.squares.append(self.squares([g if is_in else None for g, is_in in pairs]))
            bucket.squares.append(self.squares(bucket.alive["wanted"]))
        message = self.empty(bucket.plan.total)
        bucket.arrived = self.zeros(4 * len(bucket.rows), np.uint32)
        table = self._with_message(bucket, positions, self.address(message), "take")
        self._on(bucket, "take_shares", table, positions.turn, bucket.peaks, bucket.arrived)
        if bucket.measures:
            bucket.squares.append(self.squares(bucket.alive.pop("wanted")))
        return message

    def _with_message(
        self, bucket: _DeviceExchange, positions: _DevicePositions, address: int, use: object
    ) -> Any:
        """Return the table with positions, and the part of each tensor in a message."""
        self._enter(bucket, positions)
        bucket.rows["share"] = address + 4 * bucket.plan.begins[:-1]
        return self.uploads.of(use, bucket.rows)

    def index_energies(self, bucket: _DeviceExchange) -> Callable[[], Mapping[int, tuple]]:
        """Return a function that returns the energies by a tensor's number; it waits."""
        return partial(_energies, bucket.squares, bucket.takes_part)

    def scatter_sum(
        self, bucket: _DeviceExchange, received: Any, sources: Sequence[_DevicePositions]
    ) -> tuple[list[Any], Flags]:
        """Add the received values at their positions; return the sums and their flags."""
        sums = self._new(bucket, "sum", [True] * len(bucket.rows))
        not_finite = self.zeros(len(bucket.rows), np.uint32)
        begin, tables = self.address(received), []
        for rank, positions in enumerate(sources):
            address = begin + 4 * rank * bucket.plan.total
            table = self._with_message(bucket, positions, address, rank)
            self._on(bucket, "check_shares", table, not_finite)
            tables.append((table, positions.turn))
        self._on(bucket, "clear_sums", tables[0][0], not_finite)
        for table, turn in tables:
            self._on(bucket, "add_shares", table, turn, not_finite)
        return sums, Flags(True, not_finite, bucket.arrived)


def _first(counts: Callable[[], Array]) -> int:
    return int(counts().view(np.uint32)[0])


def _energies(squares: Sequence[Deferred], takes_part: Sequence[bool]) -> dict[int, tuple]:
    of_tensors = enumerate(zip(*(of() for of in squares), strict=True))
    return {number: energies for number, energies in of_tensors if takes_part[number]}
