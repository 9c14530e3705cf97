"""QSGD: stochastic rounding to evenly spaced levels of a norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from horovod_fftcomp.codec.methods.base import (
    CudaMethod,
    Encoding,
    Method,
    checked_scales,
)
from horovod_fftcomp.codec.methods.levels import add_levels, encode_levels
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.errors import check_choice, check_whole
from horovod_fftcomp.types import Array, Kernels, Shape
from horovod_fftcomp.wire.radix import L2, LARGEST, Levels, count_words

BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class QSGD(Method):
    """Stochastic rounding to zero and ``levels`` levels of either sign (Alistarh et al. 2017).

    ``C(x) = norm * sign(x) * l / s``, s = ``levels``, l = s |x| / norm rounded at random to one of
    its two neighbours such that the mean is x. ``norm``: of each ``bucket`` elements, the L2 norm
    ("l2") or the largest magnitude ("max"). Unbiased.
    """

    spec_name = "QSGD"
    draws = unbiased = True
    levels: int = 7
    bucket: int = 1024
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        check_whole("levels", self.levels, 1, 2047, "; 7 take 4 bits a value")
        check_choice("bucket", self.bucket, BUCKETS)
        check_choice("norm", self.norm, ("max", "l2"))

    @property
    def is_noisy(self) -> bool:
        """Whether there is one level: in buckets of 64 the loss of a GPT rose by 4 %."""
        return self.levels == 1

    @property
    def contraction(self) -> bool:
        """Whether rounding adds less variance than normally distributed gradients have.

        It adds (scale / levels)^2 / 4 at most; here scale^2 is that of a bucket of variance 1.
        """
        square = self.bucket if self.norm == "l2" else 2 * math.log(self.bucket)
        return square < 4 * self.levels**2

    @property
    def cuda(self) -> CudaMethod | None:
        """Description for the CUDA kernels."""
        return CudaMethod("norms" if self.norm == "l2" else "peaks", self.grid())

    def grid(self) -> Levels:
        """Return the quantization grid: ``levels`` on either side of 0."""
        norm = L2 if self.norm == "l2" else LARGEST
        return Levels(2 * self.levels, 2 * self.levels + 1, norm, self.bucket)

    def _n_buckets(self, shape: Shape) -> int:
        return -(-math.prod(shape) // self.bucket)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body: a float32 for each bucket, then the packed levels."""
        words = count_words(math.prod(shape), 2 * self.levels + 1)
        return 4 * (self._n_buckets(shape) + words)

    def encode(self, values: Array, body: Array, how: Encoding) -> float | None:
        """Encode as norms and levels; see ``Method``."""
        split = 4 * self._n_buckets(how.shape)
        scales, words = body[:split].view(np.float32), body[split:].view(np.uint32)
        peak = encode_levels(values, self.grid(), scales, words, how.key, how.keep)
        if peak > LARGEST_FINITE_BITS:
            return None
        return float(scales.max())

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add norms times levels; see ``Method``."""
        split = 4 * self._n_buckets(shape)
        scales = checked_scales(body[:split].view(np.float32), scale)
        words = body[split:].view(np.uint32)
        add_levels(total, words, scales, self.grid())
