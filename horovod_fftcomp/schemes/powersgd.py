"""PowerSGD: low-rank approximation of matrices, in two allreduces (Vogels et al., NeurIPS 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
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
    Scheme,
    Tensor,
    energy_of,
    measured_on_host,
)
from horovod_fftcomp.schemes.powersgd_on_device import powersgd_on_device
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import counter_rng


class Matrix(NamedTuple):
    """Shape of a tensor as a matrix, and the rank of its approximation; 0: sent dense."""

    rows: int
    columns: int
    rank: int

    @property
    def first_numel(self) -> int:
        """Number of elements in the first round."""
        return self.rows * (self.rank or self.columns)

    @property
    def second_numel(self) -> int:
        """Number of elements in the second round, which is never empty."""
        return max(1, self.columns * self.rank)


@dataclass
class _TensorExchange:
    """State of one tensor during an exchange."""

    tensor: Tensor
    matrix: Matrix
    grad: Array | None
    carried: Array | None  # the old residual
    whole: Array | None  # gradient + residual, float32 [rows, columns]; in the end the new residual
    right: Array  # warm start, float32 [columns, rank]
    finite: bool
    left: Array  # orthonormal, float32 [rows, rank], the same on all ranks
    energy: Energy | None = None


@dataclass(frozen=True)
class PowerSgd(Scheme):
    """Send the factors of a rank-``rank`` approximation, by one power iteration with warm start.

    M: a tensor as a matrix [first dimension, all others]; r = min(rank, rows, columns).
    P = orthonormal(sum over ranks of M Q); Q = sum over ranks of M^T P, with which the next step
    starts; the sum is P Q^T. The residual of a rank is M - P (its own M^T P)^T. Vectors, and
    matrices whose factors would not be smaller, are sent dense in the first round. ``seed`` draws
    the first Q.

    Differs from Vogels et al.: entries of the first Q are uniform in [-1, 1), which all machines
    compute alike; the residual is the error of the rank's own product instead of that of the mean,
    so that it does not grow with the differences between ranks. The sums are the same.
    """

    spec_name = "PowerSgd"
    rank: int = 4
    error_feedback: bool = True
    seed: int = 0
    rounds = ("allreduce", "allreduce")

    def __post_init__(self) -> None:
        if type(self.rank) is not int or not 1 <= self.rank <= 1024:
            raise ValueError(f"rank must be a whole number from 1 to 1024, got {self.rank!r}")
        counter_rng.check_seed(self.seed)

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        if context.device is not None:
            return (yield from powersgd_on_device(self, tensors, grads, state, context))
        kernels = load_backend("cpu")
        matrices = [self.matrix(tensor) for tensor in tensors]
        ends = np.cumsum([matrix.first_numel for matrix in matrices])
        message = kernels.empty(int(ends[-1]))
        parts = [
            self._begin(tensor, grad, matrix, state, share)
            for tensor, grad, matrix, share in zip(
                tensors, grads, matrices, np.split(message, ends[:-1]), strict=True
            )
        ]
        first = np.split((yield Round("allreduce", message)), ends[:-1])
        ends = np.cumsum([matrix.second_numel for matrix in matrices])
        message = kernels.empty(int(ends[-1]))
        measures = context.step % MEASURE_EVERY == 0
        for part, reduced, share in zip(parts, first, np.split(message, ends[:-1]), strict=True):
            self._project(part, reduced, share, measures)
        second = np.split((yield Round("allreduce", message)), ends[:-1])
        summed = [
            self._sum(part, *pair)
            for part, pair in zip(parts, zip(first, second, strict=True), strict=True)
        ]
        return Outcome(
            [total for total, _ in summed],
            self._new_state(parts, second),
            Flags(all(finite for _, finite in summed)),
            measured_on_host(
                {part.tensor.name: part.energy for part in parts if part.energy is not None}
            ),
        )

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return all(math.prod(tensor.shape) < 1 << 32 for tensor in tensors)

    def matrix(self, tensor: Tensor) -> Matrix:
        """Return the matrix shape and the rank with which a tensor is sent."""
        numel = math.prod(tensor.shape)
        if len(tensor.shape) < 2 or numel == 0:
            return Matrix(1, numel, 0)
        rows, columns = tensor.shape[0], numel // tensor.shape[0]
        rank = min(self.rank, rows, columns)
        return Matrix(rows, columns, rank if rank * (rows + columns) < numel else 0)

    def _begin(
        self, tensor: Tensor, grad: Array | None, matrix: Matrix, state: OldState, share: Array
    ) -> _TensorExchange:
        """Write a tensor's slice of the first message, M Q, into ``share``."""
        residual, shape = state.get("residual", {}).get(tensor.name), (matrix.rows, matrix.columns)
        check_state("residual", residual, (np.dtype(np.float32), math.prod(shape)))
        right = self.right(tensor, state)
        part = _TensorExchange(tensor, matrix, grad, residual, None, right, True, right)
        if grad is None:
            share.fill(0)
            return part
        carried = residual if self.error_feedback else None
        coeffs = load_backend("cpu").add_residual(grad, carried, 0)
        part.whole, part.finite = coeffs.array.reshape(shape), coeffs.peak <= LARGEST_FINITE_BITS
        if not part.finite:
            share.fill(np.nan)
        elif matrix.rank:
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(part.whole, right, out=share.reshape(matrix.rows, matrix.rank))
        else:
            share[:] = coeffs.array
        return part

    def right(self, tensor: Tensor, state: OldState) -> Array:
        """Return Q of the last step, or a random first one, ``[columns, rank]``."""
        matrix = self.matrix(tensor)
        numel = matrix.columns * matrix.rank
        kept = state.get("factor", {}).get(tensor.name)
        check_state("factor", kept, (np.dtype(np.float32), numel))
        if kept is None:
            kept = counter_rng.uniform(self.seed, 0, tensor.name, numel)
        return kept.reshape(matrix.columns, matrix.rank) if matrix.rank else kept

    def _project(self, part: _TensorExchange, reduced: Array, share: Array, measures: bool) -> None:
        """Write a tensor's slice of the second message, M^T P, and compute its new residual."""
        kernels, (rows, columns, rank) = load_backend("cpu"), part.matrix
        share.fill(0)
        if kernels.max_abs_bits(reduced) > LARGEST_FINITE_BITS:
            part.finite = False
            share.fill(np.nan)
        if not part.finite or part.whole is None:
            part.left = np.zeros((rows, rank), np.float32)
            if part.finite and rank:
                part.left = kernels.orthonormal(reduced.reshape(rows, rank))
            return
        gradient, wanted = (energy_of(part.grad), energy_of(part.whole)) if measures else (0.0, 0.0)
        if rank:
            part.left = kernels.orthonormal(reduced.reshape(rows, rank))
            own = share.reshape(columns, rank)
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(part.whole.T, part.left, out=own)
            if self.error_feedback or measures:
                kernels.low_rank(part.left, own, part.whole)
        else:
            part.whole = None  # all of it is sent
        if measures:
            part.energy = Energy(gradient, wanted, energy_of(part.whole))

    def _sum(self, part: _TensorExchange, first: Array, second: Array) -> tuple[Array, bool]:
        """Return (the sum over ranks, flat; whether it is finite)."""
        kernels, (rows, columns, rank) = load_backend("cpu"), part.matrix
        finite = all(
            kernels.max_abs_bits(array) <= LARGEST_FINITE_BITS for array in (first, second)
        )
        if not finite:
            return np.full(rows * columns, np.nan, np.float32), False
        if not rank:
            return first, True
        right = second.reshape(columns, rank)
        total = kernels.low_rank(part.left, right, None).reshape(-1)
        if rank * float(np.abs(right).max(initial=0)) > 2.0**127:
            finite = kernels.max_abs_bits(total) <= LARGEST_FINITE_BITS
        return total, finite

    def _new_state(
        self, parts: Sequence[_TensorExchange], second: Sequence[Array]
    ) -> dict[str, dict[str, Array]]:
        factors, residuals = {}, {}
        for part, reduced in zip(parts, second, strict=True):
            if part.matrix.rank:
                # A zero column (frozen tensor, lower rank) would stay zero: keep the old one.
                right = reduced.reshape(part.right.shape)
                kept = np.where(right.any(0), right, part.right)
                factors[part.tensor.name] = np.ascontiguousarray(kept).reshape(-1)
            left = part.carried if part.grad is None else part.whole
            if self.error_feedback and left is not None:
                residuals[part.tensor.name] = left.reshape(-1)
        state = {"factor": factors}
        return state | {"residual": residuals} if self.error_feedback else state

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        matrix = self.matrix(tensor)
        return 4 * (matrix.first_numel + matrix.second_numel)

    def state_format(self, tensor: Tensor) -> str:
        """Return the state's shape and domain in words; see ``Scheme.state_format``."""
        return f"residual of {list(tensor.shape)} and factor of rank {self.matrix(tensor).rank}"

    def state_arrays(self, tensor: Tensor, state: OldState) -> Mapping[str, tuple[np.dtype, int]]:
        """Return (dtype, elements) of the factor and the residual; see ``Scheme``."""
        del state
        matrix, kind = self.matrix(tensor), np.dtype(np.float32)
        arrays = {"factor": (kind, matrix.columns * matrix.rank)} if matrix.rank else {}
        if self.error_feedback:
            arrays["residual"] = (kind, math.prod(tensor.shape))
        return arrays
