"""CLT-k (cyclic local top-k): selection of common positions by ranks in rotation.

Source: Chen et al., NeurIPS 2020 (ScaleCom). There one leading rank selects in each step. Where the
largest element of each chunk is selected, all ranks lead at once: each selects in its slice of the
chunks, and an allgather of the slices takes less time than a broadcast of all positions.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, Float32
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.index_plan import IndexPlan
from horovod_fftcomp.schemes import Context, Grads, Round, Similarity
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
        kernels, k = cpu_kernels(), self.count(grad.size)
        coeffs = kernels.add_residual(grad, residual, k)
        if coeffs.peak > LARGEST_FINITE_BITS:
            bitmap = positions.first_ones(grad.size, k)
        else:
            bitmap, _ = kernels.select_quantize_pack(coeffs, 1, Float32().coding(0.0), False)
        return positions.pack(bitmap, self._layout(grad.size), kernels)

    def positions(self, packed: Array, n: int) -> Array:
        """Return the positions, int64, ascending; ValueError for bytes that encode none."""
        kernels = cpu_kernels()
        return kernels.positions_of(positions.unpack(packed, self._layout(n), kernels))


class Selected(NamedTuple):
    """Positions as the ops have them, and how many of them this rank would have selected too."""

    positions: Any
    similarity: Callable[[], Similarity] | None = None


def gather_selection(
    plan: IndexPlan, bucket: Any, context: Context
) -> Generator[Round, Any, Selected]:
    """Allgather the offsets that each rank selects in its slice of the bucket's chunks.

    In steps that measure, every rank also selects in the slices of the others, to measure how
    similar its selection is.
    """
    ops, slices = context.ops, plan.slices(context.step)
    begin, end = slices.chunks_of(context.rank, plan.total)
    nbytes = plan.offsets_nbytes(slices.size)
    own = ops.winners(bucket, begin, end, nbytes)
    gathered = yield Round("allgather", own, divided=True)
    if len(gathered) != (expected := context.world_size * nbytes):
        raise PayloadError(f"{len(gathered)} bytes of positions arrived, {expected} were expected")
    positions = ops.locate(bucket, gathered, context.step)
    if not context.measures or context.world_size == 1:
        return Selected(positions)
    common = ops.count_common(bucket, positions, begin, end)
    led_by_others = plan.total - end + begin
    return Selected(positions, lambda: Similarity(common(), led_by_others))


def broadcast_selection(
    selector: Largest, plan: IndexPlan, grads: Grads, residuals: Grads, context: Context
) -> Generator[Round, Array, Selected]:
    """Broadcast the positions that this step's leader selects: rank step mod world size.

    In steps that measure, every other rank selects as well, to measure how similar its selection
    is.
    """
    leader = context.step % context.world_size
    slots = np.cumsum([0] + [align(selector.nbytes(n)) for n in plan.numels])
    message = np.zeros(slots[-1], np.uint8)
    leads = leader == context.rank
    if leads or context.measures:
        for n, grad, residual, begin in zip(plan.numels, grads, residuals, slots, strict=False):
            if grad is None:  # frozen: it sends zeros, so any positions are fine
                grad, residual = np.zeros(n, np.float32), None
            message[begin : begin + selector.nbytes(n)] = selector.choose(grad, residual)
    chosen = yield Round("broadcast", message, leader)
    selected = []
    for name, n, begin in zip(plan.names, plan.numels, slots, strict=False):
        try:
            selected.append(selector.positions(chosen[begin : begin + selector.nbytes(n)], n))
        except ValueError as error:
            who = f"tensor {name!r}: rank {leader}'s positions"
            raise PayloadError(f"{who}: {error}") from error
    similarity = None
    if context.measures and not leads:
        ours = [
            selector.positions(message[begin : begin + selector.nbytes(n)], n)
            for n, begin in zip(plan.numels, slots, strict=False)
        ]
        common = sum(np.intersect1d(*both, True).size for both in zip(ours, selected, strict=True))
        similarity = Similarity(common, plan.total)
    return Selected(np.concatenate(selected), None if similarity is None else lambda: similarity)
