"""Methods that send every element in a few bits: what a body holds and what it decodes to.

A method makes the body of a payload from finite values and adds bodies up. It holds options alone;
``element_codec`` owns the payload around the body, ``words`` how small numbers are packed.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, is_whole
from horovod_fftcomp.types import Array, Coefficients, Shape, Signs
from horovod_fftcomp.wire.radix import GIVEN, GROUP, L2, LANES, LARGEST, Levels, count_words

BUCKETS = (64, 128, 256, 512, 1024, 2048, 4096)
_POWER_OF_TWO_ABOVE = 0x7FFFFF
_ROUNDING = 1e-12  # what a variance may be of the mean square by errors of float64 alone


class Sent(NamedTuple):
    """What a body was made of: whether all values are finite, and the scale for the header."""

    finite: bool
    scale: float


_BROKEN = Sent(False, math.nan)


class Method(Protocol):
    """A frozen dataclass of options."""

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body of any tensor of ``shape``, a multiple of 4."""
        ...

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Write ``body``, uint8; with ``keep`` subtract what it stands for from ``values``.

        ``values``: float32, flat, one at least. ``key``: 64 bits that random choices follow from.
        """
        ...

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add what ``body`` stands for to ``total``; ValueError for what ``encode`` never wrote."""
        ...


def _checked_scales(scales: Array, scale: float) -> Array:
    """Return float32 ``scales``; ValueError unless all are in [0, scale]."""
    if not ((scales >= 0) & (scales <= np.float32(scale))).all():
        raise ValueError("a scale lies beyond what the header allows")
    return scales


def _only(scale: float) -> Array:
    return np.array([scale], np.float32)


def _float_of(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _sums_of_rows(values: Array, row_of: Array, n_rows: int) -> Array:
    """Return the sum of each row's ``values``, float64; ``row_of`` ascends.

    Value i of a row is added to partial sum i mod 64, then these are added from the first to the
    last: an order in which a GPU can add as well.
    """
    counts = np.bincount(row_of, minlength=n_rows)
    if counts.max(initial=0) <= LANES:
        return np.bincount(row_of, values, n_rows)
    place = np.arange(values.size) - np.repeat(np.cumsum(counts) - counts, counts)
    partial = np.bincount(row_of * LANES + place % LANES, values, n_rows * LANES)
    return np.add.accumulate(partial.reshape(n_rows, LANES), 1)[:, -1]


def ordered_sum(values: Array) -> float:
    """Return the sum of ``values`` in the order of ``_sums_of_rows``."""
    return float(_sums_of_rows(values, np.zeros(values.size, np.int64), 1)[0])


@dataclass(frozen=True)
class QSGD:
    """Stochastic rounding to ``levels`` levels and zero, of either sign (Alistarh et al. 2017).

    ``C(x) = norm * sign(x) * l / s``, l = s |x| / norm rounded to one of its neighbours so that
    the mean is x; norm: of each ``bucket`` elements, the L2 norm or the largest magnitude
    ("max"). Unbiased.
    """

    spec_name = "QSGD"
    levels: int = 7
    bucket: int = 1024
    norm: str = "max"

    def __post_init__(self) -> None:
        if not is_whole(self.levels) or not 1 <= self.levels <= 2047:
            raise ValueError(
                f"levels must be a whole number from 1 to 2047, got {self.levels!r}; "
                "7 take 4 bits a value"
            )
        if not is_whole(self.bucket) or self.bucket not in BUCKETS:
            raise ValueError(
                f"bucket must be one of {', '.join(map(str, BUCKETS))}; got {self.bucket!r}"
            )
        if self.norm not in ("max", "l2"):
            raise ValueError(f"norm must be one of max, l2; got {self.norm!r}")

    def grid(self) -> Levels:
        """Return the grid, of ``levels`` on either side of 0."""
        norm = L2 if self.norm == "l2" else LARGEST
        return Levels(2 * self.levels, 2 * self.levels + 1, norm, self.bucket)

    def _n_buckets(self, shape: Shape) -> int:
        return -(-math.prod(shape) // self.bucket)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body: a float32 for each bucket, then the words."""
        words = count_words(math.prod(shape), 2 * self.levels + 1)
        return 4 * (self._n_buckets(shape) + words)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Write norms and levels; see ``Method``."""
        split = 4 * self._n_buckets(shape)
        scales, words = body[:split].view(np.float32), body[split:].view(np.uint32)
        peak = kernels.encode_levels(values, self.grid(), scales, words, key, keep)
        if peak > LARGEST_FINITE_BITS:
            return _BROKEN
        return Sent(True, float(scales.max()))

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add norms times levels; see ``Method``."""
        split = 4 * self._n_buckets(shape)
        scales = _checked_scales(body[:split].view(np.float32), scale)
        kernels.add_levels(total, body[split:].view(np.uint32), scales, self.grid())


@dataclass(frozen=True)
class EliasQSGD(QSGD):
    """QSGD whose levels travel in Elias's gamma code: short where most of them are 0.

    l of a value as l + 1 in that code, then a bit for the sign unless l is 0; the more zeros the
    fewer bytes. What is sent is what QSGD sends. (Alistarh et al. 2017; Elias 1975.)
    """

    spec_name = "EliasQSGD"

    def packed(self, body: Array, shape: Shape, kernels: ModuleType) -> Array:
        """Return the body, uint8, that travels in place of one that ``encode`` wrote."""
        split = 4 * self._n_buckets(shape)
        radix = 2 * self.levels + 1
        codes = kernels.unpack_words(body[split:].view(np.uint32), math.prod(shape), radix)
        stream = kernels.pack_gamma(codes, self.levels)
        return np.concatenate([body[:split], stream.view(np.uint8)])

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add norms times levels; see ``Method``."""
        split = 4 * self._n_buckets(shape)
        if body.size < split:
            raise ValueError("the norms are cut short")
        codes = kernels.unpack_gamma(body[split:].view(np.uint32), total.size, self.levels)
        words = kernels.pack_words(codes, 2 * self.levels + 1)
        fixed = np.concatenate([body[:split], words.view(np.uint8)])
        super().add(total, shape, fixed, scale, kernels)


class _OneScale(abc.ABC):
    """What methods with a grid of one scale, the header's, have in common."""

    @abc.abstractmethod
    def grid(self) -> Levels:
        """Return the grid."""

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the words."""
        return 4 * count_words(math.prod(shape), self.grid().radix)

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add the scale times levels; see ``Method``."""
        del shape
        kernels.add_levels(total, body.view(np.uint32), _only(scale), self.grid())


@dataclass(frozen=True)
class TernGrad(_OneScale):
    """Signs of some elements, times the largest magnitude of all (Wen et al. 2017).

    Values are clipped to ``clip`` standard deviations (around 0; the deviation is that of the
    tensor), 0: never. ``C(x) = s sign(x) b``, s the largest magnitude left, b = 1 with probability
    |x| / s: unbiased for what was clipped. ``packing`` "base3": 20 values in 32 bits; "bits": 16.
    """

    spec_name = "TernGrad"
    clip: float = 2.5
    packing: str = "base3"

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip must be 0 (never) or more, got {self.clip!r}; 2.5 is usual")
        object.__setattr__(self, "clip", float(self.clip))
        if self.packing not in ("base3", "bits"):
            raise ValueError(f"packing must be one of base3, bits; got {self.packing!r}")

    def grid(self) -> Levels:
        """Return the grid: -1, 0 and 1 times the scale."""
        return Levels(2, 3 if self.packing == "base3" else 4, GIVEN, 0)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Write ternary digits; see ``Method``."""
        del shape
        if self.clip:
            peak, sums, squares = kernels.moments(values)
        else:
            peak = kernels.max_abs_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return _BROKEN
        scale = _float_of(peak)
        if self.clip:
            mean, square = ordered_sum(sums) / values.size, ordered_sum(squares) / values.size
            variance = square - mean * mean
            deviation = math.sqrt(variance) if variance > _ROUNDING * square else 0.0
            # Values that are all the same have no deviation: they are as large as they are.
            if deviation > 0:
                scale = float(np.float32(min(self.clip * deviation, scale))) or scale
        kernels.encode_levels(values, self.grid(), _only(scale), body.view(np.uint32), key, keep)
        return Sent(True, scale)


@dataclass(frozen=True)
class DoReFa(_OneScale):
    """Stochastic rounding to 2^bits values, evenly from -s to s, s = max|x| (Zhou et al. 2016).

    Unbiased. Zero has no code of its own: where the scale is not 0 it becomes +-s / (2^bits - 1).
    """

    spec_name = "DoReFa"
    bits: int = 4

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or not 1 <= self.bits <= 12:
            raise ValueError(f"bits must be a whole number from 1 to 12, got {self.bits!r}")

    def grid(self) -> Levels:
        """Return the grid, which has no 0."""
        return Levels((1 << self.bits) - 1, 1 << self.bits, GIVEN, 0)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Write the numbers of grid points; see ``Method``."""
        del shape
        peak = kernels.max_abs_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return _BROKEN
        scale = _float_of(peak)
        kernels.encode_levels(values, self.grid(), _only(scale), body.view(np.uint32), key, keep)
        return Sent(True, scale)


@dataclass(frozen=True)
class Natural:
    """Stochastic rounding to powers of two, 8 bits (Horvath et al. 2019).

    |x| = 2^e (1 + m) becomes 2^(e+1) with probability m, else 2^e. There are 127 powers, down from
    the one that the largest magnitude may become; smaller values become the smallest or 0.
    Unbiased, but for values above 2^127.
    """

    spec_name = "Natural"

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the words, four values in each."""
        return 4 * count_words(math.prod(shape), 255)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Write signs and exponents; see ``Method``."""
        del shape
        peak = kernels.max_abs_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return _BROKEN
        top = max(1, min(peak + _POWER_OF_TWO_ABOVE >> 23, 254))
        kernels.encode_octaves(values, body.view(np.uint32), top, key, keep)
        return Sent(True, _float_of(top << 23))

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add powers of two; see ``Method``."""
        del shape
        pattern = int(np.float32(scale).view(np.uint32))
        if pattern & _POWER_OF_TWO_ABOVE or not pattern:
            raise ValueError(f"the scale {scale} is no power of two")
        kernels.add_octaves(total, body.view(np.uint32), pattern >> 23)


class OfSigns(abc.ABC):
    """What methods that send one bit a value have in common."""

    @abc.abstractmethod
    def row_length(self, shape: Shape) -> int:
        """Return how many elements have means of their own."""

    def sum_of(
        self, flat: Array, residual: Array, shape: Shape, kernels: ModuleType
    ) -> Coefficients:
        """Return gradient plus residual, float32 and flat, with its signs: one pass finds both."""
        values, words = kernels.empty(flat.size), np.empty(count_words(flat.size, 2), np.uint32)
        starts = self._pieces(flat.size, self.row_length(shape))
        found = kernels.encode_signs(values, starts, words, flat, residual)
        return Coefficients(values, 0, 0, flat.size, signs=Signs(words, *found))

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Write signs and what they stand for; see ``Method``."""
        del key
        words = np.empty(count_words(values.size, 2), np.uint32)
        starts = self._pieces(values.size, self.row_length(shape))
        found = kernels.encode_signs(values, starts, words)
        return self.encode_found(values, Signs(words, *found), shape, body, kernels, keep)

    @abc.abstractmethod
    def encode_found(
        self,
        values: Array,
        signs: Signs,
        shape: Shape,
        body: Array,
        kernels: ModuleType,
        keep: bool,
    ) -> Sent:
        """Write ``signs`` of ``values`` and what they stand for; see ``Method.encode``."""

    def _add(
        self, total: Array, words: Array, sides: Array, length: int, kernels: ModuleType
    ) -> None:
        kernels.add_signs(total, words.view(np.uint32), sides, max(1, length))

    def _pieces(self, n: int, length: int) -> Array:
        """Return where rows and groups begin, and the end, int64."""
        groups = np.arange(0, n, GROUP, dtype=np.int64)
        if length >= n:
            return np.append(groups, n)
        rows = np.arange(0, n, length, dtype=np.int64)
        return np.append(np.union1d(groups, rows), n)


@dataclass(frozen=True)
class OneBit(OfSigns):
    """A bit for the sign, and of either side the mean (Seide et al. 2014).

    ``group``: whose means, "tensor" or "column". A column is what belongs to one index of the
    first dimension, so the weights of one output.
    """

    spec_name = "OneBit"
    group: str = "tensor"

    def __post_init__(self) -> None:
        if self.group not in ("tensor", "column"):
            raise ValueError(f"group must be one of tensor, column; got {self.group!r}")

    def row_length(self, shape: Shape) -> int:
        """Return how many elements have means of their own."""
        numel = math.prod(shape)
        columns = shape[0] if self.group == "column" and len(shape) > 1 else 1
        return max(1, numel // max(1, columns))

    def rows(self, shape: Shape) -> int:
        """Return how many groups have means."""
        return math.prod(shape) // self.row_length(shape)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body: two means of each group, then the words."""
        return 8 * self.rows(shape) + 4 * count_words(math.prod(shape), 2)

    def encode_found(
        self,
        values: Array,
        signs: Signs,
        shape: Shape,
        body: Array,
        kernels: ModuleType,
        keep: bool,
    ) -> Sent:
        """Write means and signs; see ``Method``."""
        words, sums, counts = signs
        length, rows = self.row_length(shape), self.rows(shape)
        split = 8 * rows
        body[split:] = words.view(np.uint8)
        if not np.isfinite(sums).all():
            return _BROKEN
        starts = self._pieces(values.size, length)
        row_of = starts[:-1] // length
        below = np.bincount(row_of, counts, rows)
        sides = body[:split].view(np.float32).reshape(rows, 2)
        for side, many in enumerate((length - below, below)):
            total = _sums_of_rows(sums[:, side], row_of, rows)
            sides[:, side] = total / np.maximum(many, 1)
        if keep:
            kernels.subtract_signs(values, sides, length)
        return Sent(True, float(np.abs(sides).max()))

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add the means of the sides; see ``Method``."""
        split = 8 * self.rows(shape)
        sides = body[:split].view(np.float32)
        _checked_scales(np.abs(sides), scale)
        self._add(total, body[split:], sides.reshape(-1, 2), self.row_length(shape), kernels)


@dataclass(frozen=True)
class ScaledSign(OfSigns):
    """The signs times the mean magnitude (Karimireddy et al. 2019, as EF-SignSGD).

    ``C(q) = ||q||_1 / n * sign(q)``; the sign of 0 is +1.
    """

    spec_name = "ScaledSign"

    def row_length(self, shape: Shape) -> int:
        """Return how many elements have a scale of their own: all."""
        return max(1, math.prod(shape))

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the words; the scale is the header's."""
        return 4 * count_words(math.prod(shape), 2)

    def _scale_of(self, sums: Array, n: int) -> float:
        return float(np.float32((ordered_sum(sums[:, 0]) - ordered_sum(sums[:, 1])) / n))

    def encode_found(
        self,
        values: Array,
        signs: Signs,
        shape: Shape,
        body: Array,
        kernels: ModuleType,
        keep: bool,
    ) -> Sent:
        """Write the signs; see ``Method``."""
        del shape
        n, (words, sums, _) = values.size, signs
        body[:] = words.view(np.uint8)
        if not np.isfinite(sums).all():
            return _BROKEN
        scale = self._scale_of(sums, n)
        if keep:
            kernels.subtract_signs(values, np.array([[scale, -scale]], np.float32), n)
        return Sent(True, scale)

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add the scale with the signs; see ``Method``."""
        del shape
        sides = np.array([[scale, -scale]], np.float32)
        self._add(total, body, sides, total.size, kernels)


@dataclass(frozen=True)
class Sign(ScaledSign):
    """The signs alone, each 1 or -1 (Bernstein et al. 2018, as signSGD); the sign of 0 is +1.

    A tensor of zeros alone, as of a frozen layer, has scale 0: it has no signs.
    """

    spec_name = "Sign"

    def _scale_of(self, sums: Array, n: int) -> float:
        del n
        return float(sums.any())

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add the signs; see ``Method``."""
        if scale not in (0.0, 1.0):
            raise ValueError(f"the scale of signs is 0 or 1, not {scale}")
        super().add(total, shape, body, scale, kernels)
