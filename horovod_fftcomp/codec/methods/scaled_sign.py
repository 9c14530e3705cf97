"""EF-SignSGD: signs times the mean magnitude."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.codec.methods.base import CudaMethod, Encoding
from horovod_fftcomp.codec.methods.signs import SignMethod, add_signs, subtract_signs
from horovod_fftcomp.codec.methods.sums import ordered_sum
from horovod_fftcomp.types import Array, Kernels, Shape


@dataclass(frozen=True)
class ScaledSign(SignMethod):
    """The signs times the mean magnitude (Karimireddy et al. 2019, as EF-SignSGD).

    ``C(q) = ||q||_1 / n * sign(q)``; the sign of 0 is +1.
    """

    spec_name = "ScaledSign"
    error_feedback = contraction = True
    cuda = CudaMethod("magnitude")

    def _scale_of(self, sums: Array, n: int) -> float:
        return float(np.float32((ordered_sum(sums[:, 0]) - ordered_sum(sums[:, 1])) / n))

    def encode(self, values: Array, body: Array, how: Encoding) -> float | None:
        """Encode as signs; see ``Method``."""
        n, (sums, _) = values.size, self._write_signs(values, body, how)
        if not np.isfinite(sums).all():
            return None
        scale = self._scale_of(sums, n)
        if how.keep:
            sides = np.array([[scale, -scale]], np.float32)
            subtract_signs(values, sides, n, bool(how.key))
        return scale

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add the scale times the signs; see ``Method``."""
        sides = np.array([[scale, -scale]], np.float32)
        add_signs(total, body.view(np.uint32), sides, total.size)
