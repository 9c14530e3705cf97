"""Entropy-coded levels: the sizes and tables of their format, known before the data.

Values come in chunks of 8192, the last one maybe shorter. A chunk has a fixed room for its levels;
the encoder chooses the finest of ``GRIDS`` grids with which they fit. Grid g has
2^((g - 48) / 16) levels from zero to the scale of a bucket. Two levels are a symbol of the entropy
code (``rans``), whose frequencies are in one of two tables: one for grids of about as many levels
as normally distributed values get, one for finer grids, which fit only where most values are far
below the scale of their bucket.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import rans
from horovod_fftcomp.wire.radix import GROUP

CHUNK = 2 * GROUP  # values: two for each symbol of a chunk of the entropy code
MOST, RADIX = 7, 15  # the highest level; of a symbol's two digits
GRIDS, BINS = 93, 64  # the finest grid has 6.7 levels; bins of magnitudes, relative to the scale
HEADER_WORDS, STATE_WORDS = 2, 2 * rans.LANES
FRACTION = 256  # costs are counted in bits / 256
_LEVELS_LOG2 = (np.arange(GRIDS) - 48) / 16  # from 1/8 of a level, where nearly all are zero

# Of 4096 values so many have the magnitude 0, 1, .. First for normally distributed values in
# buckets of 128, on a grid that makes up for scales being rounded up. Then the mean of Laplace's
# and Student's distribution (three degrees of freedom), on grids of the same entropy.
_WEIGHTS = {
    1: ((2924, 1164, 8), (3020, 1010, 52, 8, 3, 1, 1, 1)),
    2: ((1980, 1880, 228, 8), (2296, 1500, 228, 52, 12, 4, 2, 2)),
    3: ((1450, 1930, 604, 108, 4), (1816, 1630, 430, 132, 52, 24, 8, 4)),
}
LEVELS = tuple(_WEIGHTS)

# Computed in float64, whose last bits do not matter here: equal on all machines.
LEVELS_OF_GRIDS: Array = (2.0**_LEVELS_LOG2).astype(np.float32)
STEPS_OF_GRIDS: Array = (2.0**-_LEVELS_LOG2).astype(np.float32)
EIGHTHS: Array = (2.0 ** (-np.arange(8) / 8)).astype(np.float32)


class CodedLevels(NamedTuple):
    """Format in which normally distributed values have ``levels`` levels of either sign.

    ``bucket``: the number of consecutive elements that share a scale.
    """

    levels: int
    bucket: int

    @property
    def highest(self) -> tuple[int, int]:
        """The highest level of either table."""
        narrow, wide = _WEIGHTS[self.levels]
        return len(narrow) - 1, len(wide) - 1

    @property
    def first_wide(self) -> int:
        """The first grid with the second table; it has over 2^(1/4) times ``levels``."""
        return 53 + math.floor(16 * math.log2(self.levels))

    @property
    def grids(self) -> tuple[int, int]:
        """The number of grids with either table."""
        return self.first_wide, GRIDS - self.first_wide

    def slack(self, n: int) -> int:
        """Return bits to spare for ``n`` values: three deviations of what draws of levels cost."""
        return math.isqrt(3 * n)

    def room(self, n: int) -> int:
        """Return the number of 32-bit words for the levels of a chunk of ``n`` values."""
        bits = n * _costs_of_levels(self.levels, 0)[1] // FRACTION + self.slack(n)
        return -(-bits // 32)

    def limit(self, n: int) -> int:
        """Return the limit of the mean cost of a chunk of ``n`` values, in bits / ``FRACTION``."""
        return FRACTION * (32 * self.room(n) - self.slack(n))

    def chunk_words(self, n: int) -> int:
        """Return the number of 32-bit words of a chunk of ``n`` values."""
        scales = -(-n // self.bucket)
        return HEADER_WORDS + -(-scales // 4) + STATE_WORDS + self.room(n)

    def body_words(self, n: int) -> int:
        """Return the number of 32-bit words of ``n`` values."""
        whole, rest = divmod(n, CHUNK)
        return whole * self.chunk_words(CHUNK) + (self.chunk_words(rest) if rest else 0)


@functools.cache
def frequencies(levels: int, table: int) -> tuple[int, ...]:
    """Return the frequencies of 256 symbols: 0 for those with a level above the highest."""
    weights = _WEIGHTS[levels][table]
    signed = [2 * weights[0], *weights[1:]]  # twice those of one sign
    total, found = 1 << rans.PRECISION, [0] * 256
    digits = range(MOST + 1 - len(weights), MOST + len(weights))
    for a in digits:
        for b in digits:
            product = signed[abs(a - MOST)] * signed[abs(b - MOST)]
            found[a + RADIX * b] = max(1, (product + 2 * total) // (4 * total))
    found[MOST + RADIX * MOST] += total - sum(found)
    return tuple(found)


@functools.cache
def _costs_of_levels(levels: int, table: int) -> tuple[tuple[int, ...], int]:
    """Return the costs of levels 0 to 7, and the mean cost of a level as the table expects them.

    In bits / ``FRACTION``. A level costs what a symbol costs in the mean over its other level, less
    the mean cost of that. Both levels of a symbol are independent.
    """
    freqs, digits = frequencies(levels, table), range(RADIX)
    shares = [sum(freqs[a + RADIX * b] for b in digits) for a in digits]
    found = [
        sum(shares[b] * rans.cost(max(freqs[a + RADIX * b], 1), FRACTION) for b in digits)
        for a in digits
    ]
    total = 1 << rans.PRECISION
    mean = sum(f * cost for f, cost in zip(shares, found, strict=True)) // (2 * total**2)
    return tuple(cost // total - mean for cost in found[MOST:]), mean


@functools.cache
def costs(form: CodedLevels) -> Array:
    """Return what a value costs in the mean over draws, in bits / ``FRACTION``.

    int32 ``[GRIDS, BINS]``; bin i is of magnitudes of (i + 1/2) / ``BINS`` times the scale.
    """
    found = np.zeros((GRIDS, BINS), np.int32)
    for grid, log2 in enumerate(_LEVELS_LOG2.tolist()):
        own = np.array(_costs_of_levels(form.levels, int(grid >= form.first_wide))[0])
        places = (2 * np.arange(BINS) + 1) * round(2.0 ** (log2 + 16)) // (2 * BINS)
        below, rest = places >> 16, places & 0xFFFF
        found[grid] = own[below] + ((own[below + 1] - own[below]) * rest >> 16)
    return found
