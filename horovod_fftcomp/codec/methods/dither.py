"""Dithered levels, entropy-coded: as many as fit into a size that is known before the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.codec.methods.base import CudaMethod, Encoding, Method
from horovod_fftcomp.errors import check_choice
from horovod_fftcomp.types import Array, Kernels, Shape
from horovod_fftcomp.wire import coded_levels as coded
from horovod_fftcomp.wire import counter_rng
from horovod_fftcomp.wire.coded_levels import CodedLevels
from horovod_fftcomp.wire.counter_rng import RngKey

BUCKETS = (128, 256, 512, 1024)


@dataclass(frozen=True)
class Dither(Method):
    """Subtractive dither: a number that all ranks know is added before rounding, and taken off.

    ``C(x) = (round(x / d + u) - u) d``, with u uniform in [-1/2, 1/2) and d a share of the scale of
    a ``bucket`` of elements. Unbiased; the error is uniform in [-d/2, d/2), whatever x is (Roberts
    1962; for gradients: Abdi and Fekri 2019). Ranks have dithers that are evenly spaced, so that
    errors cancel where d is large (Suresh et al. 2022). Levels are entropy-coded given u: the size
    is that of normally distributed values in 32 / ``ratio`` bits each, and each chunk of 8192
    values has as many levels as fit, see ``wire.coded_levels``.
    """

    spec_name = "Dither"
    draws = unbiased = True
    ratio: int = 20
    bucket: int = 256

    def __post_init__(self) -> None:
        check_choice("ratio", self.ratio, coded.RATIOS)
        check_choice("bucket", self.bucket, BUCKETS)

    def key_at(self, seed: int, rng_key: RngKey) -> int:
        """Return a key of 32 bits that all ranks have, and below it an offset of each rank's own.

        The offsets are evenly spaced.
        """
        shared = counter_rng.draw(seed, rng_key.step, rng_key.name, 0)
        return shared >> 32 << 32 | counter_rng.spaced(rng_key.rank)

    @property
    def is_noisy(self) -> bool:
        """Whether ``ratio`` is above 60: at 80 the loss of a GPT rose by 4 %."""
        return self.ratio > 60

    @property
    def cuda(self) -> CudaMethod:
        """Description for the CUDA kernels, which read the rest from the form."""
        return CudaMethod("coded")

    def form(self) -> CodedLevels:
        """Return the format of the body."""
        return CodedLevels(self.ratio, self.bucket)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body: a key, and chunks of fixed sizes."""
        return 4 * self.form().words_before(math.prod(shape))

    def encode(self, values: Array, body: Array, how: Encoding) -> float | None:
        """Encode as chunks; see ``Method``."""
        chunks = self.form(), body.view(np.uint32)
        scale: float = how.kernels.encode_coded(values, *chunks, how.key, how.keep)
        return scale if math.isfinite(scale) else None

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add decoded chunks; see ``Method``."""
        kernels.add_coded(total, self.form(), body.view(np.uint32), scale)
