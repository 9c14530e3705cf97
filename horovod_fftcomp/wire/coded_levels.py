"""Entropy-coded levels of dithered values: the sizes and tables of their format.

Values come in chunks of 8192, the last one maybe shorter. A chunk has a fixed room for its levels;
the encoder chooses the finest of ``GRIDS`` grids with which they fit. Grid g has 2^((g - 112) / 16)
levels from zero to the scale of a bucket, which is at least a sixth of its largest magnitude. Two
levels are a symbol of the entropy code (``rans``). They share a dither, whose magnitude lies in one
of ``PARTS`` parts of half a level: it tells how likely each symbol is, so each part has a table of
frequencies. There are two sets of tables: for normally distributed values, and for such as have
tails. A choice is a grid and a set: 2 g + 1 of grid g has tails.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import rans
from horovod_fftcomp.wire.radix import GROUP

CHUNK = 2 * GROUP  # values: two for each symbol of a chunk of the entropy code
MOST, RADIX = 7, 15  # the highest level; of a symbol's two digits
PARTS = 8
GRIDS, CHOICES = 114, 228
BINS, BINS_OF_SCALE = 64, 10  # of magnitudes
NO_SCALE = 255  # the code of a bucket whose values are sent as zeros
KEY_WORDS, HEADER_WORDS, STATE_WORDS = 2, 2, 2 * rans.LANES
FRACTION = 256  # costs are counted in bits / 256
DITHER_BITS = 20  # of a random word: the sign, three bits of the part, and the rest

_ONE = 112  # the grid with one level; the coarsest has 1/128: there nearly all are zero
_SPIKE = 6  # times the scale: no magnitude is above
_FINER = 6, 32  # grids finer than that of normally distributed values, for either set
_FREEDOM = 20, 4  # degrees of freedom of Student's distribution
_DEVIATION = 1.0, 1.1  # times that of normally distributed values
_POINTS = 4  # of a part of the dithers, to take means over it
# Levels in a deviation of normally distributed values, for so many times fewer bytes than float32
# in buckets of 256.
_LEVELS = {
    16: 0.839, 20: 0.617, 30: 0.376, 40: 0.268, 60: 0.167, 80: 0.117, 100: 0.085, 160: 0.0365,
}  # fmt: skip
RATIOS = tuple(_LEVELS)
_ROUNDED_UP = 1.044  # a scale over the deviation, in the mean

_LEVELS_LOG2 = (np.arange(GRIDS) - _ONE) / 16
# Computed in float64, whose last bits do not matter here: equal on all machines.
LEVELS_OF_GRIDS: Array = (2.0**_LEVELS_LOG2).astype(np.float32)
STEPS_OF_GRIDS: Array = (2.0**-_LEVELS_LOG2).astype(np.float32)
EIGHTHS: Array = (2.0 ** (-np.arange(8) / 8)).astype(np.float32)
# Whole numbers from 2^22 to 2^23 whose log2 is above the k-th quarter after 22 are above the k-th.
QUARTERS = tuple(math.floor(2 ** (22 + k / 4)) for k in range(4))


class CodedLevels(NamedTuple):
    """Format that sends normally distributed values in about 32 / ``ratio`` bits each.

    ``bucket``: the number of consecutive elements that share a scale.
    """

    ratio: int
    bucket: int

    @property
    def ends(self) -> tuple[int, int]:
        """The first grid that is too fine for either set of tables."""
        levels = np.float32(_ROUNDED_UP * _LEVELS[self.ratio])
        usual = int(np.searchsorted(LEVELS_OF_GRIDS, levels))
        return min(GRIDS, usual + _FINER[0]), min(GRIDS, usual + _FINER[1])

    @property
    def highest(self) -> tuple[int, int]:
        """The highest level that either set of tables has."""
        normal, tails = _SPIKE * LEVELS_OF_GRIDS[[end - 1 for end in self.ends]]
        return math.ceil(normal), math.ceil(tails)

    def exists(self, choice: int) -> bool:
        """Return whether a grid is combined with a set of tables."""
        return choice // 2 < self.ends[choice % 2]

    def slack(self, n: int) -> int:
        """Return bits to spare for ``n`` values: two to three deviations of what levels cost."""
        return math.isqrt(3 * n)

    def room(self, n: int) -> int:
        """Return the number of 32-bit words for the levels of a chunk of ``n`` values."""
        bits = n * _costs_of_levels(self, 0)[1] // FRACTION + self.slack(n)
        return -(-bits // 32)

    def limit(self, n: int) -> int:
        """Return the limit of the mean cost of a chunk of ``n`` values, in bits / ``FRACTION``."""
        return FRACTION * (32 * self.room(n) - self.slack(n))

    def chunk_words(self, n: int) -> int:
        """Return the number of 32-bit words of a chunk of ``n`` values."""
        scales = -(-n // self.bucket)
        return HEADER_WORDS + -(-scales // 4) + STATE_WORDS + self.room(n)

    def words_before(self, n: int) -> int:
        """Return the number of 32-bit words of the key, and of the chunks of ``n`` values."""
        whole, rest = divmod(n, CHUNK)
        return KEY_WORDS + whole * self.chunk_words(CHUNK) + (self.chunk_words(rest) if rest else 0)


def _below(x: float, freedom: int) -> float:
    """Return the share of Student's distribution below ``x`` deviations; ``freedom``: even.

    Only operations whose float64 results are equal on all machines.
    """
    x *= math.sqrt(freedom / (freedom - 2))
    square, term, total = freedom / (freedom + x * x), 1.0, 0.0
    for k in range(freedom // 2):
        total += term
        term *= (2 * k + 1) / (2 * k + 2) * square
    return 0.5 + 0.5 * total * x / math.sqrt(freedom + x * x)


def _dithers(part: int) -> Iterator[float]:
    """Yield dithers of a part, evenly spaced, in levels."""
    for point in range(_POINTS):
        yield (part + (2 * point + 1) / (2 * _POINTS)) / (2 * PARTS)


@functools.cache
def _shares(form: CodedLevels, table: int, part: int) -> list[list[int]]:
    """Return the shares of levels -7 to 7 for each dither of a part, in units of 2^-20."""
    levels, freedom = _LEVELS[form.ratio] * _DEVIATION[table], _FREEDOM[table]
    highest = form.highest[table]
    found = []
    for dither in _dithers(part):
        below = [
            _below((level - 0.5 - dither) / levels, freedom) if abs(level) <= highest + 1 else 0.0
            for level in range(-MOST, MOST + 2)
        ]
        found.append([max(0, int((b - a) * (1 << 20))) for a, b in itertools.pairwise(below)])
    return found


@functools.cache
def frequencies(form: CodedLevels, table: int, part: int) -> tuple[int, ...]:
    """Return the frequencies of 256 symbols: 0 for those with a level above the highest.

    ``part``: of the dithers, which are 0 or more here.
    """
    total, found, highest = 1 << rans.PRECISION, [0] * 256, form.highest[table]
    digits, shares = range(MOST - highest, MOST + highest + 1), _shares(form, table, part)
    for a in digits:
        for b in digits:
            share = sum(own[a] * own[b] for own in shares) // _POINTS
            found[a + RADIX * b] = max(1, share * total + (1 << 39) >> 40)
    found[MOST + RADIX * MOST] += total - sum(found)
    return tuple(found)


@functools.cache
def _costs_of_levels(form: CodedLevels, table: int) -> tuple[list[list[int]], int]:
    """Return the costs of levels -7 to 7 in each part, and the mean cost of a level.

    In bits / ``FRACTION``. A level costs what a symbol costs in the mean over its other level, less
    half the mean cost of a symbol.
    """
    costs, means = [], 0
    for part in range(PARTS):
        freqs, shares = frequencies(form, table, part), _shares(form, table, part)
        mean_shares = [sum(own) // _POINTS for own in zip(*shares, strict=True)]
        of_symbols = [rans.cost(max(f, 1), FRACTION) for f in freqs]
        digits = range(RADIX)
        found = [
            sum(share * of_symbols[a + RADIX * b] for b, share in enumerate(mean_shares)) >> 20
            for a in digits
        ]
        mean = sum(share * cost for share, cost in zip(mean_shares, found, strict=True)) >> 21
        costs.append([cost - mean for cost in found])
        means += mean
    return costs, -(-means // PARTS)


@functools.cache
def costs(form: CodedLevels) -> Array:
    """Return what a value costs in the mean over dithers, in bits / ``FRACTION``.

    int32 ``[CHOICES, BINS]``; bin i is of magnitudes of (i + 1/2) / ``BINS_OF_SCALE`` times the
    scale. 0 for choices that do not exist.
    """
    found = np.zeros((CHOICES, BINS), np.int32)
    points = [(part, d) for part in range(PARTS) for d in _dithers(part)]
    middles = 2 * np.arange(BINS) + 1
    for table, end in enumerate(form.ends):
        costs = np.array(_costs_of_levels(form, table)[0])
        for grid in range(end):
            places = middles * round(2.0 ** (float(_LEVELS_LOG2[grid]) + 16)) // (2 * BINS_OF_SCALE)
            total = np.zeros(BINS, np.int64)
            for part, dither in points:
                for signed in (places, -places):
                    levels = signed + round((dither + 0.5) * (1 << 16)) >> 16
                    total += costs[part][np.clip(levels + MOST, 0, RADIX - 1)]
            found[2 * grid + table] = total // (2 * len(points))
    return found
