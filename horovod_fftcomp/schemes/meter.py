"""Measurement of energies, in every ``MEASURE_EVERY``-th step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from horovod_fftcomp.kernels.ops import Deferred
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Energy, Measured, Tensor


class Meter:
    """Energies of one exchange, measured by ``context.ops``; see ``Energy``.

    In steps that measure, ``on``: call ``before``, then ``after``. In others they do nothing.
    """

    def __init__(self, context: Context) -> None:
        self.on = context.step % MEASURE_EVERY == 0
        self._ops = context.ops
        self._names: list[str | None] = []
        self._squares: list[Deferred] = []

    def before(self, tensors: Sequence[Tensor], grads: Sequence[Any], whole: Sequence[Any]) -> None:
        """Measure gradients, and gradient plus residual; a tensor without the latter is omitted."""
        if self.on:
            pairs = zip(tensors, whole, strict=True)
            self._names = [None if array is None else tensor.name for tensor, array in pairs]
            self._squares = [self._ops.squares(grads), self._ops.squares(whole)]

    def after(self, left: Sequence[Any]) -> None:
        """Measure what is unsent; None stands for nothing."""
        if self.on:
            self._squares.append(self._ops.squares(left))

    def measured(self) -> Callable[[], Measured] | None:
        """Return the field ``measured`` of ``Outcome``."""
        return partial(_measured, self._names, self._squares) if self.on else None


def _measured(names: Sequence[str | None], squares: Sequence[Deferred]) -> Measured:
    columns = zip(names, *(sums() for sums in squares), strict=True)
    return Measured({name: Energy(*sums) for name, *sums in columns if name is not None})
