"""Values at positions that all ranks know, exchanged by a GPU, without a wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_fftcomp.backends import Array
from horovod_fftcomp.backends.gpu import Device, on_device, source
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.schemes import (
    MEASURE_EVERY,
    Context,
    Energy,
    OnDevice,
    Outcome,
    Round,
    Similarity,
    Tensor,
)
from horovod_fftcomp.schemes.leader import ChunkWinners, lead_of
from horovod_fftcomp.sparsifiers import RandomBlock, RandomK

if TYPE_CHECKING:
    from horovod_fftcomp.schemes.shared import Shared

_OF_TILES = ("filter_low", "clear_sums", "restore<1>", "square<1>")
_OF_GROUPS = ("choose_winners", "count_common", "take_shares", "check_shares", "add_shares")


class _Bucket:
    """What is known of a bucket before the data: rows without addresses, whose the blocks are.

    ``begins``: where each tensor's values lie in a message, and where they end. ``tiles``,
    ``groups``: the tensor of each block.
    """

    def __init__(
        self, device: Device, scheme: Shared, tensors: Sequence[Tensor], n_ranks: int
    ) -> None:
        from horovod_fftcomp.backends.gpu import tables  # not for whoever has no GPU

        self._tables, self.uploads = tables, tables.Uploads(device)
        selection, numels = scheme.selection, [math.prod(tensor.shape) for tensor in tensors]
        counts = [selection.count(n) for n in numels]
        self.begins = np.cumsum([0, *counts], dtype=np.uint64)
        self.rows = np.zeros(len(tensors), tables.SHARED)
        self.rows["n"], self.rows["k"] = numels, counts
        if isinstance(selection, ChunkWinners):
            size = lead_of(int(self.begins[-1]), 0, n_ranks).size
            self.rows["chunk"], self.rows["bits"] = selection.chunk, selection.bits
            self.rows["factor"], self.rows["first"] = size, self.begins[:-1]
            self.rows["message_words"] = selection.share_nbytes(size) // 4
            self.rows["n_ranks"] = n_ranks
        filters = np.array([scheme.beta, 1 - scheme.beta], np.float32).view(np.uint32)
        self.rows["beta"], self.rows["rest"] = filters
        if scheme.unbiased:
            gains = [n / max(1, k) for n, k in zip(numels, counts, strict=True)]
            self.rows["gain"] = np.array(gains, np.float32).view(np.uint32)
        self.tiles = self._owners("tile", numels, tables.TILE)
        self.groups = self._owners("group", counts, tables.THREADS)
        self._tiles, self._groups = device.upload(self.tiles), device.upload(self.groups)
        self._kernels = device.functions(source(), [*_OF_TILES, *_OF_GROUPS])

    def _owners(self, kind: str, sizes: Sequence[int], each: int) -> Array:
        """Enter which blocks of ``each`` a tensor has; return the tensor of each block."""
        counts = np.array([-(-size // each) for size in sizes], np.uint32)
        self.rows[f"first_{kind}"], self.rows[f"n_{kind}s"] = np.cumsum(counts) - counts, counts
        return np.repeat(np.arange(len(sizes), dtype=np.uint32), counts)

    def launch(self, name: str, table: Any, *arguments: Any) -> None:
        """Launch a kernel for all tensors of a table."""
        of_tiles = name in _OF_TILES
        n_blocks = self.tiles.size if of_tiles else self.groups.size
        if n_blocks:
            on_it = [table, self._tiles if of_tiles else self._groups, *arguments]
            shared = self._tables.SQUARES_NBYTES if name == "square<1>" else 0
            self._kernels[name](n_blocks, self._tables.THREADS, on_it, shared)

    def coeffs_table(self, rows: Array, kept: str) -> Any:
        """Return the table of kernels that take coefficients: those in the field ``kept``."""
        others = np.zeros(len(rows), self._tables.TENSOR)
        others["grad"], others["residual"] = rows["grad"], rows["residual"]
        others["coeffs"], others["keep"] = rows[kept], rows[kept] != 0
        others["n"] = others["numel"] = np.where(rows[kept] != 0, rows["n"], 0)
        others["first_tile"], others["n_tiles"] = rows["first_tile"], rows["n_tiles"]
        return self.uploads.of(kept, others)


def _bucket(device: Device, scheme: Shared, tensors: Sequence[Tensor], n_ranks: int) -> _Bucket:
    key, made_for = ("shared", tuple(tensors)), (scheme, n_ranks)
    if key not in device.cache or device.cache[key][0] != made_for:
        device.cache[key] = (made_for, _Bucket(device, scheme, tensors, n_ranks))
    return device.cache[key][1]


class _Exchange:
    """One exchange of a bucket; ``alive``: what its rows point at."""

    def __init__(
        self,
        scheme: Shared,
        tensors: Sequence[Tensor],
        grads: Sequence[Any],
        carried: Mapping[str, Any],
        context: Context,
    ) -> None:
        assert context.device is not None
        self.device, self._scheme, self._context = context.device, scheme, context
        self._tensors, self._measure = tensors, context.step % MEASURE_EVERY == 0
        self.bucket = _bucket(self.device, scheme, tensors, context.world_size)
        self._turn = np.uint32(context.step % context.world_size)
        self.rows = self.bucket.rows.copy()
        self._alive: list[Any] = []
        self.takes_part = [grad is not None for grad in grads]
        carried = carried if scheme.error_feedback else {}
        for row, tensor, grad in zip(self.rows, tensors, grads, strict=True):
            if grad is None:  # it sends zeros, and its residual stays
                row["grad"] = self._address(self.device.zeros(max(1, int(row["n"]))))
                continue
            row["grad"] = self._address(on_device(grad, self.device))
            if tensor.name in carried:
                row["residual"] = self._address(on_device(carried[tensor.name], self.device))
        left = self._new("left", scheme.error_feedback)
        self._new("wanted", self._measure)
        self.state = {t.name: carried[t.name] for t in tensors if t.name in carried}
        new = zip(tensors, left, strict=True)
        self.state |= {tensor.name: array for tensor, array in new if array is not None}
        self._squares: list[Callable[[], Array]] = []
        self._similarity: Callable[[], Array] | None = None
        self._n_led_by_others = 0

    def _address(self, array: Any) -> int:
        self._alive.append(array)
        return self.device.address(array)

    def _new(self, field: str, needed: bool) -> list[Any]:
        """Return an array for each tensor that takes part, if they are needed, and enter it."""
        made = []
        for row, takes_part in zip(self.rows, self.takes_part, strict=True):
            n = int(row["n"])
            made.append(self.device.empty(max(1, n))[:n] if needed and takes_part else None)
            row[field] = 0 if made[-1] is None else self._address(made[-1])
        return made

    def agree(self) -> Generator[Round, Any, None]:
        """Enter this step's positions, after a round if ranks choose them."""
        selection, context = self._scheme.selection, self._context
        if not isinstance(selection, ChunkWinners):
            self._draw(context.rank)
            return
        total = int(self.bucket.begins[-1])
        lead = lead_of(total, context.step, context.world_size)
        here = tuple(np.uint64(end) for end in lead.chunks_of(context.rank, total))
        own = self._chosen(selection.share_nbytes(lead.size), *here)
        chosen = yield Round("allgather", own, divided=True)
        if len(chosen) != context.world_size * len(own):
            raise PayloadError(
                f"{len(chosen)} bytes of positions arrived, "
                f"{context.world_size * len(own)} were expected"
            )
        self.rows["chosen"] = self._address(chosen)
        if self._measure and context.world_size > 1:
            self._chosen(selection.share_nbytes(total), np.uint64(0), np.uint64(total))
            common = self.device.zeros(1, np.uint32)
            table = self.bucket.uploads.of("own", self.rows)
            self.bucket.launch("count_common", table, *here, self._turn, common)
            self._similarity = self.device.fetch(common)
            self._n_led_by_others = total - int(here[1] - here[0])

    def _chosen(self, nbytes: int, begin: np.uint64, end: np.uint64) -> Any:
        """Return what this rank chooses in these of the bucket's chunks, packed."""
        own = self.device.zeros(nbytes, np.uint8)
        self.rows["own"] = self._address(own)
        table = self.bucket.uploads.of("own", self.rows)
        self.bucket.launch("choose_winners", table, begin, end)
        return own

    def _draw(self, rank: int) -> None:
        whose = f"#{rank}" if self._scheme.collective == "allgather" else ""
        selection, step = self._scheme.selection, self._context.step
        assert isinstance(selection, (RandomBlock, RandomK))
        for row, tensor in zip(self.rows, self._tensors, strict=True):
            drawn = selection.progression(int(row["n"]), step, tensor.name + whose)
            row["factor"], row["first"] = drawn

    def encode(self) -> Any:
        """Return the message; take what it sends off what is left."""
        bucket, device, total = self.bucket, self.device, int(self.bucket.begins[-1])
        message = device.empty(max(1, total))[:total]
        self.rows["share"] = self._address(message) + 4 * bucket.begins[:-1]
        peaks = device.zeros(len(self.rows), np.uint32)
        self.arrived = device.zeros(4 * len(self.rows), np.uint32)
        table = bucket.uploads.of("values", self.rows)
        bucket.launch("filter_low", table, peaks)
        if self._measure:
            self._square(1)
            self._square(0)
        bucket.launch("take_shares", table, self._turn, peaks, self.arrived)
        if self._measure:
            self._square(0)
        return message

    def _square(self, of_gradient: int) -> None:
        """Sum the squares of each gradient, or of what is wanted at present."""
        sums = self.device.empty(max(1, self.bucket.tiles.size), np.float64)
        table = self.bucket.coeffs_table(self.rows, "wanted")
        self.bucket.launch("square<1>", table, np.uint32(of_gradient), sums)
        self._squares.append(self.device.fetch(sums))

    def sum(self, received: Any) -> tuple[list[Any], Any]:
        """Return the sums of what came, and for each tensor whether its one is not finite."""
        bucket, total = self.bucket, int(self.bucket.begins[-1])
        n_sources = self._context.world_size if self._scheme.collective == "allgather" else 1
        if len(received) != n_sources * total:
            raise PayloadError(f"{len(received)} values arrived, {n_sources * total} were expected")
        self.takes_part = [True] * len(self.rows)
        sums, not_finite = self._new("sum", True), self.device.zeros(len(self.rows), np.uint32)
        begin, tables = self._address(received), []
        for rank in range(n_sources):
            self.rows["share"] = begin + 4 * (rank * total + bucket.begins[:-1])
            if n_sources > 1:
                self._draw(rank)
            tables.append(bucket.uploads.of(rank, self.rows))
            bucket.launch("check_shares", tables[-1], not_finite)
        bucket.launch("clear_sums", tables[0], not_finite)
        for table in tables:
            bucket.launch("add_shares", table, self._turn, not_finite)
        return sums, not_finite

    def restore(self, verdict: Any) -> None:
        """Launch what brings the residuals back where the verdict is not 0."""
        self.bucket.launch("restore<1>", self.bucket.coeffs_table(self.rows, "left"), verdict)

    def measured(self) -> Callable[[], dict[str, Any]]:
        """Return what waits for what was measured; it keeps no array alive."""
        names = [
            tensor.name if row["wanted"] else ""
            for tensor, row in zip(self._tensors, self.rows, strict=True)
        ]
        return partial(
            _measured,
            names,
            self.bucket.tiles,
            self._squares,
            self._similarity,
            self._n_led_by_others,
        )


def _measured(
    names: Sequence[str],
    tiles: Array,
    squares: Sequence[Callable[[], Array]],
    similarity: Callable[[], Array] | None,
    n_chosen: int,
) -> dict[str, Any]:
    """Wait for what was measured; return it as fields of ``Outcome``."""
    sums = [np.bincount(tiles, of()[: tiles.size], len(names)) for of in squares]
    energies = {
        name: Energy(*map(float, of_tensor))
        for name, *of_tensor in zip(names, *sums, strict=True)
        if name
    }
    fields: dict[str, Any] = {"energies": energies}
    if similarity is not None:
        fields["similarity"] = Similarity(int(similarity().view(np.uint32)[0]), n_chosen)
    return fields


def shared_on_device(
    scheme: Shared,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    carried: Mapping[str, Any],
    context: Context,
) -> Generator[Round, Any, Outcome]:
    """Exchange values; see ``Shared.exchange``. Arrays are the device's, or brought there."""
    exchange = _Exchange(scheme, tensors, grads, carried, context)
    yield from exchange.agree()
    received = yield Round(scheme.collective, exchange.encode())
    sums, not_finite = exchange.sum(received)
    measured = exchange.measured() if context.step % MEASURE_EVERY == 0 else None
    later = OnDevice(not_finite, exchange.arrived, exchange.restore, measured)
    state = {"residual": exchange.state} if scheme.error_feedback else {}
    return Outcome(sums, state, True, on_device=later)
