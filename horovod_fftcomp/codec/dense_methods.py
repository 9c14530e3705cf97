"""Dense methods: quantizers that send every element in a few bits.

A method encodes finite values as the body of a payload and adds decoded bodies to a sum. It holds
options alone; the rest of the payload is in ``dense``, the packing of integers in ``wire.radix``.
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
_ROUNDING = 1e-12  # of the mean square: a smaller variance may be a rounding error of float64


class Sent(NamedTuple):
    """Result of ``Method.encode``: whether all values are finite, and the header's scale."""

    finite: bool
    scale: float


_NOT_FINITE = Sent(False, math.nan)


class Method(Protocol):
    """Interface of dense methods, which are frozen dataclasses of options."""

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body of any tensor of ``shape``, a multiple of 4."""
        ...

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Encode ``values`` into ``body``, uint8; with ``keep`` subtract what is sent from them.

        ``values``: float32, flat, at least one. ``key``: 64-bit key of random choices.
        """
        ...

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add the decoded ``body`` to ``total``; ValueError for bytes ``encode`` never writes."""
        ...


def _checked_scales(scales: Array, scale: float) -> Array:
    """Return float32 ``scales``; ValueError unless all are in [0, scale]."""
    if not ((scales >= 0) & (scales <= np.float32(scale))).all():
        raise ValueError(f"a norm or mean is not in [0, {scale}], the range that the header gives")
    return scales


def _array(scale: float) -> Array:
    return np.array([scale], np.float32)


def _float_of(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))


def _sums_of_rows(values: Array, row_of: Array, n_rows: int) -> Array:
    """Return the sum of the ``values`` of each row, float64 ``[n_rows]``.

    ``row_of``: the row of each value, ascending. Value i of a row is added to partial sum i mod
    64, then the partial sums are added in order. A GPU can add in the same order.
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
    """Stochastic rounding to zero and ``levels`` levels of either sign (Alistarh et al. 2017).

    ``C(x) = norm * sign(x) * l / s``, s = ``levels``, l = s |x| / norm rounded at random to one of
    its two neighbours such that the mean is x. ``norm``: of each ``bucket`` elements, the L2 norm
    ("l2") or the largest magnitude ("max"). Unbiased.
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
        """Return the quantization grid: ``levels`` on either side of 0."""
        norm = L2 if self.norm == "l2" else LARGEST
        return Levels(2 * self.levels, 2 * self.levels + 1, norm, self.bucket)

    def _n_buckets(self, shape: Shape) -> int:
        return -(-math.prod(shape) // self.bucket)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body: a float32 for each bucket, then the packed levels."""
        words = count_words(math.prod(shape), 2 * self.levels + 1)
        return 4 * (self._n_buckets(shape) + words)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Encode as norms and levels; see ``Method``."""
        split = 4 * self._n_buckets(shape)
        scales, words = body[:split].view(np.float32), body[split:].view(np.uint32)
        peak = kernels.encode_levels(values, self.grid(), scales, words, key, keep)
        if peak > LARGEST_FINITE_BITS:
            return _NOT_FINITE
        return Sent(True, float(scales.max()))

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add norms times levels; see ``Method``."""
        split = 4 * self._n_buckets(shape)
        scales = _checked_scales(body[:split].view(np.float32), scale)
        kernels.add_levels(total, body[split:].view(np.uint32), scales, self.grid())


class _OneScale(abc.ABC):
    """Base class of methods with one scale for the whole tensor, which is in the header."""

    @abc.abstractmethod
    def grid(self) -> Levels:
        """Return the quantization grid."""

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the packed levels."""
        return 4 * count_words(math.prod(shape), self.grid().radix)

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add the scale times levels; see ``Method``."""
        del shape
        kernels.add_levels(total, body.view(np.uint32), _array(scale), self.grid())


@dataclass(frozen=True)
class TernGrad(_OneScale):
    """Stochastic rounding to -s, 0 and s, s the largest magnitude after clipping (Wen et al. 2017).

    Values are first clipped to ``clip`` standard deviations of the tensor around 0; 0: never.
    ``C(x) = s sign(x) b``, b = 1 with probability |x| / s: unbiased for the clipped values.
    ``packing`` "base3": 20 values in 32 bits; "bits": 16.
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
        """Return the quantization grid: -1, 0 and 1 times the scale."""
        return Levels(2, 3 if self.packing == "base3" else 4, GIVEN, 0)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Encode as ternary digits; see ``Method``."""
        del shape
        if self.clip:
            peak, sums, squares = kernels.moments(values)
        else:
            peak = kernels.max_abs_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return _NOT_FINITE
        scale = _float_of(peak)
        if self.clip:
            mean, square = ordered_sum(sums) / values.size, ordered_sum(squares) / values.size
            variance = square - mean * mean
            deviation = math.sqrt(variance) if variance > _ROUNDING * square else 0.0
            # Values that are all equal have no deviation and are not clipped.
            if deviation > 0:
                scale = float(np.float32(min(self.clip * deviation, scale))) or scale
        kernels.encode_levels(values, self.grid(), _array(scale), body.view(np.uint32), key, keep)
        return Sent(True, scale)


@dataclass(frozen=True)
class DoReFa(_OneScale):
    """Stochastic rounding to 2^bits values evenly spaced in [-s, s], s = max|x| (Zhou et al. 2016).

    Unbiased. Zero is not among them: unless the scale is 0 it becomes +-s / (2^bits - 1).
    """

    spec_name = "DoReFa"
    bits: int = 4

    def __post_init__(self) -> None:
        if not is_whole(self.bits) or not 1 <= self.bits <= 12:
            raise ValueError(f"bits must be a whole number from 1 to 12, got {self.bits!r}")

    def grid(self) -> Levels:
        """Return the quantization grid, which does not contain 0."""
        return Levels((1 << self.bits) - 1, 1 << self.bits, GIVEN, 0)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Encode as indices of grid points; see ``Method``."""
        del shape
        peak = kernels.max_abs_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return _NOT_FINITE
        scale = _float_of(peak)
        kernels.encode_levels(values, self.grid(), _array(scale), body.view(np.uint32), key, keep)
        return Sent(True, scale)


@dataclass(frozen=True)
class Natural:
    """Stochastic rounding to powers of two, 8 bits (Horvath et al. 2019).

    |x| = 2^e (1 + m) becomes 2^(e+1) with probability m, else 2^e. There are 127 powers; the
    largest is the one to which the largest magnitude may be rounded up. Values below the smallest
    become the smallest or 0. Unbiased, except for values above 2^127.
    """

    spec_name = "Natural"

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the packed codes, four in each word."""
        return 4 * count_words(math.prod(shape), 255)

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Encode as signs and exponents; see ``Method``."""
        del shape
        peak = kernels.max_abs_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return _NOT_FINITE
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
            raise ValueError(f"the scale is {scale}, expected a power of two")
        kernels.add_octaves(total, body.view(np.uint32), pattern >> 23)


class SignMethod(abc.ABC):
    """Base class of methods that send the sign of each value, one bit."""

    @abc.abstractmethod
    def row_length(self, shape: Shape) -> int:
        """Return the number of consecutive elements (a row) that share a scale or means."""

    def add_residual(
        self, flat: Array, residual: Array, shape: Shape, kernels: ModuleType
    ) -> Coefficients:
        """Return gradient plus residual, flat float32, with its signs, computed in one pass."""
        values, words = kernels.empty(flat.size), np.empty(count_words(flat.size, 2), np.uint32)
        starts = self._pieces(flat.size, self.row_length(shape))
        sums, counts = kernels.encode_signs(values, starts, words, flat, residual)
        return Coefficients(values, 0, 0, flat.size, signs=Signs(words, sums, counts))

    def encode(
        self, values: Array, shape: Shape, body: Array, key: int, kernels: ModuleType, keep: bool
    ) -> Sent:
        """Encode as signs and their means or scale; see ``Method``."""
        del key
        words = np.empty(count_words(values.size, 2), np.uint32)
        starts = self._pieces(values.size, self.row_length(shape))
        signs = Signs(words, *kernels.encode_signs(values, starts, words))
        return self.encode_signs(values, signs, shape, body, kernels, keep)

    @abc.abstractmethod
    def encode_signs(
        self,
        values: Array,
        signs: Signs,
        shape: Shape,
        body: Array,
        kernels: ModuleType,
        keep: bool,
    ) -> Sent:
        """Encode ``values``, whose ``signs`` are known, into ``body``; see ``Method.encode``."""

    def _add(
        self, total: Array, words: Array, sides: Array, length: int, kernels: ModuleType
    ) -> None:
        kernels.add_signs(total, words.view(np.uint32), sides, max(1, length))

    def _pieces(self, n: int, length: int) -> Array:
        """Return the starts of all rows and groups, and the end, int64, ascending."""
        groups = np.arange(0, n, GROUP, dtype=np.int64)
        if length >= n:
            return np.append(groups, n)
        rows = np.arange(0, n, length, dtype=np.int64)
        return np.append(np.union1d(groups, rows), n)


@dataclass(frozen=True)
class OneBit(SignMethod):
    """The sign of each value, and the means of the values of either sign (Seide et al. 2014).

    ``group``: the elements that share means, "tensor" or "column". A column is a slice along the
    first dimension: the weights of one output.
    """

    spec_name = "OneBit"
    group: str = "tensor"

    def __post_init__(self) -> None:
        if self.group not in ("tensor", "column"):
            raise ValueError(f"group must be one of tensor, column; got {self.group!r}")

    def row_length(self, shape: Shape) -> int:
        """Return the number of elements that share means; see ``SignMethod``."""
        numel = math.prod(shape)
        columns = shape[0] if self.group == "column" and len(shape) > 1 else 1
        return max(1, numel // max(1, columns))

    def rows(self, shape: Shape) -> int:
        """Return the number of rows, each with means of its own."""
        return math.prod(shape) // self.row_length(shape)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body: two means of each row, then the packed signs."""
        return 8 * self.rows(shape) + 4 * count_words(math.prod(shape), 2)

    def encode_signs(
        self,
        values: Array,
        signs: Signs,
        shape: Shape,
        body: Array,
        kernels: ModuleType,
        keep: bool,
    ) -> Sent:
        """Encode as means and signs; see ``SignMethod``."""
        words, sums, counts = signs
        length, rows = self.row_length(shape), self.rows(shape)
        split = 8 * rows
        body[split:] = words.view(np.uint8)
        if not np.isfinite(sums).all():
            return _NOT_FINITE
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
        """Add the mean of each value's sign; see ``Method``."""
        split = 8 * self.rows(shape)
        sides = body[:split].view(np.float32)
        _checked_scales(np.abs(sides), scale)
        self._add(total, body[split:], sides.reshape(-1, 2), self.row_length(shape), kernels)


@dataclass(frozen=True)
class ScaledSign(SignMethod):
    """The signs times the mean magnitude (Karimireddy et al. 2019, as EF-SignSGD).

    ``C(q) = ||q||_1 / n * sign(q)``; the sign of 0 is +1.
    """

    spec_name = "ScaledSign"

    def row_length(self, shape: Shape) -> int:
        """Return the number of elements, which all share one scale."""
        return max(1, math.prod(shape))

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the packed signs; the scale is in the header."""
        return 4 * count_words(math.prod(shape), 2)

    def _scale_of(self, sums: Array, n: int) -> float:
        return float(np.float32((ordered_sum(sums[:, 0]) - ordered_sum(sums[:, 1])) / n))

    def encode_signs(
        self,
        values: Array,
        signs: Signs,
        shape: Shape,
        body: Array,
        kernels: ModuleType,
        keep: bool,
    ) -> Sent:
        """Encode as signs; see ``SignMethod``."""
        del shape
        n, (words, sums, _) = values.size, signs
        body[:] = words.view(np.uint8)
        if not np.isfinite(sums).all():
            return _NOT_FINITE
        scale = self._scale_of(sums, n)
        if keep:
            kernels.subtract_signs(values, np.array([[scale, -scale]], np.float32), n)
        return Sent(True, scale)

    def add(
        self, total: Array, shape: Shape, body: Array, scale: float, kernels: ModuleType
    ) -> None:
        """Add the scale times the signs; see ``Method``."""
        del shape
        sides = np.array([[scale, -scale]], np.float32)
        self._add(total, body, sides, total.size, kernels)


@dataclass(frozen=True)
class Sign(ScaledSign):
    """The signs alone, each 1 or -1 (Bernstein et al. 2018, as signSGD); the sign of 0 is +1.

    A tensor of zeros, such as a frozen layer's gradient, has scale 0 and decodes to zeros.
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
            raise ValueError(f"the scale is {scale}, expected 0 or 1")
        super().add(total, shape, body, scale, kernels)
