"""SketchedSGD: heavy hitters of a summed count sketch (Ivkin et al., NeurIPS 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.kernels.ops import Flags, energy_of
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
    measured_on_host,
)
from horovod_fftcomp.schemes.gtopk import largest
from horovod_fftcomp.schemes.momentum import MomentumScheme
from horovod_fftcomp.types import Array
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


@dataclass
class _TensorExchange:
    """State of one tensor during an exchange."""

    tensor: Tensor
    plan: _Plan
    grad: Array | None
    whole: Array | None  # residual plus velocity; in the end the new residual
    velocity: Array | None
    finite: bool
    places: Array | None = None  # of the candidates, ascending
    energy: Energy | None = None


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
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 64:
                raise ValueError(f"{name} must be a whole number from 1 to 64, got {value!r}")
        counter_rng.check_seed(self.seed)

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        kernels = load_backend("cpu")
        plans = [self._plan(tensor) for tensor in tensors]
        ends = np.cumsum([plan.first_numel(self.rows) for plan in plans])
        message = kernels.empty(int(ends[-1]))
        parts = [
            self._begin(tensor, grad, plan, state, context, share)
            for tensor, grad, plan, share in zip(
                tensors, grads, plans, np.split(message, ends[:-1]), strict=True
            )
        ]
        first = np.split((yield Round("allreduce", message)), ends[:-1])
        ends = np.cumsum([plan.second_numel for plan in plans])
        message = kernels.empty(int(ends[-1]))
        for part, reduced, share in zip(parts, first, np.split(message, ends[:-1]), strict=True):
            self._look_up(part, reduced, context, share)
        second = np.split((yield Round("allreduce", message)), ends[:-1])
        sums, finite = [], True
        for part, table, values in zip(parts, first, second, strict=True):
            reduced = values if part.plan.columns else table
            good = all(kernels.max_abs_bits(x) <= LARGEST_FINITE_BITS for x in (table, values))
            sums.append(self._settle(part, reduced, good, context))
            finite = finite and good
        energies = {part.tensor.name: part.energy for part in parts if part.energy is not None}
        new_state = self._new_state(parts, state)
        return Outcome(sums, new_state, Flags(finite), measured_on_host(energies))

    def _plan(self, tensor: Tensor) -> _Plan:
        """Return the sizes with which a tensor is sent."""
        n = math.prod(tensor.shape)
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

    def _begin(
        self,
        tensor: Tensor,
        grad: Array | None,
        plan: _Plan,
        state: OldState,
        context: Context,
        share: Array,
    ) -> _TensorExchange:
        """Write a tensor's slice of the first message into ``share``."""
        if grad is None:
            share.fill(0)
            return _TensorExchange(tensor, plan, None, None, None, True)
        coeffs, velocity = self.correction.accumulate(grad, state, tensor, 0, context)
        finite = coeffs.peak <= LARGEST_FINITE_BITS
        if not finite:
            share.fill(np.nan)
        elif plan.columns:
            hashes = self._hashes(tensor, context)
            sketch = load_backend("cpu").sketch(coeffs.array, hashes, plan.columns, coeffs.peak)
            share[:] = sketch.reshape(-1)
        else:
            share[:] = coeffs.array
        return _TensorExchange(tensor, plan, grad, coeffs.array, velocity, finite)

    def _look_up(self, part: _TensorExchange, table: Array, context: Context, share: Array) -> None:
        """Find the candidates, and write a tensor's slice of the second message into ``share``."""
        kernels, plan = load_backend("cpu"), part.plan
        share.fill(0)
        if not plan.columns:
            return
        if not part.finite or kernels.max_abs_bits(table) > LARGEST_FINITE_BITS:
            share.fill(np.nan)
            return
        estimates = kernels.estimate(
            table.reshape(self.rows, plan.columns), self._hashes(part.tensor, context), plan.numel
        )
        part.places = largest(estimates, plan.candidates)
        if part.whole is not None:
            np.take(part.whole, part.places, out=share)

    def _settle(
        self, part: _TensorExchange, reduced: Array, finite: bool, context: Context
    ) -> Array:
        """Return a tensor's sum, and clear the sent elements in residual and velocity."""
        plan = part.plan
        if not finite:
            return np.full(plan.numel, np.nan, np.float32)
        measures = context.step % MEASURE_EVERY == 0 and part.whole is not None
        gradient, wanted = (energy_of(part.grad), energy_of(part.whole)) if measures else (0.0, 0.0)
        if part.places is None:
            total, part.whole = reduced, None
        else:
            best = largest(reduced, plan.k)
            total = load_backend("cpu").empty(plan.numel)
            total.fill(0)
            total[part.places[best]] = reduced[best]
            for kept in (part.whole, part.velocity if self.correction.masking else None):
                if kept is not None:
                    kept[part.places[best]] = 0
        if measures:
            part.energy = Energy(gradient, wanted, energy_of(part.whole))
        return total

    def _new_state(
        self, parts: Sequence[_TensorExchange], state: OldState
    ) -> dict[str, dict[str, Array]]:
        new: dict[str, dict[str, Array]] = {"velocity": {}, "residual": {}}
        for part in parts:
            left = {"velocity": part.velocity, "residual": part.whole}
            for kind, arrays in new.items():
                name = part.tensor.name
                kept = state.get(kind, {}).get(name) if part.grad is None else left[kind]
                if kept is not None:
                    arrays[name] = kept
        return new

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        plan = self._plan(tensor)
        return 4 * (plan.first_numel(self.rows) + plan.second_numel)
