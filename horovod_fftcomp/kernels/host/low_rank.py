"""Ops of the host for low-rank schemes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.kernels.host.common import HostCommonOps
from horovod_fftcomp.kernels.ops import Flags
from horovod_fftcomp.kernels.plans import LeftFactors, LowRankPlan, split
from horovod_fftcomp.types import Array, Arrays


def _zipped(plan: LowRankPlan, *columns: Iterable[Any]) -> Iterator[tuple]:
    """Return the matrices of a plan, each with its element of every column."""
    return zip(plan.matrices, *columns, strict=True)


class HostLowRankOps(HostCommonOps):
    """Ops of low-rank schemes, by NumPy's matrix products.

    Left factors are a list of ``[rows, rank]``, None where they are not needed.
    """

    def compensate(
        self, plan: LowRankPlan, grads: Arrays, residuals: Arrays
    ) -> tuple[list[Array | None], Array]:
        """Return (gradient plus residual of each tensor, the first message)."""
        message = self.empty(plan.firsts[-1])
        whole: list[Array | None] = []
        shares = split(message, plan.firsts)
        for matrix, grad, residual, share in _zipped(plan, grads, residuals, shares):
            if grad is None:
                share.fill(0)
                whole.append(None)
                continue
            coeffs = cpu.add_residual(grad, residual, 0)
            if coeffs.peak > LARGEST_FINITE_BITS:
                share.fill(np.nan)
                whole.append(None)
            elif matrix.rank:
                whole.append(coeffs.array)
            else:
                share[:] = coeffs.array
                whole.append(share)
        return whole, message

    def project(self, plan: LowRankPlan, whole: Arrays, right: Arrays, message: Array) -> None:
        """Write the product of each matrix and its right factor to ``message``."""
        shares = split(message, plan.firsts)
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix, array, factor, share in _zipped(plan, whole, right, shares):
                if array is not None and factor is not None:
                    rows, columns, rank = matrix
                    left = array.reshape(rows, columns)
                    np.matmul(left, factor.reshape(columns, rank), out=share.reshape(rows, rank))

    def orthonormalize(self, plan: LowRankPlan, first: Array) -> LeftFactors:
        """Return the left factors: matrices of a first message with orthonormal columns."""
        values, not_finite = [], []
        for matrix, share in _zipped(plan, split(first, plan.firsts)):
            is_bad = cpu.max_abs_bits(share) > LARGEST_FINITE_BITS
            is_needed = matrix.rank and not is_bad
            by_row = (matrix.rows, matrix.rank)
            values.append(cpu.orthonormal(share.reshape(by_row)) if is_needed else None)
            not_finite.append(is_bad)
        return LeftFactors(values, not_finite)

    def project_back(self, plan: LowRankPlan, whole: Arrays, left: LeftFactors) -> Array:
        """Return the second message: products of transposed matrices and left factors."""
        message = self.zeros(plan.seconds[-1])
        shares = split(message, plan.seconds)
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix, array, factor, is_bad, share in _zipped(plan, whole, *left, shares):
                if is_bad:
                    share.fill(np.nan)
                elif array is not None and factor is not None:
                    rows, columns, rank = matrix
                    turned = array.reshape(rows, columns).T
                    np.matmul(turned, factor, out=share.reshape(columns, rank))
        return message

    def subtract_product(
        self, plan: LowRankPlan, whole: Arrays, left: LeftFactors, own: Array
    ) -> list[Array | None]:
        """Subtract the product of the factors from each matrix in place; return the residuals."""
        shares = split(own, plan.seconds)
        for matrix, array, factor, share in _zipped(plan, whole, left.values, shares):
            if array is not None and factor is not None:
                rows, columns, rank = matrix
                cpu.low_rank(factor, share.reshape(columns, rank), array.reshape(rows, columns))
        return [array if matrix.rank else None for matrix, array in _zipped(plan, whole)]

    def product(
        self, plan: LowRankPlan, left: LeftFactors, first: Array, second: Array
    ) -> tuple[list[Array], Flags]:
        """Return the sum of each tensor, NaN if not finite, and the flags of all."""
        sums, finite = [], True
        shares = zip(split(first, plan.firsts), split(second, plan.seconds), strict=True)
        for matrix, factor, is_bad, (dense, right) in _zipped(plan, *left, shares):
            rows, columns, rank = matrix
            if is_bad or cpu.max_abs_bits(right) > LARGEST_FINITE_BITS:
                finite = False
                sums.append(np.full(rows * columns, np.nan, np.float32))
            elif not rank:
                sums.append(dense)
            else:
                total = cpu.low_rank(factor, right.reshape(columns, rank), None).reshape(-1)
                if rank * float(np.abs(right).max()) > 2.0**127:
                    finite = finite and cpu.max_abs_bits(total) <= LARGEST_FINITE_BITS
                sums.append(total)
        return sums, Flags(finite)

    def nonzero_columns(
        self, plan: LowRankPlan, second: Array, right: Arrays
    ) -> list[Array | None]:
        """Return the next right factors; columns of zeros are those of ``right``."""
        found: list[Array | None] = []
        for matrix, share, before in _zipped(plan, split(second, plan.seconds), right):
            if before is None:
                found.append(None)
                continue
            by_column = (matrix.columns, matrix.rank)
            new, old = share.reshape(by_column), before.reshape(by_column)
            exponents = np.abs(new).max(0).view(np.uint32) >> 23
            scaled = np.ldexp(new, 127 - np.minimum(exponents, 253).astype(np.int32))
            found.append(np.where(new.any(0), scaled, old).reshape(-1))
        return found
