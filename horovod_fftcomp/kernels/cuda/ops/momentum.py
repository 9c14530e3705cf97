"""Ops of a device for schemes with momentum correction."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from horovod_fftcomp.codec.quantizers import pattern_of
from horovod_fftcomp.kernels.cuda import structs
from horovod_fftcomp.kernels.cuda.encoder import Velocities
from horovod_fftcomp.kernels.cuda.ops.common import CudaCommonOps
from horovod_fftcomp.kernels.cuda.ops.plan_table import PlanTable
from horovod_fftcomp.kernels.ops import Momentum
from horovod_fftcomp.kernels.plans import BucketPlan
from horovod_fftcomp.types import Array, Arrays


class CudaMomentumOps(CudaCommonOps):
    """Ops of schemes with momentum correction."""

    def accumulate(
        self,
        plan: BucketPlan,
        grads: Arrays,
        velocities: Arrays,
        residuals: Arrays,
        momentum: Momentum,
    ) -> tuple[Any, list[Any]]:
        """Return (residual plus new velocity of all tensors, the new velocities)."""
        table = self.of_plan("momentum", plan, self._momentum_table)
        factors = self.clip_factors(plan, grads, momentum.largest_norm)
        if momentum.gain != 1:
            assert momentum.largest_norm is None
            gain = np.array([momentum.gain], np.float32)
            factors = self.address(self.uploads.of("gain", gain))
        whole, moved = self.zeros(plan.offsets[-1]), self._velocities(plan, grads)
        rows = table.at(
            "momentum",
            grad=list(grads),
            residual=list(residuals),
            velocity=list(velocities),
            moved=moved,
            factor=factors,
            whole=self.addresses(whole, plan.offsets),
            momentum=pattern_of(momentum.decay),
            how=structs.NESTEROV * momentum.nesterov,
        )
        table.on_tiles("accumulate", rows)
        return whole, moved

    def _momentum_table(self, plan: BucketPlan) -> PlanTable:
        rows = np.zeros(len(plan.numels), structs.DENSE_MOMENTUM)
        return PlanTable(self, plan, rows, self.kernels("accumulate"))

    def _velocities(self, plan: BucketPlan, grads: Arrays) -> list[Any]:
        pairs = zip(plan.numels, grads, strict=True)
        return [None if grad is None else self.empty(numel) for numel, grad in pairs]

    def mix(self, old: Arrays, new: Arrays, beta: float) -> list[Any]:
        """Write (1 - beta) * old + beta * new of each tensor to ``new``; return these arrays."""
        there = list(map(self.put, old))
        rows = np.zeros(len(there), structs.DENSE_MOMENTUM)
        rows["velocity"] = list(map(self.address, there))
        for field in ("grad", "moved", "whole"):
            rows[field] = list(map(self.address, new))
        rows["n"] = [0 if array is None else array.nbytes // 4 for array in new]
        rows["factor"] = self.address(self.uploads.of("beta", np.array([beta], np.float32)))
        rows["momentum"] = pattern_of(1 - beta)
        owners = structs.enter_tiles(rows, rows["n"])
        if owners.size:
            tables = [self.uploads.of("mixed", rows), self.uploads.of("owners", owners)]
            kernel = self.kernels("accumulate")["accumulate"]
            kernel(owners.size, structs.THREADS, tables, 0)
        return list(new)

    def cleared(self, array: Any) -> Any:
        """Return an array of zeros for ``array``; None if there was none."""
        return None if array is None else self.zeros(len(array))

    def velocities_of(
        self, plan: BucketPlan, grads: Arrays, old: Arrays, momentum: Momentum
    ) -> Velocities:
        """Return old and new velocities and their options for the encoder.

        ``old``: None for zeros or a frozen tensor. The arrays of ``grads`` are on the device.
        """
        factors = self.clip_factors(plan, grads, momentum.largest_norm)
        options = (momentum.decay, momentum.nesterov, momentum.masking)
        return Velocities(old, self._velocities(plan, grads), factors, *options)

    def clip_factors(
        self, plan: BucketPlan, grads: Arrays, largest_norm: float | None
    ) -> Array | int:
        """Return the address of each gradient's clipping factor; 0 without clipping.

        The factors last until the next call for this plan.
        """
        if largest_norm is None:
            return 0
        return self.of_plan("clipping", plan, partial(_Clipping, self)).find(grads, largest_norm)


class _Clipping:
    """Clipping factors from sums of squares, with each gradient as one row; see ``dense``."""

    def __init__(self, ops: CudaCommonOps, plan: BucketPlan) -> None:
        self._ops, self._numels = ops, plan.numels
        rows = np.zeros(len(plan.numels), structs.TENSOR)
        rows["numel"] = plan.numels
        self._table = PlanTable(ops, plan, rows, ops.kernels("sum_parts<true>", "clip_factors"))
        elements = np.zeros(len(rows), structs.ELEMENTS)
        elements["length"], elements["first_part"] = plan.numels, rows["first_tile"]
        self._elements = ops.device.upload(elements.view(np.uint8))
        self._parts = ops.empty(self._table.n_tiles * structs.PART.itemsize, np.uint8)
        self._factors = ops.empty(len(rows))

    def find(self, grads: Arrays, largest_norm: float) -> Array:
        """Launch the kernels that compute the factors; return their addresses."""
        pairs = zip(grads, self._numels, strict=True)
        filled = [self._ops.zeros(numel) if grad is None else grad for grad, numel in pairs]
        rows, warp = self._table.at("gradients", grad=filled), 32
        sums = (self._elements, np.uint32(0), self._parts)
        self._table.on_tiles("sum_parts<true>", rows, *sums, threads=warp)
        factors = (self._parts, np.float64(largest_norm), self._factors)
        self._table.on_rows("clip_factors", rows, *factors, threads=warp)
        return self._ops.addresses(self._factors, range(len(grads) + 1))
