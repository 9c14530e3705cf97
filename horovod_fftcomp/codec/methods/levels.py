"""Quantization to an evenly spaced grid by stochastic rounding, which several methods share."""

from __future__ import annotations

import abc
import math

import numpy as np

from horovod_fftcomp.codec.methods.base import CudaMethod, Encoding, Method
from horovod_fftcomp.codec.methods.sums import lane_sums, peak_bits, rows_of
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, float_of
from horovod_fftcomp.types import Array, Kernels, Shape
from horovod_fftcomp.wire.counter_rng import random_words
from horovod_fftcomp.wire.radix import GIVEN, L2, Levels, count_words, pack_words, unpack_words

_LARGEST = np.finfo(np.float32).max
_LEAST_NORMAL = np.float32(2.0**-126)


class OneScale(Method):
    """Base class of methods with one scale for the whole tensor, which is in the header.

    The scale is the largest magnitude, unless ``scale_of`` says otherwise.
    """

    draws = True
    clip = 0.0

    @abc.abstractmethod
    def grid(self) -> Levels:
        """Return the quantization grid."""

    @property
    def cuda(self) -> CudaMethod | None:
        """Description for the CUDA kernels, which compute the scale as ``scale_of`` does."""
        return CudaMethod("clipped", self.grid(), self.clip)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the packed levels."""
        return 4 * count_words(math.prod(shape), self.grid().radix)

    def scale_of(self, values: Array) -> tuple[int, float]:
        """Return (bits of the largest magnitude, scale if that is finite)."""
        peak = peak_bits(values)
        return peak, float_of(peak)

    def encode(self, values: Array, body: Array, how: Encoding) -> float | None:
        """Encode as levels; see ``Method``."""
        peak, scale = self.scale_of(values)
        if peak > LARGEST_FINITE_BITS:
            return None
        words = body.view(np.uint32)
        encode_levels(values, self.grid(), _array(scale), words, how.key, how.keep)
        return scale

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add the scale times levels; see ``Method``."""
        add_levels(total, body.view(np.uint32), _array(scale), self.grid())


def _array(scale: float) -> Array:
    return np.array([scale], np.float32)


def bucket_scales(values: Array, norm: int, bucket: int) -> Array:
    """Return the scale of each bucket of finite ``values``, float32; below 2^-126 it is 0."""
    if norm == L2:
        wide = values.astype(np.float64)
        scales = np.minimum(np.sqrt(lane_sums(wide * wide, bucket)), _LARGEST).astype(np.float32)
    else:
        scales = rows_of(np.abs(values), bucket).max(1)
    return np.where(scales < _LEAST_NORMAL, np.float32(0), scales)


def encode_levels(
    values: Array, levels: Levels, scales: Array, words: Array, key: int, keep: bool
) -> int:
    """Quantize ``values`` to a grid: write ``scales``, float32, and the packed levels, ``words``.

    A value is rounded at random to one of its two neighbours on the grid such that its mean is the
    value; a value beyond the scale becomes the end of the grid. With ``keep`` what is sent is
    subtracted from ``values``. Returns the bits of the largest magnitude; if it is not finite,
    what was written is meaningless. If the norm is GIVEN, ``scales`` is an input, ``values`` must
    be finite, and the result is 0.
    """
    peak = 0
    if levels.norm != GIVEN:
        peak = peak_bits(values)
        if peak > LARGEST_FINITE_BITS:
            return peak
        scales[:] = bucket_scales(values, levels.norm, levels.bucket)
    scale = _spread(scales, levels, values.size)
    uniform = (random_words(key, values.size) >> np.uint32(8)).astype(np.float32)
    uniform *= np.float32(2.0**-24)
    half = np.float32(levels.top / 2)
    zero = scale == 0
    ratio = np.where(zero, 0, values / np.where(zero, 1, scale)).astype(np.float32)
    if levels.top % 2:
        place = np.clip(ratio, np.float32(-1), np.float32(1)) * half + half
    else:
        place = np.minimum(np.abs(ratio), np.float32(1)) * half
    floor = place.astype(np.int32)
    rounded = floor + (uniform < place - floor.astype(np.float32))
    if levels.top % 2:
        codes = np.minimum(rounded, levels.top)
    else:
        codes = levels.top // 2 + np.where(values < 0, -rounded, rounded)
    words[:] = pack_words(codes.astype(np.uint32), levels.radix)
    if keep:
        values -= _values(codes, levels, scale)
    return peak


def add_levels(total: Array, words: Array, scales: Array, levels: Levels) -> None:
    """Add the values encoded by ``encode_levels``; ValueError for a level above ``levels.top``."""
    codes = unpack_words(words, total.size, levels.radix)
    if codes.max(initial=0) > levels.top:
        raise ValueError(f"a level is {codes.max()}, expected at most {levels.top}")
    total += _values(codes, levels, _spread(scales, levels, total.size))


def _spread(scales: Array, levels: Levels, n: int) -> Array:
    """Return the scale of each element."""
    return np.repeat(scales, n if levels.norm == GIVEN else levels.bucket)[:n]


def _values(codes: Array, levels: Levels, scale: Array) -> Array:
    twice = (2 * codes.astype(np.int32) - levels.top).astype(np.float32)
    return scale * (twice / np.float32(levels.top))
