"""signSGD: the signs alone."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_fftcomp.codec.methods.base import CudaMethod
from horovod_fftcomp.codec.methods.scaled_sign import ScaledSign
from horovod_fftcomp.types import Array, Kernels, Shape


@dataclass(frozen=True)
class Sign(ScaledSign):
    """The signs alone, each 1 or -1 (Bernstein et al. 2018, as signSGD).

    The sign of 0 depends on step and rank: see ``SignMethod.key_at``. A tensor of zeros, such as a
    frozen layer's gradient, has scale 0 and decodes to zeros.
    """

    spec_name = "Sign"
    error_feedback = contraction = False
    draws = True
    cuda = CudaMethod("votes")

    def _scale_of(self, sums: Array, n: int) -> float:
        return float(sums.any())

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add the signs; see ``Method``."""
        if scale not in (0.0, 1.0):
            raise ValueError(f"the scale is {scale}, expected 0 or 1")
        super().add(total, shape, body, scale, kernels)
