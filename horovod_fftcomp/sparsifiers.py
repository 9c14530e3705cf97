"""Which coefficients are sent: so far, as many of the largest as is known before the data."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass


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
