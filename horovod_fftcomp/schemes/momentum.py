"""Momentum correction (DGC): momentum before compression, for optimizers without momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from horovod_fftcomp.kernels.ops import Momentum
from horovod_fftcomp.kernels.plans import split
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round, Scheme, Traits
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.schemes.state import bucket_plan, new_state, old_arrays
from horovod_fftcomp.schemes.state_array import StateArray, StateArrays
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import OldState, Tensor, Tensors


@dataclass(frozen=True)
class MomentumCorrection:
    """Accumulate velocities instead of gradients in the residual.

    velocity <- momentum * velocity + gradient; residual <- residual + velocity. With ``nesterov``
    velocity <- momentum * (velocity + gradient); residual <- residual + velocity + gradient. With
    ``masking`` the velocity of sent elements is reset to 0. ``max_norm``: a tensor's gradient is
    first scaled to a norm of at most max_norm / sqrt(world size), in units of a gradient before
    any loss scale. Source: Lin et al., ICLR 2018 (DGC). With ``averages`` velocities are Adam's
    first moments: momentum * velocity + (1 - momentum) * gradient.
    """

    spec_name = "MomentumCorrection"
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    max_norm: float | None = None
    averages: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum!r}; 0 for none")
        if self.max_norm is not None:
            if not 0.0 < self.max_norm < math.inf:
                raise ValueError(f"max_norm must be above 0 or None, got {self.max_norm!r}")
            object.__setattr__(self, "max_norm", float(self.max_norm))
        object.__setattr__(self, "momentum", float(self.momentum))

    @property
    def growth(self) -> float:
        """Ratio of velocity to gradient in the limit of constant gradients, 1 / (1 - momentum)."""
        return 1.0 if self.averages else 1 / (1 - self.momentum)

    def at(self, context: Context) -> Momentum:
        """Return the options of a step, for ops."""
        norm = self.max_norm
        if norm is not None:
            norm *= context.loss_scale / math.sqrt(context.world_size)
        gain = 1 - self.momentum if self.averages else 1.0
        return Momentum(self.momentum, self.nesterov, self.masking, norm, gain)

    def accumulated(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> tuple[Any, list[Any], list[Any]]:
        """Return (residual plus new velocity, joined; the new velocities; the old residuals).

        ``grads`` lie where the ops work.
        """
        ops = context.ops
        velocities, residuals = (
            old_arrays(ops, kind, state, tensors, grads) for kind in ("velocity", "residual")
        )
        plan, momentum = bucket_plan(tensors), self.at(context)
        return *ops.accumulate(plan, grads, velocities, residuals, momentum), residuals


@dataclass(frozen=True, kw_only=True)
class MomentumScheme(Scheme):
    """Base of schemes with momentum correction, whose optimizer must have no momentum."""

    correction: MomentumCorrection

    def in_warmup(self) -> Scheme:
        """Return the scheme of dense steps: an allreduce of velocities of the same momentum."""
        return MomentumSum(correction=self.correction)

    @property
    def traits(self) -> Traits:
        """What optimizers and adapters need to know; see ``Scheme``."""
        momentum, growth = self.correction.momentum, self.correction.growth
        return Traits(momentum=momentum, accumulation=growth, fits_differences=momentum == 0)

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return velocity and residual; see ``Scheme``."""
        velocity = StateArray(tensor.numel, "velocity")
        return {"velocity": velocity, **super().state_arrays(tensor, state)}


@dataclass(frozen=True)
class MomentumSum(MomentumScheme):
    """Dense step of schemes with momentum correction: allreduce of residual plus velocity."""

    spec_name = "MomentumSum"
    rounds = ("allreduce",)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        ops = context.ops
        grads = [ops.put(grad) for grad in grads]
        whole, velocities, residuals = self.correction.accumulated(tensors, grads, state, context)
        reduced = yield Round("allreduce", whole)
        cleared = [ops.cleared(array) for array in residuals]
        new = new_state(tensors, grads, state, {"velocity": velocities, "residual": cleared})
        return Outcome(split(reduced, bucket_plan(tensors).offsets), new, ops.flags_of(reduced))

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return True: a GPU can compute this step's exchange; see ``Scheme``."""
        return True

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        return 4 * tensor.numel


@dataclass(frozen=True)
class WithMomentum(Wrapper):
    """Exchange velocities by ``scheme`` in place of gradients; the optimizer has no momentum.

    ``correction``: has no masking, since what ``scheme`` sends may be no elements.
    """

    spec_name = "WithMomentum"
    correction: MomentumCorrection

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        grads = [context.ops.put(grad) for grad in grads]
        whole, new = self._accumulated(tensors, grads, state, context)
        parts = zip(grads, split(whole, bucket_plan(tensors).offsets), strict=True)
        moved = [None if grad is None else part for grad, part in parts]
        rest = {kind: arrays for kind, arrays in state.items() if kind != "velocity"}
        outcome = yield from self.scheme.exchange(tensors, moved, rest, context)
        return outcome._replace(state={**outcome.state, **new})

    def _accumulated(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> tuple[Any, dict[str, dict[str, Any]]]:
        """Return what is exchanged, joined, and the new velocities as a state."""
        own = {"velocity": state.get("velocity", {})}
        whole, velocities, _ = self.correction.accumulated(tensors, grads, own, context)
        return whole, new_state(tensors, grads, state, {"velocity": velocities})

    def unsent(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> dict[str, dict[str, Any]]:
        """Return the state with ``grads`` in the velocities; see ``Scheme``."""
        grads = [context.ops.put(grad) for grad in grads]
        return {**super().unsent(tensors, grads, state, context),
                **self._accumulated(tensors, grads, state, context)[1]}  # fmt: skip

    def in_warmup(self) -> Scheme:
        """Return the scheme of dense steps: an allreduce of velocities."""
        return replace(self, scheme=Dense("float32"))

    def received_nbytes(self, tensor: Tensor, world_size: int) -> float:
        """Return the bytes of ``tensor`` that a rank receives in each step; see ``Scheme``."""
        return self.scheme.received_nbytes(tensor, world_size)

    def is_smaller(self, tensors: Tensors, world_size: int) -> bool:
        """Return whether a rank receives fewer bytes than by a gather; see ``Scheme``."""
        return self.scheme.is_smaller(tensors, world_size)

    def owned(self, tensors: Tensors, state: OldState, rank: int, world_size: int) -> OldState:
        """Return a state with second residuals of this rank's pieces alone; see ``Scheme``."""
        return self.scheme.owned(tensors, state, rank, world_size)

    @property
    def traits(self) -> Traits:
        """Those of the scheme, with momentum, which differences have none of; see ``Scheme``."""
        momentum, averages = self.correction.momentum, self.correction.averages
        traits = super().traits._replace(momentum=momentum, sends_moments=averages)
        return traits._replace(fits_differences=False)

    def state_format(self, tensor: Tensor) -> str:
        """Return the state's shape and domain in words; see ``Scheme.state_format``."""
        kind = "first moment" if self.correction.averages else "velocity"
        return f"{kind} by element, {self.scheme.state_format(tensor)}"

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return the velocity and the scheme's state; see ``Scheme``."""
        velocity = StateArray(tensor.numel)
        return {**self.scheme.state_arrays(tensor, state), "velocity": velocity}
