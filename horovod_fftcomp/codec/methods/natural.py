"""Natural compression: stochastic rounding to powers of two."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.codec.methods.base import CudaMethod, Encoding, Method
from horovod_fftcomp.codec.methods.sums import peak_bits
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, float_of
from horovod_fftcomp.types import Array, Kernels, Shape
from horovod_fftcomp.wire.counter_rng import random_words
from horovod_fftcomp.wire.radix import GIVEN, Levels, count_words, pack_words, unpack_words

_POWER_OF_TWO_ABOVE = 0x7FFFFF


@dataclass(frozen=True)
class Natural(Method):
    """Stochastic rounding to powers of two, 8 bits (Horvath et al. 2019).

    |x| = 2^e (1 + m) becomes 2^(e+1) with probability m, else 2^e. There are 127 powers; the
    largest is the one to which the largest magnitude may be rounded up. Values below the smallest
    become the smallest or 0. Unbiased, except for values above 2^127.
    """

    spec_name = "Natural"
    draws = unbiased = contraction = True
    cuda = CudaMethod("octaves", Levels(254, 255, GIVEN, 0))

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the packed codes, four in each word."""
        return 4 * count_words(math.prod(shape), 255)

    def encode(self, values: Array, body: Array, how: Encoding) -> float | None:
        """Encode as signs and exponents; see ``Method``."""
        peak = peak_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return None
        top = max(1, min(peak + _POWER_OF_TWO_ABOVE >> 23, 254))
        encode_octaves(values, body.view(np.uint32), top, how.key, how.keep)
        return float_of(top << 23)

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add powers of two; see ``Method``."""
        pattern = int(np.float32(scale).view(np.uint32))
        if pattern & _POWER_OF_TWO_ABOVE or not pattern:
            raise ValueError(f"the scale is {scale}, expected a power of two")
        add_octaves(total, body.view(np.uint32), pattern >> 23)


def encode_octaves(values: Array, words: Array, top: int, key: int, keep: bool) -> None:
    """Write finite ``values`` as signs and powers of two, rounded at random to a neighbour.

    Level 127 is 2^(top - 127), level l 2^(top - 127 - (127 - l)), level 0 is 0; the code of a
    negative value is its level plus 127. The smallest power is at least 2^-126. ``top``: the biased
    exponent of a power of two that is no smaller than any value. With ``keep`` what is sent is
    subtracted from ``values``.
    """
    base = max(top - 126, 1)
    random = random_words(key, values.size)
    pattern = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    above = ((pattern + (random >> np.uint32(9))) >> np.uint32(23)).astype(np.int64) - base + 1
    least = np.float32(2.0 ** (base - 127))
    uniform = (random >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    below = uniform < np.abs(values) / least
    levels = np.where(pattern < base << 23, below, np.minimum(above, top - base + 1))
    codes = np.where((values < 0) & (levels > 0), levels + 127, levels).astype(np.uint32)
    words[:] = pack_words(codes, 255)
    if keep:
        values -= _octaves(codes, base)


def add_octaves(total: Array, words: Array, top: int) -> None:
    """Add the values that ``encode_octaves`` encoded; ValueError for a code it never writes."""
    base = max(top - 126, 1)
    codes = unpack_words(words, total.size, 255)
    highest = (codes - np.where(codes > 127, 127, 0)).max(initial=0)
    if codes.max(initial=0) > 254 or highest > top - base + 1:
        raise ValueError("a power of two exceeds the header's scale")
    total += _octaves(codes, base)


def _octaves(codes: Array, base: int) -> Array:
    wide = codes.astype(np.int64)
    levels = np.where(wide > 127, wide - 127, wide)
    patterns = (levels + base - 1) << 23 | (wide > 127).astype(np.int64) << 31
    return np.where(wide == 0, 0, patterns).astype(np.uint32).view(np.float32)
