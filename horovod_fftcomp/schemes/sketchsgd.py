"""SketchedSGD: heavy hitters of a summed count sketch (Ivkin et al., NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.errors import check_whole
from horovod_fftcomp.kernels.ops import Flags
from horovod_fftcomp.kernels.plans import BucketPlan, split
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round
from horovod_fftcomp.schemes.gtopk import largest
from horovod_fftcomp.schemes.meter import Meter
from horovod_fftcomp.schemes.momentum import MomentumScheme
from horovod_fftcomp.schemes.state import bucket_plan, new_state
from horovod_fftcomp.types import Array, Arrays, OldState, Tensor, Tensors
from horovod_fftcomp.wire import counter_rng


class _Plan(NamedTuple):
    """Sizes of a tensor's sketch and candidates; it is sent dense if ``columns`` is 0."""

    numel: int
    k: int
    columns: int  # of the sketch
    candidates: int  # number of elements whose values are summed exactly

    def first_numel(self, rows: int) -> int:
        """Return the number of elements in the first round."""
        return rows * self.columns or self.numel

    @property
    def second_numel(self) -> int:
        """Number of elements in the second round, which is never empty."""
        return max(1, self.candidates)

    def sketch(self, values: Array | None, hashes: Array) -> Array | None:
        """Return what a tensor sends first: NaN if it is not finite; None, for zeros, if frozen."""
        if values is None:
            return None
        kernels = cpu_kernels()
        peak = kernels.max_abs_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return np.full(self.first_numel(len(hashes)), np.nan, np.float32)
        if not self.columns:
            return values
        return kernels.sketch(values, hashes, self.columns, peak).reshape(-1)

    def find(self, table: Array, hashes: Array) -> Array | None:
        """Return the places of the candidates, ascending; None if the sum is not finite."""
        kernels = cpu_kernels()
        if kernels.max_abs_bits(table) > LARGEST_FINITE_BITS:
            return None
        if not self.columns:
            return np.empty(0, np.int64)
        by_row = table.reshape(len(hashes), self.columns)
        return largest(kernels.estimate(by_row, hashes, self.numel), self.candidates)

    def take(self, values: Array | None, places: Array | None) -> Array | None:
        """Return what a tensor sends second: the candidates' values, None for zeros."""
        if self.columns and places is None:
            return np.full(self.candidates, np.nan, np.float32)
        return None if values is None or not self.columns else values[places]


@dataclass(frozen=True)
class SketchSgd(MomentumScheme):
    """Allreduce count sketches, then the values of the heavy hitters they find; keep the k largest.

    A sketch has ``rows`` rows of ``columns`` * k columns. In each row a hash assigns every element
    to a column and a sign, and a column holds the signed sum of its elements; the median over rows
    estimates an element. Sketches are linear, so all ranks find the same ``candidates`` * k largest
    elements of the sum, whose values are then summed exactly. ``seed`` draws new hashes in each
    step. ``correction``: as DGC's; the optimizer has no momentum. A tensor that sketch and values
    would not make smaller is sent dense.
    """

    spec_name = "SketchSgd"
    density: float
    rows: int = 5
    columns: int = 10
    candidates: int = 4
    seed: int = 0
    rounds = ("allreduce", "allreduce")

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", TopK(self.density).density)
        if type(self.rows) is not int or self.rows not in (1, 3, 5, 7, 9):
            raise ValueError(f"rows must be 1, 3, 5, 7 or 9 (odd, for a median), got {self.rows!r}")
        for name in ("columns", "candidates"):
            check_whole(name, getattr(self, name), 1, 64)
        counter_rng.check_seed(self.seed)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        ops, meter = context.ops, Meter(context, tensors)
        joined, velocities, _ = self.correction.accumulated(tensors, grads, state, context)
        shares = zip(grads, split(joined, bucket_plan(tensors).offsets), strict=True)
        whole = [None if grad is None else share for grad, share in shares]
        meter.before(grads, whole)

        plans = [self._plan(tensor) for tensor in tensors]
        hashes = [self._hashes(tensor, context) for tensor in tensors]
        firsts = BucketPlan([plan.first_numel(self.rows) for plan in plans])
        sent = [p.sketch(w, drawn) for p, w, drawn in zip(plans, whole, hashes, strict=True)]
        received = yield Round("allreduce", ops.join(sent, firsts.numels))
        tables = split(received, firsts.offsets)

        seconds = BucketPlan([plan.second_numel for plan in plans])
        places = [p.find(t, drawn) for p, t, drawn in zip(plans, tables, hashes, strict=True)]
        sent = [p.take(w, found) for p, w, found in zip(plans, whole, places, strict=True)]
        received = yield Round("allreduce", ops.join(sent, seconds.numels))
        values = split(received, seconds.offsets)

        sums, finite = [], True
        to_clear = zip(whole, velocities if self.correction.masking else whole, strict=True)
        for plan, table, found, reduced, kept in zip(
            plans, tables, places, values, to_clear, strict=True
        ):
            if found is None or not ops.flags_of(reduced).finite:
                finite = False
                sums.append(np.full(plan.numel, np.nan, np.float32))
            else:
                sums.append(_settled(plan, table, found, reduced, kept))
        left = [array if plan.columns else None for plan, array in zip(plans, whole, strict=True)]
        meter.after(left)
        new = new_state(tensors, grads, state, {"velocity": velocities, "residual": left})
        return Outcome(sums, new, Flags(finite), meter.measured())

    def _plan(self, tensor: Tensor) -> _Plan:
        """Return the sizes with which a tensor is sent."""
        n = tensor.numel
        k = TopK(self.density).count(n)
        columns, candidates = self.columns * k, min(n, self.candidates * k)
        if self.rows * columns + candidates >= n:
            return _Plan(n, n, 0, 0)
        return _Plan(n, k, columns, candidates)

    def _hashes(self, tensor: Tensor, context: Context) -> Array:
        """Return (multiplier, addend) of the hash of each row, uint64 ``[rows, 2]``."""
        drawn = [
            counter_rng.draw(self.seed, context.step, tensor.name, place)
            for place in range(2 * self.rows)
        ]
        return np.array(drawn, np.uint64).reshape(self.rows, 2)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        plan = self._plan(tensor)
        return 4 * (plan.first_numel(self.rows) + plan.second_numel)


def _settled(plan: _Plan, table: Array, places: Array, reduced: Array, kept: Arrays) -> Array:
    """Return a tensor's sum, and clear the sent elements in ``kept``."""
    if not plan.columns:
        return table
    best = largest(reduced, plan.k)
    total = cpu_kernels().empty(plan.numel)
    total.fill(0)
    total[places[best]] = reduced[best]
    for array in kept:
        if array is not None:
            array[places[best]] = 0
    return total
