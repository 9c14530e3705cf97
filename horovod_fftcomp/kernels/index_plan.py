"""Sizes of an exchange at common positions, and which rank selects in which chunk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.types import Array


class ChunkSlices(NamedTuple):
    """Assignment of a bucket's chunks to ranks in one step: one slice of chunks for each rank.

    ``size``: chunks per slice; slices at the end may be shorter, or empty.
    """

    size: int
    step: int
    n_ranks: int

    def chunks_of(self, rank: int, total: int) -> tuple[int, int]:
        """Return (begin, end) of the slice of chunks in which ``rank`` selects."""
        begin = min(total, (rank + self.step) % self.n_ranks * self.size)
        return begin, min(total, begin + self.size)

    def leader_of(self, chunk: int) -> int:
        """Return the rank that selects in ``chunk``."""
        return (chunk // self.size - self.step) % self.n_ranks


@dataclass(frozen=True, eq=False)
class IndexPlan:
    """What is constant of a bucket whose values at common positions are summed.

    ``counts``: positions of each tensor. ``beta``: of the low-pass filter. ``unbiased``: whether
    values are scaled by n/k. ``keeps``: whether there are residuals. ``chunk``: elements of a
    chunk, one of which is selected; 0 where positions are selected otherwise. ``bits``: of an
    offset in a chunk. ``row_begins``: int64, number of sums in a sketch before each tensor, and of
    all; [0] if there is no sketch.
    """

    names: tuple[str, ...]
    numels: list[int]
    counts: list[int]
    n_ranks: int
    beta: float
    unbiased: bool
    keeps: bool
    chunk: int
    bits: int
    row_begins: Array

    @cached_property
    def starts(self) -> Array:
        """Number of elements before each tensor, and of all, int64."""
        return np.cumsum([0, *self.numels], dtype=np.int64)

    @cached_property
    def begins(self) -> Array:
        """Number of positions before each tensor, and of all, int64: offsets in a message."""
        return np.cumsum([0, *self.counts], dtype=np.int64)

    @cached_property
    def total(self) -> int:
        """Number of positions: values of a message, and chunks if there are chunks."""
        return sum(self.counts)

    @cached_property
    def gains(self) -> Array:
        """Factors of the values of each tensor, float32; empty if there are none."""
        pairs = zip(self.numels, self.counts, strict=True)
        return np.array([n / max(1, k) for n, k in pairs if self.unbiased], np.float32)

    def slices(self, step: int) -> ChunkSlices:
        """Return the assignment of chunks to ranks in a step."""
        return ChunkSlices(max(1, -(-self.total // self.n_ranks)), step, self.n_ranks)

    def offsets_nbytes(self, n_chunks: int) -> int:
        """Return the bytes of packed offsets: whole 4-byte words, at least one."""
        return max(4, -(-n_chunks * self.bits // 32) * 4)
