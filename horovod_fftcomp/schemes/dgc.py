"""DGC: top-k of accumulated velocities, with momentum correction (Lin et al., ICLR 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_fftcomp import wire
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.kernels.ops import Feedback
from horovod_fftcomp.schemes import Context, Exchange, Grads
from horovod_fftcomp.schemes.allgather import gather, serves
from horovod_fftcomp.schemes.momentum import MomentumScheme
from horovod_fftcomp.types import OldState, Tensor, Tensors


@dataclass(frozen=True)
class Dgc(MomentumScheme):
    """Send the k largest accumulated velocities of each tensor; the optimizer has no momentum.

    ``correction``: momentum, masking and clipping. A tensor that is sent completely keeps its
    velocity in spite of masking, so that density 1 is SGD with momentum.

    Differs from Lin et al.: exactly k elements are sent. A sample of the magnitudes bounds the
    threshold, as theirs does, and one pass makes it exact.
    """

    spec_name = "Dgc"
    codec: Codec
    rounds = ("allgather",)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        codecs = [self.codec] * len(tensors)
        feedback = Feedback(momentum=self.correction.at(context))
        return (yield from gather(codecs, tensors, grads, state, context, feedback)).outcome

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return serves(self.codec, tensors)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        return wire.align(self.codec.payload_nbytes(tensor.shape))
