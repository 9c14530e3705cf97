"""Ops of a device for low-rank schemes."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_fftcomp.kernels.cuda import structs
from horovod_fftcomp.kernels.cuda.ops.common import CudaCommonOps
from horovod_fftcomp.kernels.cuda.ops.plan_table import PlanTable
from horovod_fftcomp.kernels.ops import Flags
from horovod_fftcomp.kernels.plans import LeftFactors, LowRankPlan, split
from horovod_fftcomp.types import Arrays

_KERNELS = ("take_whole", "check_factors", "orthonormalize", "subtract_products", "sum_products",
            "keep_factors")  # fmt: skip


class CudaLowRankOps(CudaCommonOps):
    """Ops of low-rank schemes; matrices are multiplied by the device's library.

    Left factors are one array. Words say which tensors are not finite: one for the factors of each
    tensor, then one for its product.
    """

    def _table(self, plan: LowRankPlan) -> PlanTable:
        return self.of_plan("low rank", plan, self._low_rank_table)

    def _low_rank_table(self, plan: LowRankPlan) -> PlanTable:
        rows = np.zeros(len(plan.matrices), structs.LOW_RANK)
        for field in ("rows", "columns", "rank"):
            rows[field] = [getattr(matrix, field) for matrix in plan.matrices]
        return PlanTable(self, plan, rows, self.kernels(*_KERNELS))

    def compensate(
        self, plan: LowRankPlan, grads: Arrays, residuals: Arrays
    ) -> tuple[list[Any], Any]:
        """Return (gradient plus residual of each tensor, the first message)."""
        table, message = self._table(plan), self.zeros(plan.firsts[-1])
        whole = [
            None if grad is None else self.empty(numel) if matrix.rank else share
            for matrix, numel, grad, share in zip(
                plan.matrices, plan.numels, grads, split(message, plan.firsts), strict=True
            )
        ]
        addresses = {"grad": list(grads), "residual": list(residuals), "whole": whole}
        table.on_tiles("take_whole", table.at("whole", **addresses))
        return whole, message

    def project(self, plan: LowRankPlan, whole: Arrays, right: Arrays, message: Any) -> None:
        """Write the product of each matrix and its right factor to ``message``."""
        self._multiply(plan, whole, right, split(message, plan.firsts), False)

    def _multiply(
        self, plan: LowRankPlan, whole: Arrays, factors: Arrays, shares: Arrays, transposed: bool
    ) -> None:
        """Write the products of matrices, or of their transposes, and factors to ``shares``."""
        for matrix, array, factor, share in zip(plan.matrices, whole, factors, shares, strict=True):
            if array is not None and matrix.rank:
                self.device.multiply(array, matrix.rows, factor, share, transposed)

    def orthonormalize(self, plan: LowRankPlan, first: Any) -> LeftFactors:
        """Return the left factors: matrices of a first message with orthonormal columns."""
        values = self.empty(plan.lefts[-1])
        scratch = self.empty(plan.lefts[-1], np.float64)
        left = LeftFactors(values, self.device.zeros(2 * len(plan.matrices), np.uint32))
        table = self._table(plan)
        rows = table.at(
            "left",
            first=self.addresses(first, plan.firsts),
            left=self.addresses(values, plan.lefts),
            scratch=self.addresses(scratch, plan.lefts),
        )
        table.on_rows("check_factors", rows, np.uint32(0), left.not_finite)
        table.on_rows("orthonormalize", rows)
        return left

    def project_back(self, plan: LowRankPlan, whole: Arrays, left: LeftFactors) -> Any:
        """Return the second message: products of transposed matrices and left factors."""
        message = self.zeros(plan.seconds[-1])
        factors = split(left.values, plan.lefts)
        self._multiply(plan, whole, factors, split(message, plan.seconds), True)
        return message

    def subtract_product(
        self, plan: LowRankPlan, whole: Arrays, left: LeftFactors, own: Any
    ) -> list[Any]:
        """Subtract the product of the factors from each matrix in place; return the residuals."""
        pairs = zip(plan.matrices, whole, strict=True)
        residuals = [array if matrix.rank else None for matrix, array in pairs]
        table = self._table(plan)
        rows = table.at(
            "residual",
            whole=residuals,
            left=self.addresses(left.values, plan.lefts),
            second=self.addresses(own, plan.seconds),
        )
        table.on_tiles("subtract_products", rows)
        return residuals

    def product(
        self, plan: LowRankPlan, left: LeftFactors, first: Any, second: Any
    ) -> tuple[list[Any], Flags]:
        """Return the sum of each tensor, NaN if not finite, and the flags of all."""
        sums, flags = [self.empty(numel) for numel in plan.numels], left.not_finite
        table = self._table(plan)
        rows = table.at(
            "sum",
            first=self.addresses(first, plan.firsts),
            second=self.addresses(second, plan.seconds),
            left=self.addresses(left.values, plan.lefts),
            sum=sums,
        )
        table.on_rows("check_factors", rows, np.uint32(1), flags)
        table.on_tiles("sum_products", rows, flags[: len(sums)], flags[len(sums) :])
        return sums, Flags(True, flags, flags[:0])  # there are no payloads that could be corrupt

    def nonzero_columns(self, plan: LowRankPlan, second: Any, right: Arrays) -> list[Any]:
        """Return the next right factors; columns of zeros are those of ``right``."""
        factors = [
            self.empty(matrix.columns * matrix.rank) if matrix.rank else None
            for matrix in plan.matrices
        ]
        table = self._table(plan)
        addresses = self.addresses(second, plan.seconds)
        rows = table.at("factor", second=addresses, right=list(right), factor=factors)
        table.on_rows("keep_factors", rows)
        return factors
