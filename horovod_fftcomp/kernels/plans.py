"""Plans: what is constant for a bucket and computed once, for ops."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from horovod_fftcomp.errors import PayloadError


class BucketPlan:
    """Number of elements of each tensor, ``numels``, and their ``offsets``, with the end."""

    def __init__(self, numels: Sequence[int]) -> None:
        self.numels = tuple(numels)
        self.offsets = _offsets(numels)


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


class LowRankPlan(BucketPlan):
    """Matrices of a bucket.

    ``firsts``, ``seconds``: offsets of the tensors in the first and the second message, with the
    end. ``lefts``: offsets of the left factors, ``[rows, rank]`` each, with the end.
    """

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        super().__init__([matrix.rows * matrix.columns for matrix in matrices])
        self.matrices = tuple(matrices)
        self.firsts = _offsets(matrix.first_numel for matrix in matrices)
        self.seconds = _offsets(matrix.second_numel for matrix in matrices)
        self.lefts = _offsets(matrix.rows * matrix.rank for matrix in matrices)


def _offsets(numels: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(numels, initial=0))


class LeftFactors(NamedTuple):
    """Left factors of a bucket, and which tensors are not finite, as ops keep them."""

    values: Any
    not_finite: Any


def check_size(array: Any, offsets: Sequence[int]) -> None:
    """Raise PayloadError unless a sum that was received has the size of its message."""
    if len(array) != offsets[-1]:
        raise PayloadError(f"{len(array)} values arrived, {offsets[-1]} were expected")


def split(array: Any, offsets: Sequence[int]) -> list[Any]:
    """Return views of the parts of an array between ``offsets``."""
    check_size(array, offsets)
    return [array[begin:end] for begin, end in itertools.pairwise(offsets)]
