"""Ops of the host for schemes with momentum correction."""

from __future__ import annotations

import math

import numpy as np

from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.codec.methods.sums import ordered_sum
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.kernels.host.common import HostCommonOps
from horovod_fftcomp.kernels.ops import Momentum
from horovod_fftcomp.kernels.plans import BucketPlan, split
from horovod_fftcomp.types import Array, Arrays, Coefficients
from horovod_fftcomp.wire import positions
from horovod_fftcomp.wire.header import Plan
from horovod_fftcomp.wire.positions import Layout


class HostMomentumOps(HostCommonOps):
    """Ops of schemes with momentum correction."""

    def accumulate(
        self,
        plan: BucketPlan,
        grads: Arrays,
        velocities: Arrays,
        residuals: Arrays,
        momentum: Momentum,
    ) -> tuple[Array, list[Array | None]]:
        """Return (residual plus new velocity of all tensors, the new velocities)."""
        whole = self.empty(plan.offsets[-1])
        moved: list[Array | None] = []
        for grad, velocity, residual, share in zip(
            grads, velocities, residuals, split(whole, plan.offsets), strict=True
        ):
            if grad is None:
                share.fill(0)
                moved.append(None)
                continue
            coeffs, new = self.accelerate(grad, velocity, residual, momentum)
            share[:] = coeffs.array
            moved.append(new)
        return whole, moved

    def mix(self, old: Arrays, new: Arrays, beta: float) -> list[Array | None]:
        """Return (1 - beta) * old + beta * new of each tensor, in new arrays."""
        mixed, options = list(new), (1 - beta, False, beta)
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            if after is not None:
                reals = None if before is None else before.view(np.float32)
                coeffs, _ = cpu.momentum_accumulate(after.view(np.float32), reals, None, *options)
                mixed[number] = coeffs.array.view(after.dtype)
        return mixed

    @staticmethod
    def accelerate(
        grad: Array, velocity: Array | None, residual: Array | None, momentum: Momentum
    ) -> tuple[Coefficients, Array]:
        """Return (residual plus velocity, the new velocity), both new arrays."""
        factor = momentum.gain * clip_factor(grad, momentum.largest_norm)
        options = (momentum.decay, momentum.nesterov, factor)
        return cpu.momentum_accumulate(grad, velocity, residual, *options)

    def cleared(self, array: Array | None) -> Array | None:
        """Return None, which stands for zeros."""
        return None


def clip_factor(grad: Array, largest_norm: float | None) -> float:
    """Return the factor that clips the gradient, at most 1; NaN if the gradient has NaN."""
    if largest_norm is None or not grad.size:
        return 1.0
    _, _, squares = cpu.moments(grad)
    square = ordered_sum(squares)
    return 1.0 if square <= largest_norm * largest_norm else largest_norm / math.sqrt(square)


def add_momentum(
    grad: Array, residual: Array | None, velocity: Array | None, momentum: Momentum
) -> tuple[Coefficients, Array]:
    """Return (residual plus velocity; the new velocity)."""
    for kind, array in (("velocity", velocity), ("residual", residual)):
        check_state(kind, array, (np.dtype(np.float32), grad.size))
    return HostMomentumOps.accelerate(grad, velocity, residual, momentum)


def mask_velocity(momentum: Momentum, plan: Plan, payload: Array, velocity: Array) -> None:
    """Reset the velocity where elements are sent, unless all of the tensor is."""
    if momentum.masking and plan.layout not in (Layout.RAW, Layout.ALL):
        packed = payload[plan.header_nbytes : plan.header_nbytes + plan.positions.nbytes]
        cpu.zero_at(velocity, positions.unpack(packed, plan.positions, cpu))
