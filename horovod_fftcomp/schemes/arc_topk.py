"""ARC-Top-K: common rows, selected by a sketch of the sum of all ranks, in two allreduces.

Source: Chen et al. 2025 (arXiv 2510.26709).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.schemes import Context, Round
from horovod_fftcomp.schemes.clt_selection import Selected
from horovod_fftcomp.wire import counter_rng


@dataclass(frozen=True)
class LargestRows(TopK):
    """Selector of the rows of ``block`` elements that a sketch finds largest in the sum of ranks.

    The sketch of a row is the sum of its elements, each times a random sign. The elements after the
    last whole row are always sent, and so is all of a tensor if sketch and rows would not be
    smaller. ``seed`` draws new signs in each step.
    """

    spec_name = "LargestRows"
    collective = "allreduce"
    block: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.block) is not int or self.block not in (1 << i for i in range(3, 13)):
            raise ValueError(f"block must be a power of two from 8 to 4096, got {self.block!r}")
        counter_rng.check_seed(self.seed)

    def rows(self, n: int) -> int:
        """Return the number of rows of ``n`` elements; 0 if all of them are sent instead."""
        rows = n // self.block
        return rows if rows + self.block * super().count(rows) < rows * self.block else 0

    def count(self, n: int) -> int:
        """Return how many of ``n`` elements are selected."""
        rows = self.rows(n)
        return self.block * super().count(rows) + n % self.block if rows else n

    def sketch_numel(self, n: int) -> int:
        """Return the number of sums in the sketch of ``n`` elements, which is never empty."""
        return max(1, self.rows(n))


def sum_sketches(
    selector: LargestRows, bucket: Any, halves: tuple[int, float] | None, context: Context
) -> Generator[Round, Any, Selected]:
    """Allreduce the sketches of all rows, and select the rows that are largest in the sum.

    ``halves``: as for ``Ops.take``. All rows and ranks have the same signs in a step. Under a loss
    scale, which grows until values overflow, sums are means, which overflow no earlier.
    """
    ops, drawn = context.ops, counter_rng.uniform(selector.seed, context.step, "", selector.block)
    weight = np.float32(1 if context.loss_scale == 1 else 1 / selector.block)
    sketch = ops.sketch(bucket, np.copysign(weight, drawn))
    if halves is not None:  # NaN of values alone tells a loss scaler of overflows
        sketch = ops.to_half(sketch, LARGEST_FINITE_BITS, halves[1])
    summed = yield Round("allreduce", sketch)
    summed = summed if halves is None else ops.from_half(summed)
    if len(summed) != (expected := len(sketch)):
        raise PayloadError(f"a sketch of {len(summed)} sums arrived, {expected} were expected")
    return Selected(ops.largest_rows(bucket, summed, selector.block))
