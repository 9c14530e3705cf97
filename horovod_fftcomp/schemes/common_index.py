"""Allreduce of the values at common positions: drawn from a seed, or selected by the ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_fftcomp.codec.sparsifiers import RandomBlock, RandomK
from horovod_fftcomp.errors import PayloadError, check_share
from horovod_fftcomp.kernels.index_plan import IndexPlan
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round, Scheme, received
from horovod_fftcomp.schemes.arc_topk import LargestRows, sum_sketches
from horovod_fftcomp.schemes.clt_selection import (
    ChunkWinners,
    Largest,
    Selected,
    broadcast_selection,
    gather_selection,
)
from horovod_fftcomp.schemes.dense import half_limits
from horovod_fftcomp.schemes.meter import measured_by
from horovod_fftcomp.schemes.state import bucket_plan, new_state
from horovod_fftcomp.types import OldState, Tensor, Tensors
from horovod_fftcomp.wire.header import align

Selector = ChunkWinners | Largest | LargestRows


@dataclass(frozen=True)
class CommonIndex(Scheme):
    """Sum the values at positions that are common to all ranks, with optional error feedback.

    ``selection``: how positions are drawn (``RandomBlock``, ``RandomK``) or selected (CLT-k,
    ARC-Top-K). Bytes per rank grow by less than 8 bytes with each further rank. ``beta`` below 1
    applies the low-pass filter of Chen et al., NeurIPS 2020: residual <- (1 - beta) residual + beta
    (gradient + residual - sent). ``unbiased`` scales sent values by n/k, so that their mean over
    all draws is the gradient; with error feedback residuals would grow, so ValueError is raised.
    ``bits``: 32, or 16 for float16 values. With ``collective`` "allgather" each rank draws
    positions of its own, which the others draw too: more elements get a value in each step, but the
    bytes that a rank receives grow with the number of ranks.
    """

    spec_name = "Shared"
    selection: RandomBlock | RandomK | Selector
    error_feedback: bool = True
    unbiased: bool = False
    beta: float = 1.0
    bits: int = 32
    collective: str = "allreduce"

    def __post_init__(self) -> None:
        if self.unbiased and self.error_feedback:
            raise ValueError(
                "unbiased=True scales sent values by n/k, which makes residuals grow under error "
                "feedback; give error_feedback=False with it"
            )
        check_share("beta", self.beta, "; 1 means no filter")
        if type(self.bits) is not int or self.bits not in (16, 32):
            raise ValueError(f"bits must be 16 or 32 (float16 or float32), got {self.bits!r}")
        object.__setattr__(self, "beta", float(self.beta) if self.error_feedback else 1.0)

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        if isinstance(self.selection, Selector):
            return (self.selection.collective, self.collective)
        return (self.collective,)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        ops, plan = context.ops, _plan(self, tuple(tensors), context.world_size)
        carried = state.get("residual", {}) if self.error_feedback else {}
        old = [carried.get(name) for name in plan.names]
        bucket = ops.common_index(plan, grads, old, context.measures)
        halves = half_limits(context) if self.bits == 16 else None
        residuals, selection = ops.low_pass(bucket), self.selection
        if isinstance(selection, LargestRows):
            selected = yield from sum_sketches(selection, bucket, halves, context)
        elif isinstance(selection, ChunkWinners):
            selected = yield from gather_selection(plan, bucket, context)
        elif isinstance(selection, Largest):
            selected = yield from broadcast_selection(selection, plan, grads, old, context)
        else:
            selected = Selected(self._drawn(plan, context, context.rank))
        message = ops.take(bucket, selected.positions, halves)
        arrived = yield Round(self.collective, message)
        arrived = arrived if halves is None else ops.from_half(arrived)
        sources = [selected.positions]
        if self.collective == "allgather":
            sources = [self._drawn(plan, context, rank) for rank in range(context.world_size)]
        if len(arrived) != (expected := len(sources) * plan.total):
            raise PayloadError(f"{len(arrived)} values arrived, {expected} were expected")
        sums, flags = ops.scatter_sum(bucket, arrived, sources)
        new = {"residual": residuals} if self.error_feedback else {}
        measured = None
        if context.measures:
            measured = measured_by(tensors, ops.index_energies(bucket), selected.similarity)
        return Outcome(sums, new_state(tensors, grads, state, new), flags, measured)

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        small = all(tensor.numel < 1 << 32 for tensor in tensors)
        return small and self.bits == 32 and not isinstance(self.selection, Largest | LargestRows)

    def _drawn(self, plan: IndexPlan, context: Context, rank: int) -> Any:
        """Return the random positions of ``rank``."""
        assert not isinstance(self.selection, Selector)
        names = plan.names
        if self.collective == "allgather":
            names = tuple(f"{name}#{rank}" for name in names)
        return context.ops.draw(plan, self.selection.progressions(plan.numels, context.step, names))

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step.

        With ``ChunkWinners`` the positions of all ranks are counted, as received.
        """
        return self._values_nbytes(tensor) + self._selection_nbytes(tensor)

    def received_nbytes(self, tensor: Tensor, world_size: int) -> float:
        """Return the bytes of ``tensor`` that a rank receives from others; see ``Scheme``."""
        values = received(self.collective, self._values_nbytes(tensor), world_size)
        return values + (world_size - 1) / world_size * self._selection_nbytes(tensor)

    def _values_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of the values, and of the sketch that selects them."""
        selection, n = self.selection, tensor.numel
        sums = selection.sketch_numel(n) if isinstance(selection, LargestRows) else 0
        return (selection.count(n) + sums) * self.bits // 8

    def _selection_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of the positions that all ranks send together."""
        n = tensor.numel
        if isinstance(self.selection, Largest):
            return align(self.selection.nbytes(n))
        return self.selection.nbytes(n) if isinstance(self.selection, ChunkWinners) else 0


@functools.lru_cache(maxsize=1024)  # more than a training has buckets
def _plan(scheme: CommonIndex, tensors: tuple[Tensor, ...], n_ranks: int) -> IndexPlan:
    selection, numels = scheme.selection, list(bucket_plan(tensors).numels)
    names, counts = tuple(t.name for t in tensors), [selection.count(n) for n in numels]
    options = scheme.beta, scheme.unbiased, scheme.error_feedback
    chunks = (selection.chunk, selection.bits) if isinstance(selection, ChunkWinners) else (0, 0)
    rows = map(selection.sketch_numel, numels) if isinstance(selection, LargestRows) else ()
    return IndexPlan(names, numels, counts, n_ranks, *options, *chunks, np.cumsum([0, *rows]))
