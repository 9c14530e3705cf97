"""DoReFa: stochastic rounding to a grid without zero."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.codec.methods.base import NOT_FINITE, Sent, array_of, float_of
from horovod_fftcomp.codec.methods.levels import OneScale
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, is_whole
from horovod_fftcomp.types import Array, Kernels, Shape
from horovod_fftcomp.wire.radix import GIVEN, Levels


@dataclass(frozen=True)
class DoReFa(OneScale):
    """Stochastic rounding to 2^bits values evenly spaced in [-s, s], s = max|x| (Zhou et al. 2016).

    Unbiased. Zero is not among them: unless the scale is 0 it becomes +-s / (2^bits - 1).
    """

    spec_name = "DoReFa"
    bits: int = 4

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or not 1 <= self.bits <= 12:
            raise ValueError(f"bits must be a whole number from 1 to 12, got {self.bits!r}")

    def grid(self) -> Levels:
        """Return the quantization grid, which does not contain 0."""
        return Levels((1 << self.bits) - 1, 1 << self.bits, GIVEN, 0)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: Kernels, keep: bool
    ) -> Sent:
        """Encode as indices of grid points; see ``Method``."""
        del shape
        peak = kernels.max_abs_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return NOT_FINITE
        scale = float_of(peak)
        kernels.encode_levels(values, self.grid(), array_of(scale), body.view(np.uint32), key, keep)
        return Sent(True, scale)
