"""DGC: top-k of accumulated velocities, with momentum correction (Lin et al., ICLR 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.sparse import Codec
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
    Tensor,
    energy_of,
    measured_on_host,
)
from horovod_fftcomp.schemes.allgather import outputs_for, summed
from horovod_fftcomp.schemes.allgather_on_device import gather_on_device, serves
from horovod_fftcomp.schemes.momentum import MomentumScheme
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import positions
from horovod_fftcomp.wire.positions import Layout


class _NewState(NamedTuple):
    """New state of one tensor; None where there is none."""

    velocity: Array | None
    residual: Array | None
    energy: Energy | None


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
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        codecs = [self.codec] * len(tensors)
        if context.device is not None:
            return (
                yield from gather_on_device(
                    codecs, tensors, grads, state, context, True, self.correction
                )
            )
        message, outs = outputs_for(codecs, tensors)
        assert message is not None  # payloads of a Top-k have fixed sizes
        states = [
            self._encode(tensor, grad, state, context, out)
            for tensor, grad, out in zip(tensors, grads, outs, strict=True)
            if out is not None
        ]
        gathered = yield Round("allgather", message)
        sums, finite, _ = summed(codecs, tensors, gathered, context.world_size)
        named = [(tensor.name, new) for tensor, new in zip(tensors, states, strict=True)]
        new_state = {
            "velocity": {name: new.velocity for name, new in named if new.velocity is not None},
            "residual": {name: new.residual for name, new in named if new.residual is not None},
        }
        energies = {name: new.energy for name, new in named if new.energy is not None}
        return Outcome(sums, new_state, Flags(finite), measured_on_host(energies))

    def _encode(
        self, tensor: Tensor, grad: Array | None, state: OldState, context: Context, out: Array
    ) -> _NewState:
        """Write a tensor's payload into ``out``, and return its new state."""
        kernels, plan = load_backend("cpu"), self.codec.plan(tensor.shape)
        whole = plan.layout in (Layout.RAW, Layout.ALL)
        k = 0 if whole else plan.k
        if grad is None:
            nothing = kernels.topk_threshold(np.zeros(plan.numel, np.float32), k, 1)
            self.codec.encode_coeffs(
                nothing, tensor.shape, kernels=kernels, keep_residual=False, out=out
            )
            velocity, residual = (
                state.get(kind, {}).get(tensor.name) for kind in ("velocity", "residual")
            )
            return _NewState(velocity, residual, None)
        coeffs, velocity = self.correction.accumulate(grad, state, tensor, k, context)
        measures = context.step % MEASURE_EVERY == 0 and coeffs.peak <= LARGEST_FINITE_BITS
        wanted = energy_of(coeffs.array) if measures else 0.0
        payload, residual = self.codec.encode_coeffs(coeffs, tensor.shape, kernels=kernels, out=out)
        if self.correction.masking and not whole and residual is not None:
            packed = payload[plan.header_nbytes : plan.header_nbytes + plan.positions.nbytes]
            kernels.zero_at(velocity, positions.unpack(packed, plan.positions, kernels))
        if not measures:
            return _NewState(velocity, residual, None)
        energy = Energy(energy_of(grad), wanted, energy_of(residual))
        return _NewState(velocity, residual, energy)

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return serves(self.codec, tensors)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        return wire.align(self.codec.payload_nbytes(tensor.shape))
