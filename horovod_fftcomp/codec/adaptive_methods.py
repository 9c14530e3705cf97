"""Methods that send some elements, as many as the values decide, and a code for each.

A method chooses from finite values, not all of them 0. It holds options alone; ``chosen_codec``
owns the payload, ``positions`` how places travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from horovod_fftcomp.codec.quantizers import Float32, is_whole, steps_coding
from horovod_fftcomp.codec.sparsifiers import LEAST_THRESHOLD, Threshold, TopK
from horovod_fftcomp.types import Array, Coding, Coefficients, Shape

Self = TypeVar("Self")

_LARGEST = float(np.finfo(np.float32).max)
_LEAST = 2.0**-149  # above 0 in float32
_MOST_QUANTA = 1 << 15  # their codes have 16 bits
_CLIPPINGS = 64  # each clips a value more at least, mostly nearly all that will be


class Choice(NamedTuple):
    """What is sent: bitmap of ``k`` places, the packed codes there, the header's scale."""

    k: int
    bitmap: Array
    codes: Array
    scale: float


class Chooser(Protocol):
    """A frozen dataclass of options."""

    @property
    def bits(self) -> int:
        """How long a code is."""
        ...

    def coding(self, scale: float) -> Coding:
        """Return how values are written in a payload of this scale."""
        ...

    def choose(
        self, coeffs: Coefficients, shape: Shape, key: int, kernels: ModuleType, keep: bool
    ) -> Choice:
        """Choose of ``coeffs``; with ``keep`` subtract from the array what the codes stand for.

        ``key``: 64 bits that random choices follow from.
        """
        ...

    def expected_count(self, shape: Shape) -> int:
        """Return how many elements of a tensor to expect; a forecast of sizes, not a promise."""
        ...

    def at_loss_scale(self, scale: float) -> Chooser:
        """Return the method for gradients that ``scale`` has multiplied."""
        ...


def _float_of(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


class _ScaleFree:
    """What methods have in common whose options have no unit."""

    def at_loss_scale(self: Self, scale: float) -> Self:
        """Return the method itself."""
        del scale
        return self


@dataclass(frozen=True)
class Strom:
    """Send ``threshold`` with the sign of each value that has at least this magnitude.

    With more than one of ``quanta`` as many thresholds as the value holds, so many at most. The
    residual is what is left: of one quantum it has no bound. Source: Strom, Interspeech 2015.
    """

    spec_name = "Strom"
    threshold: float
    quanta: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", Threshold(self.threshold).value)
        if not is_whole(self.quanta) or not 1 <= self.quanta <= _MOST_QUANTA:
            raise ValueError(
                f"quanta must be a whole number from 1 to {_MOST_QUANTA}, got {self.quanta!r}"
            )

    @property
    def bits(self) -> int:
        """A sign, and the quanta."""
        return self.coding(0.0).bits

    def coding(self, scale: float) -> Coding:
        """Return the coding; ``scale``: the largest magnitude sent, a multiple of the threshold."""
        largest = min(self.quanta, math.floor(scale / self.threshold + 0.5))
        return steps_coding(self.threshold, self.quanta, max(largest, 1))

    def choose(
        self, coeffs: Coefficients, shape: Shape, key: int, kernels: ModuleType, keep: bool
    ) -> Choice:
        """Choose what reaches the threshold; see ``Chooser``."""
        del shape, key
        below = int(np.float32(self.threshold).view(np.uint32)) - 1
        scale = self.scale(_float_of(coeffs.peak))
        k = kernels.count_above(coeffs.array, below)
        chosen = coeffs._replace(key=below, ties=0)
        bitmap, codes = kernels.select_quantize_pack(chosen, 1, self.coding(scale), keep)
        return Choice(k, bitmap, codes, scale)

    def scale(self, peak: float) -> float:
        """Return the header's scale for values of at most ``peak``."""
        quanta = min(self.quanta, math.floor(peak / self.threshold))
        return float(np.float32(quanta) * np.float32(self.threshold))

    def expected_count(self, shape: Shape) -> int:
        """Return one in a thousand; see ``Chooser``."""
        return TopK(0.001).count(math.prod(shape))

    def at_loss_scale(self, scale: float) -> Strom:
        """Return the method with a threshold in the units of these gradients."""
        return replace(self, threshold=Threshold(self.threshold).scaled(scale).value)


@dataclass(frozen=True)
class AdaComp(_ScaleFree):
    """Send the sign of what one more gradient like this would make its bin's largest.

    Of G, gradient plus residual, and H = G + gradient, element j is sent if |H_j| >= max |G| over
    its bin of ``bin`` elements; as the sign of G_j (that of 0 is +1) times the mean over bins of
    max |G|. ``bin`` None: 50 for tensors of more than two dimensions, else 500. Source: Chen et
    al., AAAI 2018.
    """

    spec_name = "AdaComp"
    bin: int | None = None
    bits = 1

    def __post_init__(self) -> None:
        if self.bin is not None and not (is_whole(self.bin) and self.bin >= 1):
            raise ValueError(f"bin must be a whole number from 1 up or None, got {self.bin!r}")

    def length(self, shape: Shape) -> int:
        """Return how many elements of a tensor make up a bin."""
        return self.bin or (50 if len(shape) > 2 else 500)

    def coding(self, scale: float) -> Coding:
        """Return the coding of plus or minus ``scale``."""
        return steps_coding(scale, 1, 1)

    def choose(
        self, coeffs: Coefficients, shape: Shape, key: int, kernels: ModuleType, keep: bool
    ) -> Choice:
        """Choose in each bin; see ``Chooser``."""
        del key
        total = coeffs.array
        grad = total if coeffs.grad is None else coeffs.grad
        bitmap, maxima = kernels.bin_winners(total, grad, self.length(shape))
        scale = self.scale(maxima)
        k, codes = kernels.take_chosen(total, bitmap, 0.0, self.coding(scale), keep)
        return Choice(k, bitmap, codes, scale)

    def scale(self, maxima: Array) -> float:
        """Return what all are sent as, given the maxima of bins, float32."""
        return max(float(np.float32(maxima.mean(dtype=np.float64))), _LEAST)

    def expected_count(self, shape: Shape) -> int:
        """Return six of each bin, as of normal gradients; see ``Chooser``."""
        numel = math.prod(shape)
        return min(numel, 6 * -(-numel // self.length(shape)))


@dataclass(frozen=True)
class Wangni(_ScaleFree):
    """Send g_j / p_j with probability p_j = min(lambda |g_j|, 1), float32 (Wangni et al. 2018).

    lambda is such that ``density`` of the elements are sent in the mean; fewer where fewer are not
    0, more where a value would be beyond float32. Unbiased.
    """

    spec_name = "Wangni"
    density: float
    bits = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", TopK(self.density).density)

    def coding(self, scale: float) -> Coding:
        """Return the coding of any values of at most ``scale``."""
        return Float32().coding(scale)

    def limit(self, n: int, sums_below: Callable[[float], tuple[int, Array]]) -> float:
        """Return 1 / lambda, float32, at least 2^-126: what is as large is sent for certain.

        Clips what that makes certain and rescales the rest until nothing more is clipped, 64 times
        at most. ``sums_below``: that of the kernels for ``n`` given values.
        """
        wanted, limit, clipped = self.density * n, math.inf, -1
        for _ in range(_CLIPPINGS):
            above, sums = sums_below(limit)
            if above == clipped or above >= wanted:
                break
            clipped = above
            lower = float(sums.sum()) / (wanted - above)
            limit = float(np.float32(min(max(lower, LEAST_THRESHOLD), limit, _LARGEST)))
        return limit

    def choose(
        self, coeffs: Coefficients, shape: Shape, key: int, kernels: ModuleType, keep: bool
    ) -> Choice:
        """Draw; see ``Chooser``."""
        del shape
        limit = self.limit(coeffs.array.size, partial(kernels.sums_below, coeffs.array))
        bitmap = kernels.draw_chosen(coeffs.array, limit, key)
        scale = max(limit, _float_of(coeffs.peak))
        k, codes = kernels.take_chosen(coeffs.array, bitmap, limit, self.coding(scale), keep)
        return Choice(k, bitmap, codes, scale)

    def expected_count(self, shape: Shape) -> int:
        """Return the share that ``density`` is; see ``Chooser``."""
        return TopK(self.density).count(math.prod(shape))
