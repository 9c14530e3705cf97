"""Adaptive sparsifiers: selection and quantization of elements that the values or the step decide.

They are stages of the sparse codec, without a quantizer beside them. They choose from finite values
that are not all 0, and hold options alone.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, Self

import numpy as np

from horovod_fftcomp.codec.methods.base import Encoding
from horovod_fftcomp.codec.quantizers import Float32, float_of, is_whole, pattern_of, steps_coding
from horovod_fftcomp.codec.sparsifiers import LEAST_THRESHOLD, Threshold, TopK
from horovod_fftcomp.errors import check_whole
from horovod_fftcomp.types import Array, Coding, Coefficients, Shape

_LARGEST = float(np.finfo(np.float32).max)
_LEAST = 2.0**-149  # the smallest float32 above 0
_MOST_QUANTA = 1 << 15  # so that codes have 16 bits at most
_CLIPPINGS = 64  # most iterations; each clips one more value at least, the first ones nearly all


class Selection(NamedTuple):
    """Chosen elements: bitmap of their ``k`` positions, packed codes, the header's scale."""

    k: int
    bitmap: Array
    codes: Array
    scale: float


NOTHING = Selection(0, np.empty(0, np.uint64), np.empty(0, np.uint8), 0.0)  # of zeros


def bitmap_of(positions: Array, n: int) -> Array:
    """Return the bitmap, uint64 ``[ceil(n / 64)]``, with ones at ``positions``."""
    flags = np.zeros(-(-n // 64) * 64, np.uint8)
    flags[positions] = 1
    return np.packbits(flags, bitorder="little").view(np.uint64)


class Adaptive(abc.ABC):
    """Base class of adaptive sparsifiers, which are frozen dataclasses of options.

    ``draws``: whether it uses random numbers, by ``how.key``. ``cuda``: which selection the CUDA
    kernels make; None: with a GPU, too, the host computes it.
    """

    draws: ClassVar[bool] = False
    cuda: ClassVar[str | None] = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.coding(0.0).bits

    @abc.abstractmethod
    def coding(self, scale: float) -> Coding:
        """Return the encoding of the values in a payload of this scale."""

    @abc.abstractmethod
    def choose(self, coeffs: Coefficients, how: Encoding) -> Selection:
        """Choose elements of ``coeffs``; with ``how.keep`` subtract what is sent from its array.

        ``how.kernels.take_chosen`` does so, and packs the codes. Ranks may choose differently.
        """

    def scale(self, peak: float, statistics: Array | Sequence[float]) -> float:
        """Return the header's scale for values whose largest magnitude is ``peak``, above 0.

        ``statistics``: what the selection has computed: maxima of bins, or a limit; else unused.
        """
        return peak

    @abc.abstractmethod
    def expected_count(self, shape: Shape) -> int:
        """Return a forecast of the number of elements sent; payloads may have more or fewer."""

    def scaled(self, scale: float) -> Self:
        """Return the sparsifier for gradients multiplied by the loss scale ``scale``."""
        return self


@dataclass(frozen=True)
class Strom(Adaptive):
    """Send ``threshold``, with the value's sign, for each value of at least this magnitude.

    With ``quanta`` above 1, the largest multiple of the threshold that does not exceed the value,
    ``quanta`` times at most. The difference is the residual; with one quantum it has no bound.
    Source: Strom, Interspeech 2015.
    """

    spec_name = "Strom"
    cuda = "above"
    threshold: float
    quanta: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", Threshold(self.threshold).value)
        check_whole("quanta", self.quanta, 1, _MOST_QUANTA)

    def coding(self, scale: float) -> Coding:
        """Return the encoding; ``scale``: the largest magnitude sent."""
        largest = min(self.quanta, math.floor(scale / self.threshold + 0.5))
        return steps_coding(self.threshold, self.quanta, max(largest, 1))

    def choose(self, coeffs: Coefficients, how: Encoding) -> Selection:
        """Choose the values that reach the threshold; see ``Adaptive``."""
        below = pattern_of(self.threshold) - 1
        scale = self.scale(float_of(coeffs.peak), ())
        k = how.kernels.count_above(coeffs.array, below)
        chosen = coeffs._replace(key=below, ties=0)
        bitmap, codes = how.kernels.select_quantize_pack(chosen, 1, self.coding(scale), how.keep)
        return Selection(k, bitmap, codes, scale)

    def scale(self, peak: float, statistics: Array | Sequence[float]) -> float:
        """Return the largest value that is sent; see ``Adaptive``."""
        quanta = min(self.quanta, math.floor(peak / self.threshold))
        return float(np.float32(quanta) * np.float32(self.threshold))

    def expected_count(self, shape: Shape) -> int:
        """Return one element in a thousand; see ``Adaptive``."""
        return TopK(0.001).count(math.prod(shape))

    def scaled(self, scale: float) -> Strom:
        """Return the sparsifier with its threshold times ``scale``; see ``Adaptive``."""
        return replace(self, threshold=Threshold(self.threshold).scaled(scale).value)


@dataclass(frozen=True)
class AdaComp(Adaptive):
    """Send the signs of each bin's near-maxima, with one scale for the tensor.

    For G = gradient + residual and H = G + gradient, element j is sent if |H_j| >= max |G| over
    its bin of ``bin`` elements, as the sign of G_j (0 counts as +1) times the mean over bins of
    max |G|. ``bin`` None: 50 for tensors of more than two dimensions, else 500. Source: Chen et
    al., AAAI 2018.
    """

    spec_name = "AdaComp"
    cuda = "winners"
    bin: int | None = None

    def __post_init__(self) -> None:
        if self.bin is not None and not (is_whole(self.bin) and self.bin >= 1):
            raise ValueError(f"bin must be a whole number from 1 up or None, got {self.bin!r}")

    def length(self, shape: Shape) -> int:
        """Return the number of elements in a bin of a tensor of ``shape``."""
        return self.bin or (50 if len(shape) > 2 else 500)

    def coding(self, scale: float) -> Coding:
        """Return the encoding of the two values ``scale`` and ``-scale``."""
        return steps_coding(scale, 1, 1)

    def choose(self, coeffs: Coefficients, how: Encoding) -> Selection:
        """Choose the near-maxima of each bin; see ``Adaptive``."""
        total = coeffs.array
        grad = total if coeffs.grad is None else coeffs.grad
        bitmap, maxima = how.kernels.bin_winners(total, grad, self.length(how.shape))
        scale = self.scale(float_of(coeffs.peak), maxima)
        k, codes = how.kernels.take_chosen(total, bitmap, 0.0, self.coding(scale), how.keep)
        return Selection(k, bitmap, codes, scale)

    def scale(self, peak: float, statistics: Array | Sequence[float]) -> float:
        """Return the magnitude of all sent values: the mean of the bins' maxima, float32."""
        return max(float(np.float32(np.mean(statistics, dtype=np.float64))), _LEAST)

    def expected_count(self, shape: Shape) -> int:
        """Return six for each bin, as for normally distributed gradients; see ``Adaptive``."""
        numel = math.prod(shape)
        return min(numel, 6 * -(-numel // self.length(shape)))


@dataclass(frozen=True)
class Wangni(Adaptive):
    """Send g_j / p_j with probability p_j = min(lambda |g_j|, 1), float32 (Wangni et al. 2018).

    lambda is chosen such that the fraction ``density`` of the elements is sent on average; fewer
    if fewer are not 0, more if a value would exceed float32. Unbiased.
    """

    spec_name = "Wangni"
    draws = True
    cuda = "drawn"
    density: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", TopK(self.density).density)

    def coding(self, scale: float) -> Coding:
        """Return the encoding of values of magnitude ``scale`` or less."""
        return Float32().coding(scale)

    def limit(self, n: int, sums_below: Callable[[float], tuple[int, Array]]) -> float:
        """Return 1 / lambda, float32, at least 2^-126: values as large or larger are always sent.

        Clips the probabilities at 1 and rescales those below 1, until no more are clipped, 64
        times at most. ``sums_below``: the kernel of this name, applied to the ``n`` values.
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

    def choose(self, coeffs: Coefficients, how: Encoding) -> Selection:
        """Draw the elements to send; see ``Adaptive``."""
        kernels = how.kernels
        limit = self.limit(coeffs.array.size, partial(kernels.sums_below, coeffs.array))
        bitmap = kernels.draw_chosen(coeffs.array, limit, how.key)
        scale = self.scale(float_of(coeffs.peak), [limit])
        k, codes = kernels.take_chosen(coeffs.array, bitmap, limit, self.coding(scale), how.keep)
        return Selection(k, bitmap, codes, scale)

    def scale(self, peak: float, statistics: Array | Sequence[float]) -> float:
        """Return the largest magnitude that is sent: the limit, or a larger value."""
        return float(max(peak, *statistics))

    def expected_count(self, shape: Shape) -> int:
        """Return the fraction ``density`` of the elements; see ``Adaptive``."""
        return TopK(self.density).count(math.prod(shape))
