"""CLT-k (cyclic local top-k): selection of common positions by ranks in rotation.

Source: Chen et al., NeurIPS 2020 (ScaleCom). There one leading rank selects in each step. Where the
largest element of each chunk is selected, all ranks lead at once: each selects in its slice of the
chunks, and an allgather of the slices takes less time than a broadcast of all positions.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, Float32
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Grads, Round, Similarity, Tensor
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import positions
from horovod_fftcomp.wire.header import align
from horovod_fftcomp.wire.positions import Positions

_LARGEST_CHUNK = 1 << 16


@dataclass(frozen=True)
class ChunkWinners(TopK):
    """Selector of the largest element of each chunk of 1 / density elements; needs no threshold.

    Of equal magnitudes the lower index wins. One element of a shorter last chunk is sent as well.
    """

    spec_name = "ChunkWinners"
    collective = "allgather"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk > _LARGEST_CHUNK:
            raise ValueError(
                f"density={self.density!r} selects one of {self.chunk} elements; chunks have at "
                f'most {_LARGEST_CHUNK}: raise the density or give selector="exact"'
            )

    @property
    def chunk(self) -> int:
        """Number of elements of a chunk."""
        return round(1 / self.density)

    def count(self, n: int) -> int:
        """Return how many of ``n`` elements are selected."""
        return -(-n // self.chunk)

    @property
    def bits(self) -> int:
        """Bits of an offset in a chunk."""
        return (self.chunk - 1).bit_length()

    def nbytes(self, n: int) -> int:
        """Return the bytes of the positions of ``n`` elements, of all ranks together."""
        return (self.count(n) * self.bits + 7) // 8

    def slice_nbytes(self, n_chunks: int) -> int:
        """Return the bytes of one rank's offsets: whole 4-byte words, at least one."""
        return max(4, -(-n_chunks * self.bits // 32) * 4)


@dataclass(frozen=True)
class Largest(TopK):
    """Selector of the exact top-k of a tensor, as recipe ``topk`` selects it."""

    spec_name = "Largest"
    collective = "broadcast"

    def nbytes(self, n: int) -> int:
        """Return the bytes of the packed positions of ``n`` elements."""
        return self._layout(n).nbytes

    def _layout(self, n: int) -> Positions:
        return positions.cheapest(n, self.count(n))

    def choose(self, grad: Array, residual: Array | None) -> Array:
        """Return the packed positions, uint8, of the largest elements of ``grad + residual``.

        With NaN or Inf inside, the positions are valid but arbitrary.
        """
        kernels, k = load_backend("cpu"), self.count(grad.size)
        coeffs = kernels.add_residual(grad, residual, k)
        if coeffs.peak > LARGEST_FINITE_BITS:
            bitmap = positions.first_ones(grad.size, k)
        else:
            bitmap, _ = kernels.select_quantize_pack(coeffs, 1, Float32().coding(0.0), False)
        return positions.pack(bitmap, self._layout(grad.size), kernels)

    def positions(self, packed: Array, n: int) -> Array:
        """Return the positions, int64, ascending; ValueError for bytes that encode none."""
        kernels = load_backend("cpu")
        return kernels.positions_of(positions.unpack(packed, self._layout(n), kernels))


Selector = ChunkWinners | Largest


class Choice(NamedTuple):
    """Positions of each tensor, and how many of them this rank would have selected too."""

    positions: list[Array]
    similarity: Similarity | None


class ChunkSlices(NamedTuple):
    """Assignment of a bucket's chunks to ranks in one step: one slice of chunks for each rank.

    ``size``: chunks per slice; slices at the end may be shorter, or empty.
    """

    size: int
    step: int
    n_ranks: int

    def chunks_of(self, rank: int, total: int) -> tuple[int, int]:
        """Return (begin, end) of the slice of chunks in which ``rank`` selects."""
        begin = min(total, (rank + self.step) % self.n_ranks * self.size)
        return begin, min(total, begin + self.size)

    def leader_of(self, chunk: int) -> int:
        """Return the rank that selects in ``chunk``."""
        return (chunk // self.size - self.step) % self.n_ranks


def chunk_slices(total: int, step: int, n_ranks: int) -> ChunkSlices:
    """Return the assignment of ``total`` chunks to ranks in a step."""
    return ChunkSlices(max(1, -(-total // n_ranks)), step, n_ranks)


def gather_selection(
    selector: ChunkWinners,
    tensors: Sequence[Tensor],
    grads: Grads,
    residuals: Mapping[str, Array],
    context: Context,
) -> Generator[Round, Array, Choice]:
    """Allgather the offsets that each rank selects in its slice of the bucket's chunks.

    In steps that measure, every rank also selects in the slices of the others, to measure how
    similar its selection is.
    """
    numels = [math.prod(tensor.shape) for tensor in tensors]
    ends = np.cumsum([0, *(selector.count(n) for n in numels)])
    total = int(ends[-1])
    lead = chunk_slices(total, context.step, context.world_size)
    choose = partial(_winners, selector, tensors, grads, residuals)
    begin, end = lead.chunks_of(context.rank, total)
    message = np.zeros(selector.slice_nbytes(lead.size), np.uint8)
    if selector.bits:
        packed = load_backend("cpu").pack_bits(choose(begin, end), selector.bits)
        message[: packed.size] = packed
    gathered = yield Round("allgather", message, divided=True)
    offsets = _offsets(selector, gathered, lead, total)
    selected = []
    for tensor, n, first, part in zip(
        tensors, numels, ends, np.split(offsets, ends[1:-1]), strict=False
    ):
        begins = np.arange(0, n, selector.chunk, dtype=np.int64)
        selected.append(begins + part)
        for chunk in np.flatnonzero(part >= np.minimum(selector.chunk, n - begins))[:1]:
            who = f"tensor {tensor.name!r}: rank {lead.leader_of(int(first + chunk))}'s positions"
            raise PayloadError(f"{who}: an offset lies beyond the end of its chunk")
    similarity = None
    if context.step % MEASURE_EVERY == 0 and context.world_size > 1:
        alike = choose(0, total) == offsets
        alike[begin:end] = False
        similarity = Similarity(int(alike.sum()), total - (end - begin))
    return Choice(selected, similarity)


def _winners(
    selector: ChunkWinners,
    tensors: Sequence[Tensor],
    grads: Grads,
    residuals: Mapping[str, Array],
    begin: int,
    end: int,
) -> Array:
    """Return the offsets that this rank selects in chunks ``begin`` to ``end``, uint32."""
    offsets, first = [np.empty(0, np.uint32)], 0
    for tensor, grad in zip(tensors, grads, strict=True):
        n = math.prod(tensor.shape)
        here = slice(*(max(0, chunk - first) * selector.chunk for chunk in (begin, end)))
        first += selector.count(n)
        if grad is None:  # frozen: it sends zeros, so any positions are fine
            offsets.append(np.zeros(selector.count(len(range(n)[here])), np.uint32))
            continue
        residual = residuals.get(tensor.name)
        if residual is not None:
            residual = residual[here]
        offsets.append(load_backend("cpu").chunk_winners(grad[here], residual, selector.chunk))
    return np.concatenate(offsets)


def _offsets(selector: ChunkWinners, gathered: Array, lead: ChunkSlices, total: int) -> Array:
    """Return the offsets in all chunks; PayloadError for a message of the wrong size."""
    nbytes = selector.slice_nbytes(lead.size)
    if gathered.size != lead.n_ranks * nbytes:
        raise PayloadError(
            f"{gathered.size} bytes of positions arrived, {lead.n_ranks * nbytes} were expected"
        )
    offsets = np.zeros(total, np.uint32)
    if selector.bits:
        for rank, message in enumerate(gathered.reshape(lead.n_ranks, nbytes)):
            begin, end = lead.chunks_of(rank, total)
            offsets[begin:end] = load_backend("cpu").unpack_bits(
                message[: ((end - begin) * selector.bits + 7) // 8], end - begin, selector.bits
            )
    return offsets


def broadcast_selection(
    selector: Largest,
    tensors: Sequence[Tensor],
    grads: Grads,
    residuals: Mapping[str, Array],
    context: Context,
) -> Generator[Round, Array, Choice]:
    """Broadcast the positions that this step's leader selects: rank step mod world size.

    In steps that measure, every other rank selects as well, to measure how similar its selection
    is.
    """
    measure = context.step % MEASURE_EVERY == 0
    leader = context.step % context.world_size
    numels = [math.prod(tensor.shape) for tensor in tensors]
    slots = np.cumsum([0] + [align(selector.nbytes(n)) for n in numels])
    message = np.zeros(slots[-1], np.uint8)
    leads = leader == context.rank
    if leads or measure:
        for tensor, grad, n, begin in zip(tensors, grads, numels, slots, strict=False):
            residual = residuals.get(tensor.name)
            if grad is None:  # frozen: it sends zeros, so any positions are fine
                grad, residual = np.zeros(n, np.float32), None
            message[begin : begin + selector.nbytes(n)] = selector.choose(grad, residual)
    chosen = yield Round("broadcast", message, leader)
    selected = []
    for tensor, n, begin in zip(tensors, numels, slots, strict=False):
        try:
            selected.append(selector.positions(chosen[begin : begin + selector.nbytes(n)], n))
        except ValueError as error:
            who = f"tensor {tensor.name!r}: rank {leader}'s positions"
            raise PayloadError(f"{who}: {error}") from error
    similarity = None
    if measure and not leads:
        ours = [
            selector.positions(message[begin : begin + selector.nbytes(n)], n)
            for n, begin in zip(numels, slots, strict=False)
        ]
        common = sum(np.intersect1d(*both, True).size for both in zip(ours, selected, strict=True))
        similarity = Similarity(common, sum(part.size for part in selected))
    return Choice(selected, similarity)
