"""Base of schemes that wrap another scheme, to which they delegate state and properties."""

from __future__ import annotations

from dataclasses import dataclass, replace

from horovod_fftcomp.schemes import Scheme, Traits, Tuner
from horovod_fftcomp.schemes.state_array import StateArrays
from horovod_fftcomp.types import Array, OldState, Tensor, Tensors


@dataclass(frozen=True)
class Wrapper(Scheme):
    """Scheme that runs another one, ``scheme``, and has the same state."""

    scheme: Scheme

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        return self.scheme.rounds

    def at(self, step: int) -> Scheme:
        """Return the scheme to run at a step; see ``Scheme``."""
        scheme = self.scheme.at(step)
        return self if scheme is self.scheme else replace(self, scheme=scheme)

    def in_warmup(self) -> Scheme | None:
        """Return the scheme of dense warm-up steps; see ``Scheme``."""
        return self.scheme.in_warmup()

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return self.scheme.runs_on_device(tensors)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes that a rank would send for ``tensor`` alone in each step."""
        return self.scheme.sent_nbytes(tensor)

    def share_nbytes(self, tensor: Tensor, state: OldState, world_size: int) -> float:
        """Return the mean over ranks of the bytes that one sends of ``tensor``; see ``Scheme``."""
        return self.scheme.share_nbytes(tensor, state, world_size)

    def state_format(self, tensor: Tensor) -> str:
        """Return the state's shape and domain in words; see ``Scheme.state_format``."""
        return self.scheme.state_format(tensor)

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return the arrays of the state; see ``Scheme``."""
        return self.scheme.state_arrays(tensor, state)

    @property
    def traits(self) -> Traits:
        """What optimizers and adapters need to know; see ``Scheme``."""
        return self.scheme.traits

    @property
    def tuner(self) -> Tuner | None:
        """Chooses how tensors are compressed; see ``Scheme``."""
        return self.scheme.tuner

    def residual(self, state: OldState, tensor: Tensor) -> Array:
        """Return the residual of ``tensor``, float32 in its shape, in a new array."""
        return self.scheme.residual(state, tensor)
