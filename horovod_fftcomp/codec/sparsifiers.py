"""Sparsifiers: the selection of the coefficients that are sent."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.errors import check_share, is_number
from horovod_fftcomp.wire import counter_rng

LEAST_THRESHOLD = 2.0**-126  # the smallest normal float32; below it precision is lost
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _ByDensity:
    """Base class of sparsifiers that send the fraction ``density`` of a tensor's coefficients."""

    density: float

    def __post_init__(self) -> None:
        check_share("density", self.density, "; 0.01 keeps 1 % of the coefficients")
        # 1, 1.0 and np.float64(1) are one density: their fingerprints, by repr, have to be equal.
        object.__setattr__(self, "density", float(self.density))

    def count(self, n: int) -> int:
        """Return k for ``n`` coefficients. It does not depend on values, nor do payload sizes."""
        return 0 if n == 0 else min(n, max(1, math.floor(self.density * n + 1e-9)))


@dataclass(frozen=True)
class TopK(_ByDensity):
    """Keep the fraction ``density`` of a tensor's coefficients that is largest in magnitude.

    k = max(1, floor(density * n)); of equal magnitudes the lower index wins, so all backends
    agree. Source: Aji and Heafield 2017; for spectra, Wang et al., HPDC 2020.
    """

    spec_name = "TopK"


@dataclass(frozen=True)
class Threshold:
    """Keep the coefficients of magnitude ``value`` or more; their number depends on the data.

    Source: Dutta et al., AAAI 2020, and Sahu et al., NeurIPS 2021, as hard threshold.
    """

    spec_name = "Threshold"
    value: float

    def __post_init__(self) -> None:
        if not is_number(self.value) or not LEAST_THRESHOLD <= self.value <= _LARGEST:
            raise ValueError(
                f"threshold must be a number from {LEAST_THRESHOLD:.3g} to {_LARGEST:.3g}, got "
                f"{self.value!r}; it has the units of a gradient"
            )
        # Rounded to float32, the type of the comparison: all ranks compare with the same number.
        object.__setattr__(self, "value", float(np.float32(self.value)))

    def scaled(self, scale: float) -> Threshold:
        """Return the threshold times ``scale``, clipped to the range of thresholds."""
        return Threshold(min(max(self.value * scale, LEAST_THRESHOLD), _LARGEST))


def formula_threshold(numel: int, density: float = 0.001) -> float:
    """Return the threshold 1 / (2 sqrt(k)), k = ``density`` times ``numel``.

    ``numel``: number of compressed elements in the model. Source: the published runs of Sahu et
    al., NeurIPS 2021. It is tuned to gradients of the size that batch norm and cross entropy
    produce; ``hard_threshold`` can calibrate a threshold instead.

    >>> round(formula_threshold(11_173_962), 5)
    0.00473
    """
    return 1 / (2 * math.sqrt(TopK(density).count(numel)))


@dataclass(frozen=True)
class _RandomByDensity(_ByDensity, abc.ABC):
    """Base class of random sparsifiers: all ranks draw the same positions, new ones each step."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        counter_rng.check_seed(self.seed)

    def _drawn(self, names: Sequence[str], step: int, index: int) -> list[int]:
        """Return a 64-bit random number for each tensor."""
        keys = counter_rng.named((self.seed, name) for name in names)
        return counter_rng.draws(keys, step, index).tolist()

    @abc.abstractmethod
    def progressions(
        self, numels: Sequence[int], step: int, names: Sequence[str]
    ) -> list[tuple[int, int]]:
        """Return (a, c) for each tensor: its positions are (a j + c) mod n for j < k."""


@dataclass(frozen=True)
class RandomBlock(_RandomByDensity):
    """Keep k consecutive elements from a random start, wrapping around at the end.

    Without the wrap-around the elements at both ends would be sent less often. Source: Vogels et
    al., NeurIPS 2019, as "random block".
    """

    spec_name = "RandomBlock"

    def progressions(
        self, numels: Sequence[int], step: int, names: Sequence[str]
    ) -> list[tuple[int, int]]:
        """Return (1, c) for each tensor, c uniform; see the base class."""
        drawn = zip(self._drawn(names, step, 0), numels, strict=True)
        return [(1, counter_rng.below(number, n)) for number, n in drawn]


@dataclass(frozen=True)
class RandomK(_RandomByDensity):
    """Keep k random elements, each with probability k/n.

    Their positions are (a j + c) mod n for j < k, a coprime to n, so all differ. Source: Stich et
    al., NeurIPS 2018.
    """

    spec_name = "RandomK"

    def progressions(
        self, numels: Sequence[int], step: int, names: Sequence[str]
    ) -> list[tuple[int, int]]:
        """Return (a, c) for each tensor, a coprime to n; see the base class."""
        drawn = (self._drawn(names, step, index) for index in (0, 1))
        return [_coprime(n, *numbers) for n, *numbers in zip(numels, *drawn, strict=True)]


def _coprime(n: int, first: int, factor: int) -> tuple[int, int]:
    """Return (a, c) below n, a coprime to n, from 64-bit numbers; (1, 0) for n of 1 or 0."""
    if n <= 1:
        return 1, 0
    a = 1 + counter_rng.below(factor, n - 1)
    while math.gcd(a, n) != 1:
        a = a % n + 1
    return a, counter_rng.below(first, n)
