"""Measurement of energies, in every ``MEASURE_EVERY``-th step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod_fftcomp.kernels.ops import Deferred
from horovod_fftcomp.schemes import Context, Energy, Measured, Similarity
from horovod_fftcomp.types import Tensors

Squares = tuple[float, float, float]


class Meter:
    """Energies of one exchange, measured by ``context.ops``; see ``Energy``.

    In steps that measure, ``on``: call ``before``, then ``after``. In others they do nothing.
    """

    def __init__(self, context: Context, tensors: Tensors) -> None:
        self.on, self._ops, self._tensors = context.measures, context.ops, tensors
        self._squares: list[Deferred] = []
        self._is_omitted: list[bool] = []

    def before(self, grads: Sequence[Any], whole: Sequence[Any]) -> None:
        """Measure gradients, and gradient plus residual; a tensor without the latter is omitted."""
        if self.on:
            self._is_omitted = [array is None for array in whole]
            self._squares = [self._ops.squares(grads), self._ops.squares(whole)]

    def after(self, left: Sequence[Any]) -> None:
        """Measure what is unsent; None stands for nothing."""
        if self.on:
            self._squares.append(self._ops.squares(left))

    def measured(self) -> Callable[[], Measured] | None:
        """Return the field ``measured`` of ``Outcome``."""
        if not self.on:
            return None
        squares, is_omitted = self._squares, self._is_omitted

        def of_tensors() -> dict[int, Squares]:
            columns = enumerate(zip(*(sums() for sums in squares), strict=True))
            return {number: sums for number, sums in columns if not is_omitted[number]}

        return measured_by(self._tensors, of_tensors)


def measured_by(
    tensors: Tensors,
    squares: Callable[[], Mapping[int, Squares]] | None,
    similarity: Callable[[], Similarity] | None = None,
) -> Callable[[], Measured] | None:
    """Return the field ``measured`` of ``Outcome``; None if ``squares`` is None.

    ``squares``: returns the numbers of ``Energy`` by a tensor's index in ``tensors``.
    """
    if squares is None:
        return None
    names = [tensor.name for tensor in tensors]

    def wait() -> Measured:
        energies = {names[number]: Energy(*sums) for number, sums in squares().items()}
        return Measured(energies, None if similarity is None else similarity())

    return wait
