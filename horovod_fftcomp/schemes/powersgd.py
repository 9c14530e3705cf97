"""PowerSGD: low-rank approximation of matrices, in two allreduces (Vogels et al., NeurIPS 2019)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from horovod_fftcomp.errors import check_whole
from horovod_fftcomp.kernels.ops import Ops
from horovod_fftcomp.kernels.plans import LowRankPlan, Matrix
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round
from horovod_fftcomp.schemes.meter import Meter
from horovod_fftcomp.schemes.state import LowPass, low_passed, named, new_state, old_arrays
from horovod_fftcomp.schemes.state_array import StateArray, StateArrays
from horovod_fftcomp.types import OldState, Tensor, Tensors
from horovod_fftcomp.wire import counter_rng


@dataclass(frozen=True)
class PowerSgd(LowPass):
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
        super().__post_init__()
        check_whole("rank", self.rank, 1, 1024)
        counter_rng.check_seed(self.seed)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        ops, plan, meter = context.ops, _plan_of(self, tuple(tensors)), Meter(context, tensors)
        grads = [ops.put(grad) for grad in grads]
        old = state if self.error_feedback else {}
        right = [
            self._right(ops, tensor, matrix, state)
            for tensor, matrix in zip(tensors, plan.matrices, strict=True)
        ]
        residuals = old_arrays(ops, "residual", old, tensors, grads)
        whole, message = ops.compensate(plan, grads, residuals)
        meter.before(grads, whole)
        ops.project(plan, whole, right, message)  # M Q
        first = yield Round("allreduce", message)
        left = ops.orthonormalize(plan, first)
        message = ops.project_back(plan, whole, left)  # M^T P
        if self.error_feedback or meter.on:
            whole = ops.subtract_product(plan, whole, left, message)
            meter.after(whole)
        second = yield Round("allreduce", message)
        sums, flags = ops.product(plan, left, first, second)
        before = {"factor": named(tensors, right)}
        new = {"factor": named(tensors, ops.nonzero_columns(plan, second, right))}
        whole = low_passed(ops, tensors, old, whole, self.beta)
        kept = new_state(tensors, grads, old, {"residual": whole} if self.error_feedback else {})
        return Outcome(sums, new | kept, flags, meter.measured(), before)

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return all(tensor.numel < 1 << 32 for tensor in tensors)

    def matrix(self, tensor: Tensor) -> Matrix:
        """Return the matrix shape and the rank with which a tensor is sent."""
        numel = tensor.numel
        if len(tensor.shape) < 2 or numel == 0:
            return Matrix(1, numel, 0)
        rows, columns = tensor.shape[0], numel // tensor.shape[0]
        rank = min(self.rank, rows, columns)
        return Matrix(rows, columns, rank if rank * (rows + columns) < numel else 0)

    def _right(self, ops: Ops, tensor: Tensor, matrix: Matrix, state: OldState) -> Any:
        """Return Q of the last step, or a random first one, flat; None if the rank is 0."""
        numel = matrix.columns * matrix.rank
        kept = ops.checked("factor", state.get("factor", {}).get(tensor.name), numel)
        if kept is not None or not numel:
            return kept
        return ops.put(counter_rng.uniform(self.seed, 0, tensor.name, numel))

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        matrix = self.matrix(tensor)
        return 4 * (matrix.first_numel + matrix.second_numel)

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return the residual and the factor; see ``Scheme``."""
        matrix, words = self.matrix(tensor), f"residual of {list(tensor.shape)}"
        residual = StateArray(tensor.numel, words, is_kept=self.error_feedback)
        factor = StateArray(matrix.columns * matrix.rank, f"factor of rank {matrix.rank}")
        return {"residual": residual, "factor": factor}


@functools.lru_cache(maxsize=1024)  # more than a training has buckets
def _plan_of(scheme: PowerSgd, tensors: tuple[Tensor, ...]) -> LowRankPlan:
    return LowRankPlan([scheme.matrix(tensor) for tensor in tensors])
