"""QSGD with entropy-coded levels: as many as fit into a size that is known before the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.methods.base import CudaMethod, Encoding, Method, kernel_of
from horovod_fftcomp.codec.methods.qsgd import BUCKETS
from horovod_fftcomp.codec.methods.sums import peak_bits
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, MIN_NORMAL_BITS, is_whole
from horovod_fftcomp.types import Array, Kernels, Shape
from horovod_fftcomp.wire import coded_levels, rans
from horovod_fftcomp.wire.coded_levels import BINS, CHUNK, MOST, RADIX, STATE_WORDS, CodedLevels
from horovod_fftcomp.wire.counter_rng import random_words


@dataclass(frozen=True)
class CodedQSGD(Method):
    """``QSGD`` with an entropy code (Alistarh et al. 2017; code: Duda 2013).

    Its size is what normally distributed values with ``levels`` levels take; each chunk of 8192
    values has as many levels as fit, see ``wire.coded_levels``. The scale of a ``bucket`` takes 8
    bits. Unbiased: the values alone decide how many levels there are, before anything is drawn.
    """

    spec_name = "CodedQSGD"
    draws = unbiased = True
    levels: int = 2
    bucket: int = 128

    def __post_init__(self) -> None:
        for name, allowed in (("levels", coded_levels.LEVELS), ("bucket", BUCKETS)):
            value = getattr(self, name)
            if not is_whole(value) or value not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, allowed))} with coded=True; "
                    f"got {value!r}"
                )

    @property
    def contraction(self) -> bool:
        """Whether rounding adds less variance than normally distributed gradients have."""
        return self.levels > 1

    @property
    def cuda(self) -> CudaMethod:
        """Description for the CUDA kernels, which read the rest from the form."""
        return CudaMethod("coded")

    def decoded_range(self, values: Array) -> tuple[Array, Array]:
        """Return the values and, to either side, a step of the coarsest grid; see ``Method``.

        That is 8 times the scale, which is at most 2^(1/8) times the largest magnitude.
        """
        steps = 8 * 2 ** (1 / 8) * _maxima(values, self.bucket)
        steps = np.repeat(steps, self.bucket)[: values.size]
        return values - steps, values + steps

    def form(self) -> CodedLevels:
        """Return the format of the body."""
        return CodedLevels(self.levels, self.bucket)

    def body_nbytes(self, shape: Shape) -> int:
        """Return the size of the body: chunks of fixed sizes."""
        return 4 * self.form().body_words(math.prod(shape))

    def encode(self, values: Array, body: Array, how: Encoding) -> float | None:
        """Encode as chunks; see ``Method``."""
        encode = kernel_of(how.kernels, encode_coded)
        scale = encode(values, self.form(), body.view(np.uint32), how.key, how.keep)
        return scale if math.isfinite(scale) else None

    def add(self, total: Array, shape: Shape, body: Array, scale: float, kernels: Kernels) -> None:
        """Add decoded chunks; see ``Method``."""
        kernel_of(kernels, add_coded)(total, self.form(), body.view(np.uint32), scale)


class _Chunk(NamedTuple):
    """Where the values of a chunk are, and its part of the body.

    ``head``: the bits of the unit; the number of ``words`` in use, plus 2^16 for the second table.
    ``scales``: a code of each bucket's scale, uint8.
    """

    at: slice
    head: Array
    scales: Array
    states: Array
    words: Array


def _chunks(n: int, form: CodedLevels, body: Array) -> Iterator[_Chunk]:
    for begin in range(0, n, CHUNK):
        count = min(CHUNK, n - begin)
        part = body[form.body_words(begin) :][: form.chunk_words(count)]
        states = part.size - form.room(count) - STATE_WORDS
        yield _Chunk(
            slice(begin, begin + count),
            part[: coded_levels.HEADER_WORDS],
            part[coded_levels.HEADER_WORDS : states].view(np.uint8)[: -(-count // form.bucket)],
            part[states : states + STATE_WORDS],
            part[states + STATE_WORDS :],
        )


def encode_coded(values: Array, form: CodedLevels, body: Array, key: int, keep: bool) -> float:
    """Write the chunks of float32 ``values`` to ``body``, uint32 zeros.

    A value is rounded at random to one of its two neighbours on the grid of its chunk such that its
    mean is the value. With ``keep`` what is sent is subtracted from ``values``. Returns the largest
    number on any grid, 0 if only zeros are sent. If a value is not finite, that is NaN, and what
    was written is meaningless.
    """
    if peak_bits(values) > LARGEST_FINITE_BITS:
        return math.nan
    uniform = (random_words(key, values.size) >> np.uint32(8)).astype(np.float32)
    uniform *= np.float32(2.0**-24)
    scale = np.float32(0)
    for chunk in _chunks(values.size, form, body):
        part = values[chunk.at]
        levels = _encode_chunk(part, uniform[chunk.at], form, chunk)
        unit, _, highest = _head(chunk, form)
        scale = max(scale, unit * highest)
        if keep:
            part -= _values(levels, unit, chunk, form)
    return float(scale)


def _encode_chunk(values: Array, uniform: Array, form: CodedLevels, chunk: _Chunk) -> Array:
    """Write a chunk; return the levels, all 0 if nothing is written.

    If draws cost more than the slack, which is rare, a coarser grid is taken.
    """
    maxima = _maxima(values, form.bucket)
    codes = _codes_of(maxima)
    scales = np.repeat(_steps(maxima.max(), codes), form.bucket)[: values.size]
    ratio = np.zeros_like(values)
    np.divide(np.abs(values), scales, out=ratio, where=scales > 0)
    for grid, unit in _fitting(ratio, maxima.max(), form):
        place = ratio * coded_levels.LEVELS_OF_GRIDS[grid]
        floor = place.astype(np.int32)
        levels = floor + (uniform < place - floor.astype(np.float32))
        levels = np.where(values < 0, -levels, levels)
        table = int(grid >= form.first_wide)
        freqs = coded_levels.frequencies(form.levels, table)
        states, words = rans.encode(_symbols(levels), freqs)
        if len(words) <= chunk.words.size:
            chunk.head[:] = unit.view(np.uint32), len(words) + (table << 16)
            chunk.scales[:] = codes
            chunk.states[:] = np.array(states, np.uint64).view(np.uint32)
            chunk.words[: len(words)] = words
            return levels
    return np.zeros(values.size, np.int32)


def _fitting(ratio: Array, peak: np.float32, form: CodedLevels) -> Iterator[tuple[int, np.float32]]:
    """Yield the grids with which levels should fit into a chunk, and units, finest first.

    ``ratio``: of magnitudes and scales. No number on a grid is beyond float32.
    """
    bins = np.minimum((ratio * np.float32(BINS)).astype(np.int32), BINS - 1)
    counts = np.bincount(bins, minlength=BINS)
    counts[0] += ratio.size % 2  # the last symbol has two digits too
    fits = coded_levels.costs(form) @ counts <= form.limit(ratio.size)
    with np.errstate(over="ignore"):
        units = peak * coded_levels.STEPS_OF_GRIDS
        fits &= np.isfinite(units * np.repeat(np.array(form.highest, np.float32), form.grids))
    fits &= units.view(np.int32) >= MIN_NORMAL_BITS
    for grid in np.flatnonzero(fits)[::-1].tolist():
        yield grid, units[grid]


def _symbols(levels: Array) -> list[int]:
    """Return the symbols: of the first half of the levels, and the second half times 15."""
    width = -(-levels.size // 2)
    digits = np.full(2 * width, MOST)
    digits[: levels.size] += levels
    return (digits[:width] + RADIX * digits[width:]).tolist()


def _maxima(values: Array, bucket: int) -> Array:
    """Return the largest magnitude of each bucket."""
    padded = np.zeros(-(-values.size // bucket) * bucket, values.dtype)
    padded[: values.size] = np.abs(values)
    return padded.reshape(-1, bucket).max(1)


def _patterns(unit: np.float32) -> Array:
    """Return the bit patterns of ``unit`` times 1, 2^(-1/8), .. 2^(-7/8), int64."""
    return (unit * coded_levels.EIGHTHS).view(np.int32).astype(np.int64)


def _codes_of(maxima: Array) -> Array:
    """Return for each of ``maxima`` the code of the least scale that is not below it.

    Codes count eighths of a factor of two down from the largest of ``maxima``, to 255.
    """
    patterns = maxima.view(np.int32).astype(np.int64)
    above = _patterns(maxima.max()) - patterns[:, None]
    codes = np.where(above < 0, 0, (above >> 23) * 8 + np.arange(8)).max(1)
    return np.where(patterns < MIN_NORMAL_BITS, 255, np.minimum(codes, 255))


def _steps(unit: np.float32, codes: Array) -> Array:
    """Return ``unit`` * 2^(-code / 8) for each code, float32; 0 if it would be below 2^-126."""
    wide = codes.astype(np.int64)
    patterns = _patterns(unit)[wide % 8] - (wide // 8 << 23)
    return np.where(patterns < MIN_NORMAL_BITS, 0, patterns).astype(np.int32).view(np.float32)


def _head(chunk: _Chunk, form: CodedLevels) -> tuple[np.float32, int, np.float32]:
    """Return the unit, the number of words, and the highest level; ValueError if one is invalid."""
    table, n_words = divmod(int(chunk.head[1]), 1 << 16)
    if table > 1 or n_words > chunk.words.size:
        raise ValueError(f"a chunk has {n_words} words, expected at most {chunk.words.size}")
    return chunk.head[:1].view(np.float32)[0], n_words, np.float32(form.highest[table])


def _values(levels: Array, unit: np.float32, chunk: _Chunk, form: CodedLevels) -> Array:
    steps = np.repeat(_steps(unit, chunk.scales), form.bucket)[: levels.size]
    return steps * levels.astype(np.float32)


def add_coded(total: Array, form: CodedLevels, body: Array, scale: float) -> None:
    """Add the values encoded by ``encode_coded``; ValueError for bytes that it never writes."""
    for chunk in _chunks(total.size, form, body):
        unit, n_words, highest = _head(chunk, form)
        if not chunk.head.any():
            continue
        with np.errstate(over="ignore"):
            is_valid = unit >= 0 and unit * highest <= np.float32(scale)
        if not is_valid:
            raise ValueError(f"a unit is not in [0, {scale}], the range that the header gives")
        freqs = coded_levels.frequencies(form.levels, int(chunk.head[1] >> 16))
        states, part = chunk.states.view(np.uint64).tolist(), total[chunk.at]
        words = chunk.words[:n_words].tolist()
        symbols = np.array(rans.decode(states, words, -(-part.size // 2), freqs))
        levels = np.concatenate([symbols % RADIX, symbols // RADIX])[: part.size] - MOST
        part += _values(levels, unit, chunk, form)
