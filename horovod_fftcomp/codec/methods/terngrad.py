"""TernGrad: stochastic rounding to -s, 0 and s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from horovod_fftcomp.codec.methods.levels import OneScale
from horovod_fftcomp.codec.methods.sums import moments, ordered_sum
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, float_of
from horovod_fftcomp.errors import check_choice
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.radix import GIVEN, Levels

_ROUNDING = 1e-12  # of the mean square: a smaller variance may be a rounding error of float64


@dataclass(frozen=True)
class TernGrad(OneScale):
    """Stochastic rounding to -s, 0 and s, s the largest magnitude after clipping (Wen et al. 2017).

    Values are first clipped to ``clip`` standard deviations of the tensor around 0; 0: never.
    ``C(x) = s sign(x) b``, b = 1 with probability |x| / s: unbiased for the clipped values.
    ``packing`` "base3": 20 values in 32 bits; "bits": 16. No contraction: the error of a sent value
    exceeds the value.
    """

    spec_name = "TernGrad"
    clip: float = 2.5
    packing: Literal["base3", "bits"] = "base3"

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip must be 0 (never) or more, got {self.clip!r}; 2.5 is usual")
        object.__setattr__(self, "clip", float(self.clip))
        check_choice("packing", self.packing, ("base3", "bits"))

    def grid(self) -> Levels:
        """Return the quantization grid: -1, 0 and 1 times the scale."""
        return Levels(2, 3 if self.packing == "base3" else 4, GIVEN, 0)

    def scale_of(self, values: Array) -> tuple[int, float]:
        """Return the largest magnitude after clipping; see ``OneScale``."""
        if not self.clip:
            return super().scale_of(values)
        peak, sums, squares = moments(values)
        scale = float_of(peak)
        if peak <= LARGEST_FINITE_BITS:
            mean, square = ordered_sum(sums) / values.size, ordered_sum(squares) / values.size
            variance = square - mean * mean
            deviation = math.sqrt(variance) if variance > _ROUNDING * square else 0.0
            # Values that are all equal have no deviation and are not clipped.
            if deviation > 0:
                scale = float(np.float32(min(self.clip * deviation, scale))) or scale
        return peak, scale
