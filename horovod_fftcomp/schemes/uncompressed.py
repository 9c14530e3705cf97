"""Steps that exchange gradients without a compression that keeps state, between compressed ones."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_fftcomp.schemes import Context, Exchange, Grads, Scheme, Traits, Tuner
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import OldState, Tensor, Tensors


@dataclass(frozen=True)
class Uncompressed(Wrapper):
    """Exchange gradients by ``by``, which has no state; ``scheme`` keeps its residuals.

    So the sums have no residual in them: they are those of this step's gradients alone. Velocities
    of ``scheme`` accumulate these too.
    """

    spec_name = "Uncompressed"
    by: Scheme

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        return self.by.rounds

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        kept = self.scheme.unsent(tensors, grads, state, context)
        outcome = yield from self.by.exchange(tensors, grads, {}, context)
        return outcome._replace(state=kept, measured=None)

    @property
    def traits(self) -> Traits:
        """Those of the other scheme, but for the sums, of this step's gradients; see ``Scheme``."""
        traits = super().traits._replace(compresses=False, is_noisy=False)
        return traits._replace(momentum=0.0, sends_moments=False)

    @property
    def tuner(self) -> Tuner | None:
        """That of the other scheme, which chooses nothing after this step; see ``Scheme``."""
        tuner = self.scheme.tuner
        return tuner and tuner._replace(is_due=False)

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        both = not self.scheme.traits.momentum or self.scheme.runs_on_device(tensors)
        return both and self.by.runs_on_device(tensors)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in this step."""
        return self.by.sent_nbytes(tensor)

    def share_nbytes(self, tensor: Tensor, state: OldState, world_size: int) -> float:
        """Return the mean over ranks of the bytes that one sends of ``tensor`` in this step."""
        return self.by.share_nbytes(tensor, {}, world_size)

    def received_nbytes(self, tensor: Tensor, world_size: int) -> float:
        """Return the bytes of ``tensor`` that a rank receives in this step; see ``Scheme``."""
        return self.by.received_nbytes(tensor, world_size)
