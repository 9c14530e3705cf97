"""DoReFa: stochastic rounding to a grid without zero."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_fftcomp.codec.methods.levels import OneScale
from horovod_fftcomp.errors import check_whole
from horovod_fftcomp.wire.radix import GIVEN, Levels


@dataclass(frozen=True)
class DoReFa(OneScale):
    """Stochastic rounding to 2^bits values evenly spaced in [-s, s], s = max|x| (Zhou et al. 2016).

    Unbiased. Zero is not among them: unless the scale is 0 it becomes +-s / (2^bits - 1).
    """

    spec_name = "DoReFa"
    unbiased = True
    bits: int = 4

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, 1, 12)

    def grid(self) -> Levels:
        """Return the quantization grid, which does not contain 0."""
        return Levels((1 << self.bits) - 1, 1 << self.bits, GIVEN, 0)

    @property
    def contraction(self) -> bool:
        """Whether rounding adds less variance than normally distributed gradients have.

        It adds step^2 / 4 at most; here the scale is six standard deviations.
        """
        return 6 < (1 << self.bits) - 1
