"""Which coefficients are sent: their count, known before the data, and their positions."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from types import ModuleType

from horovod_fftcomp.backends import Array

# Complex keys are squares: beyond these exponents of the largest component they would overflow,
# or underflow for coefficients that still matter, so the spectrum is scaled by a power of two.
UNSCALED_EXPONENTS = range(-40, 60)


@dataclass(frozen=True)
class TopK:
    """Keep the ``density`` share of a tensor's coefficients that is largest in magnitude.

    k = max(1, floor(density * n)); of equal magnitudes the lower index wins, so all backends
    agree. Source: Aji and Heafield 2017; for spectra, Wang et al., HPDC 2020.
    """

    density: float

    def __post_init__(self) -> None:
        is_number = isinstance(self.density, numbers.Real) and not isinstance(self.density, bool)
        if not is_number or not 0.0 < self.density <= 1.0:
            raise ValueError(
                f"density must lie in (0, 1], got {self.density!r}; "
                "0.01 keeps 1 % of the coefficients"
            )
        # 1, 1.0 and np.float64(1) are one density: their fingerprints, by repr, have to be equal.
        object.__setattr__(self, "density", float(self.density))

    def count(self, n: int) -> int:
        """Return k for ``n`` coefficients; known before the data, so payload sizes are too."""
        return 0 if n == 0 else min(n, max(1, math.floor(self.density * n + 1e-9)))

    def threshold(
        self, coeffs: Array, bins_per_block: int, exponent: int, kernels: ModuleType
    ) -> tuple[int, int]:
        """Return (key, ties): chosen are keys above it, and the first ``ties`` of those equal.

        ``coeffs``: finite float32 or complex64, 1-D; ``exponent``: its ``key_exponent``.
        """
        k = self.count(coeffs.size)
        if k == coeffs.size:
            return 0, k
        return kernels.kth_key(coeffs, k, bins_per_block, exponent)


def key_exponent(peak: int) -> int:
    """Return the power of two by which complex keys are scaled down; ``peak``: float32 bits."""
    exponent = (peak >> 23) - 127
    return 0 if exponent in UNSCALED_EXPONENTS else min(max(exponent, -126), 126)
