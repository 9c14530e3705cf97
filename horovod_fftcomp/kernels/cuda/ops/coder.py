"""Coder of a bucket on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from horovod_fftcomp.kernels.cuda import on_device
from horovod_fftcomp.kernels.cuda.decoder import Decoder, ThresholdDecoder
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from horovod_fftcomp.kernels.cuda.ops.momentum import CudaMomentumOps
from horovod_fftcomp.kernels.ops import Codecs, EncodedBucket, Feedback, Flags, Into, Summed
from horovod_fftcomp.kernels.plans import BucketPlan
from horovod_fftcomp.types import Arrays, OldState, Tensors
from horovod_fftcomp.wire.counter_rng import RngKey


class DeviceCoder:
    """Coder of a bucket's payloads on a device. Codecs: all of fixed payload size, or none."""

    def __init__(
        self, ops: CudaMomentumOps, codecs: Codecs, tensors: Tensors, n_ranks: int
    ) -> None:
        self._ops, self._codecs, self._tensors = ops, codecs, tensors
        self._device = device = ops.device
        shapes = [tensor.shape for tensor in tensors]
        self._plan = BucketPlan([math.prod(shape) for shape in shapes])
        self._encoder = Encoder(device, codecs, shapes)
        self._decoder: Decoder | ThresholdDecoder
        if all(codec.has_fixed_size for codec in codecs):
            self._decoder = Decoder(device, codecs, shapes, self._encoder, n_ranks)
        else:
            self._decoder = ThresholdDecoder(device, codecs, shapes, n_ranks)

    def encode(
        self, grads: Arrays, state: OldState, at: tuple[int, int], feedback: Feedback, measure: bool
    ) -> EncodedBucket:
        """Launch the encoding of gradients plus residuals; return the message and the new state."""
        device = self._device
        there = [
            device.zeros(max(1, numel)) if grad is None else on_device(grad, device)
            for grad, numel in zip(grads, self._plan.numels, strict=True)
        ]
        old = self._old(grads, state.get("residual", {}))
        new = [
            device.empty(max(1, form[1]), form[0])[: form[1]]
            if form is not None and grad is not None and (feedback.keep or measure)
            else None
            for grad, form in zip(grads, self._encoder.coeffs_formats, strict=True)
        ]
        velocities, momentum = None, feedback.momentum
        if momentum is not None:
            moving = [None if grad is None else on for grad, on in zip(grads, there, strict=True)]
            before = self._old(grads, state.get("velocity", {}))
            velocities = self._ops.velocities_of(self._plan, moving, before, momentum)
        options = self._keys(*at), velocities, feedback.decay, feedback.keeps_sent
        encoded = self._encoder.encode(there, old, new, measure, *options)
        return EncodedBucket(
            encoded.message,
            new if feedback.keep else [None] * len(new),
            [None] * len(new) if velocities is None else velocities.new,
            encoded.squares,
            encoded.left if feedback.keep else None,
        )

    def _old(self, grads: Arrays, carried: Mapping[str, Any]) -> list[Any]:
        """Return each tensor's array in ``carried`` on the device; None for a frozen tensor."""
        found = [
            None if grad is None else carried.get(tensor.name)
            for grad, tensor in zip(grads, self._tensors, strict=True)
        ]
        return [None if array is None else on_device(array, self._device) for array in found]

    def _keys(self, step: int, rank: int) -> list[int] | None:
        """Return the random key of each tensor; None if no method here draws random numbers."""
        if not any(codec.draws for codec in self._codecs):
            return None
        return [
            codec.key_at(RngKey(step, tensor.name, rank)) if codec.draws else 0
            for codec, tensor in zip(self._codecs, self._tensors, strict=True)
        ]

    def decode_sum(self, gathered: Any, sign: bool, into: Into | None = None) -> Summed:
        """Launch the decoding of all ranks' messages; return sums, in new arrays, and flags."""
        sums = [self._device.empty(max(1, numel))[:numel] for numel in self._plan.numels]
        return Summed(sums, Flags(True, *self._decoder.decode(gathered, sums, sign)))


class CudaCoderOps(CudaMomentumOps):
    """Ops that encode and decode payloads, with a cache of coders."""

    def coder(self, codecs: Codecs, tensors: Tensors, n_ranks: int) -> DeviceCoder:
        """Return the coder of a bucket, cached for its last two lists of codecs."""
        cache = self.device.cache
        key, made_for = ("coder", tuple(tensors)), (tuple(codecs), n_ranks)
        recent = cache.setdefault(key, {})
        found = recent.pop(made_for, None)
        if found is None:
            while len(recent) > 1:
                del recent[next(iter(recent))]  # frees its memory first
            found = DeviceCoder(self, codecs, tensors, n_ranks)
        recent[made_for] = found
        return found
