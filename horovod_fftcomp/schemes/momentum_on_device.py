"""Momentum correction on a GPU: gradient clipping and dense steps."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_fftcomp.codec.quantizers import pattern_of
from horovod_fftcomp.kernels.cuda import Device, on_device
from horovod_fftcomp.schemes import Context, OldState, Outcome, Round, Tensor
from horovod_fftcomp.schemes.device_rows import BucketRows, ExchangeRows, cached, placed, state_of
from horovod_fftcomp.schemes.wrapper import numels_of, split
from horovod_fftcomp.types import Array

if TYPE_CHECKING:
    from horovod_fftcomp.kernels.cuda.encoder import Velocities
    from horovod_fftcomp.schemes.momentum import MomentumCorrection


class _Clipping(BucketRows):
    """Clipping factors from sums of squares, with each gradient as one row; see ``elementwise``.

    ``factors``: device address of the factor of each gradient.
    """

    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        super().__init__(device, "TENSOR", tensors, ["sum_parts<true>", "clip_factors"])
        self.rows["numel"] = self.rows["n"]
        elements = np.zeros(len(tensors), self.tables.ELEMENTS)
        elements["length"], elements["first_part"] = self.rows["n"], self.rows["first_tile"]
        self._elements = device.upload(elements.view(np.uint8))
        self._parts = device.empty(max(1, self.tiles.size) * self.tables.PART.itemsize, np.uint8)
        self._factors = device.empty(len(tensors))
        self.factors = device.address(self._factors) + 4 * np.arange(len(tensors), dtype=np.uint64)

    def find(self, grads: Sequence[Any], most: float) -> None:
        """Launch the kernels that compute the factors for norms of at most ``most``."""
        self.rows["grad"] = [self.device.address(grad) for grad in grads]
        table = self.uploads.of("gradients", self.rows)
        self.on_tiles("sum_parts<true>", table, self._elements, np.uint32(0), self._parts)
        arguments = [table, self._parts, np.float64(most), self._factors]
        self.launch("clip_factors", len(grads), arguments)


def velocities_of(
    correction: MomentumCorrection | None,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    carried: Mapping[str, Any],
    context: Context,
) -> Velocities | None:
    """Return old and new velocities and their options for the encoder; None without correction."""
    from horovod_fftcomp.kernels.cuda.encoder import Velocities  # only with a GPU

    if correction is None:
        return None
    device, old, new = context.device, [], []
    assert device is not None
    for tensor, grad in zip(tensors, grads, strict=True):
        numel = math.prod(tensor.shape)
        old.append(None if grad is None else on_device(carried.get(tensor.name), device))
        new.append(None if grad is None else device.empty(max(1, numel))[:numel])
    factors = clip_factors(correction, tensors, grads, context)
    options = (correction.momentum, correction.nesterov, correction.masking)
    return Velocities(old, new, factors, *options)


def clip_factors(
    correction: MomentumCorrection,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    context: Context,
) -> Array | int:
    """Return the device address of each gradient's clipping factor; 0 without clipping."""
    most, device = correction.largest_norm(context), context.device
    if most is None:
        return 0
    assert device is not None
    clipping = cached(_Clipping, device, tensors)
    clipping.find(placed(grads, numels_of(tensors), device), most)
    return clipping.factors


class _Bucket(BucketRows):
    def __init__(
        self, device: Device, tensors: Sequence[Tensor], correction: MomentumCorrection
    ) -> None:
        super().__init__(device, "SKETCH", tensors, ["accumulate"])
        self.rows["momentum"] = pattern_of(correction.momentum)
        self.rows["how"] = self.tables.NESTEROV * correction.nesterov


def momentum_sum_on_device(
    correction: MomentumCorrection,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    state: OldState,
    context: Context,
) -> Generator[Round, Any, Outcome]:
    """Allreduce residuals plus velocities without waiting; see ``MomentumSum.exchange``."""
    device, numels = context.device, numels_of(tensors)
    assert device is not None
    bucket = cached(_Bucket, device, tensors, correction)
    velocities, residuals = (state.get(kind, {}) for kind in ("velocity", "residual"))
    exchange = ExchangeRows(bucket, tensors, grads, residuals, context)
    exchange.point_at_old("velocity", velocities)
    exchange.rows["factor"] = clip_factors(correction, tensors, grads, context)
    moved = exchange.new("moved", exchange.takes_part)
    values = device.zeros(sum(numels))  # zeros for frozen tensors
    begins = np.cumsum(numels) - numels
    exchange.rows["whole"] = exchange.address(values) + 4 * begins
    table = bucket.uploads.of("own", exchange.rows)
    bucket.on_tiles("accumulate", table, device.zeros(len(tensors), np.uint32))
    reduced = yield Round("allreduce", values)
    # Residuals are zeros now, unless the step is dropped.
    old = zip(numels, exchange.rows["residual"], strict=True)
    left = [device.zeros(n) if residual else None for n, residual in old]
    new_state = {
        "velocity": state_of(tensors, grads, velocities, moved),
        "residual": state_of(tensors, grads, residuals, left),
    }
    return Outcome(split(reduced, numels), new_state, context.ops.flags_of(reduced))
