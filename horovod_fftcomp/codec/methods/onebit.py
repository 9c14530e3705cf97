"""1-bit SGD: signs, and the mean of the values of either sign."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from horovod_fftcomp.codec.methods.base import CudaMethod, Encoding, checked_scales
from horovod_fftcomp.codec.methods.signs import SignMethod, add_signs, subtract_signs
from horovod_fftcomp.codec.methods.sums import sums_of_rows
from horovod_fftcomp.errors import check_choice
from horovod_fftcomp.types import Array, Kernels, Shape


@dataclass(frozen=True)
class OneBit(SignMethod):
    """The sign of each value, and the means of the values of either sign (Seide et al. 2014).

    ``group``: the elements that share means, "tensor" or "column". A column is a slice along the
    first dimension: the weights of one output.
    """

    spec_name = "OneBit"
    error_feedback = contraction = True
    cuda = CudaMethod("means")
    group: Literal["tensor", "column"] = "tensor"

    def __post_init__(self) -> None:
        check_choice("group", self.group, ("tensor", "column"))

    def row_length(self, shape: Shape) -> int:
        """Return the number of elements that share means; see ``SignMethod``."""
        numel = math.prod(shape)
        columns = shape[0] if self.group == "column" and len(shape) > 1 else 1
        return max(1, numel // max(1, columns))

    def rows(self, shape: Shape) -> int:
        """Return the number of rows, each with means of its own."""
        return math.prod(shape) // self.row_length(shape)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body: two means of each row, then the packed signs."""
        return 8 * self.rows(shape) + super().body_nbytes(shape)

    def encode(self, values: Array, body: Array, how: Encoding) -> float | None:
        """Encode as means and signs; see ``Method``."""
        length, rows = self.row_length(how.shape), self.rows(how.shape)
        split = 8 * rows
        sums, counts = self._write_signs(values, body[split:], how)
        if not np.isfinite(sums).all():
            return None
        starts = self.pieces(values.size, length)
        row_of = starts[:-1] // length
        below = np.bincount(row_of, counts, rows)
        sides = body[:split].view(np.float32).reshape(rows, 2)
        for side, many in enumerate((length - below, below)):
            total = sums_of_rows(sums[:, side], row_of, rows)
            sides[:, side] = total / np.maximum(many, 1)
        if how.keep:
            subtract_signs(values, sides, length)
        return float(np.abs(sides).max())

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add the mean of each value's sign; see ``Method``."""
        split = 8 * self.rows(shape)
        sides = body[:split].view(np.float32)
        checked_scales(np.abs(sides), scale)
        words, length = body[split:].view(np.uint32), self.row_length(shape)
        add_signs(total, words, sides.reshape(-1, 2), length)
