"""Allreduce of the values at common positions on a GPU, without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_fftcomp.codec.sparsifiers import RandomBlock, RandomK
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.kernels.ops import Flags
from horovod_fftcomp.schemes import Context, Measured, Outcome, Round, Similarity, Tensor
from horovod_fftcomp.schemes.clt_selection import ChunkWinners, chunk_slices
from horovod_fftcomp.schemes.device_rows import BucketRows, ExchangeRows, cached
from horovod_fftcomp.types import Array

if TYPE_CHECKING:
    from horovod_fftcomp.schemes.common_index import CommonIndex

_KERNELS = ("filter_low", "clear_sums", "choose_winners", "count_common", "take_shares",
            "check_shares", "add_shares")  # fmt: skip


class _Bucket(BucketRows):
    """Descriptor table of a bucket; ``begins``: offsets of each tensor's values in a message."""

    def __init__(
        self, device: Device, tensors: Sequence[Tensor], scheme: CommonIndex, n_ranks: int
    ) -> None:
        super().__init__(device, "SHARED", tensors, _KERNELS)
        selection, numels = scheme.selection, [int(n) for n in self.rows["n"]]
        counts = [selection.count(n) for n in numels]
        self.begins = np.cumsum([0, *counts], dtype=np.uint64)
        self.rows["k"] = counts
        if isinstance(selection, ChunkWinners):
            size = chunk_slices(int(self.begins[-1]), 0, n_ranks).size
            self.rows["chunk"], self.rows["bits"] = selection.chunk, selection.bits
            self.rows["factor"], self.rows["first"] = size, self.begins[:-1]
            self.rows["message_words"] = selection.slice_nbytes(size) // 4
            self.rows["n_ranks"] = n_ranks
        filters = np.array([scheme.beta, 1 - scheme.beta], np.float32).view(np.uint32)
        self.rows["beta"], self.rows["rest"] = filters
        if scheme.unbiased:
            gains = [n / max(1, k) for n, k in zip(numels, counts, strict=True)]
            self.rows["gain"] = np.array(gains, np.float32).view(np.uint32)
        groups = self.owners("group", counts, self.tables.THREADS)
        self._n_groups, self._groups = groups.size, device.upload(groups)

    def on_groups(self, name: str, table: Any, *arguments: Any) -> None:
        """Launch a kernel over all positions of a table's tensors."""
        self.launch(name, self._n_groups, [table, self._groups, *arguments])


class _Exchange(ExchangeRows):
    def __init__(
        self,
        scheme: CommonIndex,
        tensors: Sequence[Tensor],
        grads: Sequence[Any],
        carried: Mapping[str, Any],
        context: Context,
    ) -> None:
        assert context.device is not None
        self.bucket = cached(_Bucket, context.device, tensors, scheme, context.world_size)
        carried = carried if scheme.error_feedback else {}
        super().__init__(self.bucket, tensors, grads, carried, context)
        self._scheme = scheme
        self._turn = np.uint32(context.step % context.world_size)
        for row, there in zip(self.rows, self.takes_part, strict=True):
            if not there:  # frozen: it sends zeros and keeps its residual
                row["grad"] = self.address(self.device.zeros(max(1, int(row["n"]))))
        residuals = self.new("left", [scheme.error_feedback and there for there in self.takes_part])
        self.new("wanted", [self.measures and there for there in self.takes_part])
        self.state = {t.name: carried[t.name] for t in tensors if t.name in carried}
        new = zip(tensors, residuals, strict=True)
        self.state |= {tensor.name: array for tensor, array in new if array is not None}
        self._similarity: Callable[[], Array] | None = None
        self._n_led_by_others = 0

    def agree(self) -> Generator[Round, Any, None]:
        """Fill in this step's positions, after a round if ranks select them."""
        selection, context = self._scheme.selection, self.context
        if not isinstance(selection, ChunkWinners):
            self._draw(context.rank)
            return
        total = int(self.bucket.begins[-1])
        lead = chunk_slices(total, context.step, context.world_size)
        here = tuple(np.uint64(end) for end in lead.chunks_of(context.rank, total))
        own = self._chosen(selection.slice_nbytes(lead.size), *here)
        chosen = yield Round("allgather", own, divided=True)
        if len(chosen) != context.world_size * len(own):
            raise PayloadError(
                f"{len(chosen)} bytes of positions arrived, "
                f"{context.world_size * len(own)} were expected"
            )
        self.rows["chosen"] = self.address(chosen)
        if self.measures and context.world_size > 1:
            self._chosen(selection.slice_nbytes(total), np.uint64(0), np.uint64(total))
            common = self.device.zeros(1, np.uint32)
            table = self.bucket.uploads.of("own", self.rows)
            self.bucket.on_groups("count_common", table, *here, self._turn, common)
            self._similarity = self.device.fetch(common)
            self._n_led_by_others = total - int(here[1] - here[0])

    def _chosen(self, nbytes: int, begin: np.uint64, end: np.uint64) -> Any:
        """Return the packed offsets that this rank selects in chunks ``begin`` to ``end``."""
        own = self.device.zeros(nbytes, np.uint8)
        self.rows["own"] = self.address(own)
        table = self.bucket.uploads.of("own", self.rows)
        self.bucket.on_groups("choose_winners", table, begin, end)
        return own

    def _draw(self, rank: int) -> None:
        whose = f"#{rank}" if self._scheme.collective == "allgather" else ""
        selection, step = self._scheme.selection, self.context.step
        assert isinstance(selection, (RandomBlock, RandomK))
        for row, tensor in zip(self.rows, self.tensors, strict=True):
            drawn = selection.progression(int(row["n"]), step, tensor.name + whose)
            row["factor"], row["first"] = drawn

    def encode(self) -> Any:
        """Return the message; its values are subtracted from the new residuals."""
        bucket, device, total = self.bucket, self.device, int(self.bucket.begins[-1])
        message = device.empty(max(1, total))[:total]
        self.rows["share"] = self.address(message) + 4 * bucket.begins[:-1]
        peaks = device.zeros(len(self.rows), np.uint32)
        self.arrived = device.zeros(4 * len(self.rows), np.uint32)
        table = bucket.uploads.of("values", self.rows)
        bucket.on_tiles("filter_low", table, peaks)
        if self.measures:
            self.square(True, "wanted")
            self.square(False, "wanted")
        bucket.on_groups("take_shares", table, self._turn, peaks, self.arrived)
        if self.measures:
            self.square(False, "wanted")
        return message

    def sum(self, received: Any) -> tuple[list[Any], Any]:
        """Return the sums, and a word for each tensor that is nonzero if its sum is not finite."""
        bucket, total = self.bucket, int(self.bucket.begins[-1])
        n_sources = self.context.world_size if self._scheme.collective == "allgather" else 1
        if len(received) != n_sources * total:
            raise PayloadError(f"{len(received)} values arrived, {n_sources * total} were expected")
        sums = self.new("sum", [True] * len(self.rows))
        not_finite = self.device.zeros(len(self.rows), np.uint32)
        begin, tables = self.address(received), []
        for rank in range(n_sources):
            self.rows["share"] = begin + 4 * (rank * total + bucket.begins[:-1])
            if n_sources > 1:
                self._draw(rank)
            tables.append(bucket.uploads.of(rank, self.rows))
            bucket.on_groups("check_shares", tables[-1], not_finite)
        bucket.on_tiles("clear_sums", tables[0], not_finite)
        for table in tables:
            bucket.on_groups("add_shares", table, self._turn, not_finite)
        return sums, not_finite

    def measured(self) -> Callable[[], Measured]:
        """Return a function that waits for the measurements and keeps no array alive."""
        return partial(_measured, self.energies(), self._similarity, self._n_led_by_others)


def _measured(
    measured: Callable[[], Measured], similarity: Callable[[], Array] | None, n_chosen: int
) -> Measured:
    """Wait for the measurements."""
    if similarity is None:
        return measured()
    common = int(similarity().view(np.uint32)[0])
    return measured()._replace(similarity=Similarity(common, n_chosen))


def common_index_on_device(
    scheme: CommonIndex,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    carried: Mapping[str, Any],
    context: Context,
) -> Generator[Round, Any, Outcome]:
    """Exchange values; see ``CommonIndex.exchange``. NumPy arrays are copied to the device."""
    exchange = _Exchange(scheme, tensors, grads, carried, context)
    yield from exchange.agree()
    received = yield Round(scheme.collective, exchange.encode())
    sums, not_finite = exchange.sum(received)
    measured = exchange.measured() if exchange.measures else None
    state = {"residual": exchange.state} if scheme.error_feedback else {}
    return Outcome(sums, state, Flags(True, not_finite, exchange.arrived), measured)
