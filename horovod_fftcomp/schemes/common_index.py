"""Allreduce of the values at common positions: drawn from a seed, or selected by CLT-k."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.sparsifiers import RandomBlock, RandomK
from horovod_fftcomp.kernels.ops import Flags
from horovod_fftcomp.schemes import (
    MEASURE_EVERY,
    Context,
    Energy,
    Exchange,
    Grads,
    OldState,
    Outcome,
    Round,
    Scheme,
    Tensor,
    measured_on_host,
)
from horovod_fftcomp.schemes.clt_selection import (
    Choice,
    ChunkWinners,
    Largest,
    Selector,
    broadcast_selection,
    gather_selection,
)
from horovod_fftcomp.schemes.common_index_on_device import common_index_on_device
from horovod_fftcomp.schemes.dense import half_limits
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import align


class _TensorExchange(NamedTuple):
    """One tensor in an exchange; ``new_residual`` is that of a step that sends nothing."""

    grad: Array | None
    residual: Array | None
    positions: Array
    slice: Array  # of the message, float32
    new_residual: Array | None


class _Encoded(NamedTuple):
    """One rank's message, its new residuals and the energies that were measured."""

    message: Array
    residuals: dict[str, Array]
    energies: dict[str, Energy]


@dataclass(frozen=True)
class CommonIndex(Scheme):
    """Sum the values at positions that are common to all ranks, with optional error feedback.

    ``selection``: how positions are drawn (``RandomBlock``, ``RandomK``) or selected (CLT-k). Bytes
    per rank grow by less than 8 bytes of positions with each further rank. ``beta`` below 1 applies
    the low-pass filter of Chen et al., NeurIPS 2020: residual <- (1 - beta) residual + beta
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
        if not 0.0 < self.beta <= 1.0:
            raise ValueError(f"beta must lie in (0, 1], got {self.beta!r}; 1 means no filter")
        if type(self.bits) is not int or self.bits not in (16, 32):
            raise ValueError(f"bits must be 16 or 32 (float16 or float32), got {self.bits!r}")
        object.__setattr__(self, "beta", float(self.beta))

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        if isinstance(self.selection, Selector):
            return (self.selection.collective, self.collective)
        return (self.collective,)

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        carried = state.get("residual", {})
        if context.device is not None:
            return (yield from common_index_on_device(self, tensors, grads, carried, context))
        for tensor in tensors:
            self._check(carried.get(tensor.name), tensor)
        chosen, similarity = yield from self._agree(tensors, grads, carried, context)
        encoded = self._encode(tensors, grads, chosen, carried, context)
        received = yield Round(self.collective, encoded.message)
        if self.bits == 16:
            received = load_backend("cpu").from_float16(received)
        sources = [chosen]
        if self.collective == "allgather":
            sources = [self._drawn(tensors, context, rank) for rank in range(context.world_size)]
        numels = [math.prod(tensor.shape) for tensor in tensors]
        sums, finite = _scattered(received, sources, numels)
        new_state = {"residual": encoded.residuals} if self.error_feedback else {}
        measured = measured_on_host(encoded.energies, similarity)
        return Outcome(sums, new_state, Flags(finite), measured)

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        small = all(math.prod(tensor.shape) < 1 << 32 for tensor in tensors)
        return small and self.bits == 32 and not isinstance(self.selection, Largest)

    def _encode(
        self,
        tensors: Sequence[Tensor],
        grads: Grads,
        chosen: Sequence[Array],
        carried: Mapping[str, Array],
        context: Context,
    ) -> _Encoded:
        """Return this rank's message, its new residuals and the energies."""
        measure = context.step % MEASURE_EVERY == 0
        ends = np.cumsum([positions.size for positions in chosen])
        kernels = load_backend("cpu")
        message = kernels.empty(int(ends[-1]))
        slices = np.split(message, ends[:-1])
        parts = [
            self._part(grad, carried.get(tensor.name), positions, out)
            for tensor, grad, positions, out in zip(tensors, grads, chosen, slices, strict=True)
        ]
        sent = message
        if self.bits == 16:
            message = context.ops.to_half(message, *half_limits(context))
            sent = kernels.from_float16(message)
        residuals: dict[str, Array] = {}
        energies: dict[str, Energy] = {}
        for tensor, part, arrives in zip(tensors, parts, np.split(sent, ends[:-1]), strict=True):
            residual = self._settled(part, arrives)
            if residual is not None:
                residuals[tensor.name] = residual
            if measure and part.grad is not None and not np.isnan(arrives).any():
                energies[tensor.name] = self._energy(part, arrives)
        return _Encoded(message, residuals, energies)

    def _check(self, residual: Array | None, tensor: Tensor) -> None:
        """Raise ValueError for a residual of the wrong size, which kernels would overrun."""
        expected = (np.dtype(np.float32), math.prod(tensor.shape))
        if residual is not None and (residual.dtype, residual.size) != expected:
            found = (residual.dtype, residual.size)
            raise ValueError(
                f"tensor {tensor.name!r}: the residual is (dtype, elements) {found}, "
                f"expected {expected}"
            )

    def _agree(
        self,
        tensors: Sequence[Tensor],
        grads: Grads,
        carried: Mapping[str, Array],
        context: Context,
    ) -> Generator[Round, Array, Choice]:
        """Return each tensor's positions, after a round if ranks select them."""
        if isinstance(self.selection, ChunkWinners):
            return (yield from gather_selection(self.selection, tensors, grads, carried, context))
        if isinstance(self.selection, Largest):
            return (
                yield from broadcast_selection(self.selection, tensors, grads, carried, context)
            )
        return Choice(self._drawn(tensors, context, context.rank), None)

    def _drawn(self, tensors: Sequence[Tensor], context: Context, rank: int) -> list[Array]:
        """Return the random positions of ``rank``."""
        assert not isinstance(self.selection, Selector)
        whose = f"#{rank}" if self.collective == "allgather" else ""
        return [
            self.selection.positions(math.prod(tensor.shape), context.step, tensor.name + whose)
            for tensor in tensors
        ]

    def _part(
        self, grad: Array | None, residual: Array | None, positions: Array, out: Array
    ) -> _TensorExchange:
        """Write a tensor's values to send into ``out``."""
        new_residual, peak = None, 0
        if grad is None:
            out.fill(0)
            return _TensorExchange(None, residual, positions, out, None)
        if self.error_feedback:
            new_residual, peak = load_backend("cpu").low_pass(grad, residual, self.beta)
        else:
            residual, peak = None, load_backend("cpu").max_abs_bits(grad)
        np.take(grad, positions, out=out)
        if residual is not None:
            out += residual[positions]
        if self.unbiased:
            out *= np.float32(grad.size / max(1, positions.size))
        if peak > LARGEST_FINITE_BITS:
            out.fill(np.nan)  # the NaN or Inf may be at a position that is not sent
        return _TensorExchange(grad, residual, positions, out, new_residual)

    def _settled(self, part: _TensorExchange, arrives: Array) -> Array | None:
        """Return the new residual; ``arrives``: the values as sent, after rounding to float16."""
        if part.new_residual is None:
            return part.residual  # a frozen tensor's, if there is feedback
        unsent = np.float32(self.beta) * (part.slice - arrives)
        if part.residual is not None:
            unsent += np.float32(1 - self.beta) * part.residual[part.positions]
        part.new_residual[part.positions] = unsent
        return part.new_residual

    def _energy(self, part: _TensorExchange, arrives: Array) -> Energy:
        """Return the energies of a finite tensor; an extra pass, so not done in every step."""
        grad = part.grad
        assert grad is not None
        wanted = load_backend("cpu").add_residual(grad, part.residual, 0).array
        total = float(np.dot(wanted, wanted))
        due = wanted[part.positions]
        error = due - arrives
        # Rounding may make the difference negative.
        left = max(0.0, total - float(np.dot(due, due))) + float(np.dot(error, error))
        return Energy(float(np.dot(grad, grad)), total, left)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step.

        With ``ChunkWinners`` the positions of all ranks are counted, as received.
        """
        n = math.prod(tensor.shape)
        values = self.selection.count(n) * self.bits // 8
        if isinstance(self.selection, Largest):
            return values + align(self.selection.nbytes(n))
        if isinstance(self.selection, ChunkWinners):
            return values + self.selection.nbytes(n)
        return values


def _scattered(
    received: Array, sources: Sequence[Sequence[Array]], numels: Sequence[int]
) -> tuple[list[Array], bool]:
    """Return (sums of the received values at their positions, whether all are finite).

    ``sources``: for each message in ``received`` the positions of each tensor.
    """
    kernels = load_backend("cpu")
    sums, finite = [], True
    messages = [
        np.split(message, np.cumsum([positions.size for positions in chosen])[:-1])
        for message, chosen in zip(np.split(received, len(sources)), sources, strict=True)
    ]
    for number, numel in enumerate(numels):
        total = kernels.empty(numel)
        total.fill(0)
        for slices, chosen in zip(messages, sources, strict=True):
            if kernels.max_abs_bits(slices[number]) > LARGEST_FINITE_BITS:
                total.fill(np.nan)  # everywhere, so that no optimizer uses the rest
                finite = False
                break
            total[chosen[number]] += slices[number]
        sums.append(total)
    return sums, finite
