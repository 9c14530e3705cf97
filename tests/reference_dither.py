"""Dithered levels in plain NumPy and whole numbers: the definition that kernels must match."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.methods.sums import peak_bits, rows_of
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS, MIN_NORMAL_BITS
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import coded_levels as coded
from horovod_fftcomp.wire.coded_levels import CHUNK, MOST, RADIX, STATE_WORDS, CodedLevels
from horovod_fftcomp.wire.counter_rng import random_words
from horovod_fftcomp.wire.rans import LANES, LOWEST_STATE, PRECISION

_HALF = 1 << (coded.DITHER_BITS - 1)  # half a level, in units of a dither
_MAGNITUDE_BITS = 11  # of the whole numbers whose squares are summed


def encode_symbols(
    symbols: Sequence[int], tables: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Return the final states and the words of one chunk.

    ``tables``: for each place the frequencies of all symbols; they sum to 2^PRECISION, those of
    symbols in the chunk are above 0.
    """
    states, words = [LOWEST_STATE] * LANES, []
    for i in reversed(range(len(symbols))):
        f, state = tables[i][symbols[i]], states[i % LANES]
        if state >= f << (63 - PRECISION):
            words.append(state & 0xFFFFFFFF)
            state >>= 32
        start = _starts(tuple(tables[i]))[symbols[i]]
        states[i % LANES] = (state // f << PRECISION) + state % f + start
    return states, words[::-1]


def decode_symbols(
    states: Sequence[int], words: Sequence[int], tables: Sequence[Sequence[int]]
) -> list[int]:
    """Return the symbols that ``encode_symbols`` encoded; ValueError for corrupt words."""
    left, states, symbols = list(words[::-1]), list(states), []
    for i, freqs in enumerate(tables):
        state, starts = states[i % LANES], _starts(tuple(freqs))
        slot = state % (1 << PRECISION)
        symbol = bisect.bisect_right(starts, slot) - 1
        state = freqs[symbol] * (state >> PRECISION) + slot - starts[symbol]
        if state < LOWEST_STATE and left:
            state = state << 32 | left.pop()
        states[i % LANES] = state
        symbols.append(symbol)
    if left or any(state != LOWEST_STATE for state in states):
        raise ValueError("a chunk of the entropy code is corrupt: it ends in other states")
    return symbols


@functools.lru_cache(1 << 14)
def _starts(freqs: tuple[int, ...]) -> list[int]:
    """Return the first slot of each symbol."""
    return list(itertools.accumulate(freqs, initial=0))[:-1]


class _Chunk(NamedTuple):
    """Where the values of a chunk are, and its part of the body.

    ``head``: the bits of the unit; the number of ``words`` in use, plus 2^16 for the second tables.
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
        part = body[form.words_before(begin) :][: form.chunk_words(count)]
        states = part.size - form.room(count) - STATE_WORDS
        yield _Chunk(
            slice(begin, begin + count),
            part[: coded.HEADER_WORDS],
            part[coded.HEADER_WORDS : states].view(np.uint8)[: -(-count // form.bucket)],
            part[states : states + STATE_WORDS],
            part[states + STATE_WORDS :],
        )


class _Dithers(NamedTuple):
    """Of the two values of each symbol: 1 or -1, magnitude in levels, and part of half a level."""

    signs: Array
    sizes: Array
    parts: Array


def _dithers(key: int, n: int) -> list[_Dithers]:
    """Return the dithers of each chunk of ``n`` values.

    ``key``: 32 random bits that all ranks share, then what is added to the words drawn with them.
    """
    found = []
    words = random_words(key >> 32, -(-n // CHUNK) * CHUNK // 2) + np.uint32(key & 0xFFFFFFFF)
    for own in words.reshape(-1, CHUNK // 2):
        u = (own >> np.uint32(32 - coded.DITHER_BITS)).astype(np.int32) - _HALF
        size = np.where(u < 0, ~u, u)
        sizes = (size.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-coded.DITHER_BITS)
        signs = np.where(u < 0, np.float32(-1), np.float32(1))
        found.append(_Dithers(signs, sizes, size * coded.PARTS // _HALF))
    return found


def encode_coded(values: Array, form: CodedLevels, body: Array, key: int, keep: bool) -> float:
    """Write the key and the chunks of float32 ``values`` to ``body``, uint32 zeros.

    With ``keep`` what is sent is subtracted from ``values``. Returns the largest number on any
    grid, 0 if only zeros are sent. If a value or that number is not finite, it is NaN, and what
    was written is meaningless.
    """
    if peak_bits(values) > LARGEST_FINITE_BITS:
        return math.nan
    body[: coded.KEY_WORDS] = key & 0xFFFFFFFF, key >> 32
    scale, dithers = np.float32(0), _dithers(key, values.size)
    for chunk, own in zip(_chunks(values.size, form, body), dithers, strict=True):
        part = values[chunk.at]
        levels = _encode_chunk(part, own, form, chunk)
        if levels is not None:
            unit, _, highest = _head(chunk, form)
            with np.errstate(over="ignore", invalid="ignore"):
                scale = max(scale, unit * highest)
                if keep:
                    part -= _values(levels, own, unit, chunk, form)
    return float(scale) if np.isfinite(scale) else math.nan


def _encode_chunk(
    values: Array, dithers: _Dithers, form: CodedLevels, chunk: _Chunk
) -> Array | None:
    """Write a chunk; return the levels, None if nothing is written.

    If levels cost more than the slack, which is rare, a coarser grid is taken.
    """
    peak, codes = _scales(values, form)
    steps = _steps(peak, codes, form, values.size)
    ratio = np.zeros_like(values)
    np.divide(values, steps, out=ratio, where=steps > 0)
    signs, sizes = _spread(dithers.signs, values.size), _spread(dithers.sizes, values.size)
    parts = dithers.parts[: -(-values.size // 2)]
    for choice, unit in _fitting(np.abs(ratio), peak, form):
        grid, table = divmod(choice, 2)
        place = ratio * signs * coded.LEVELS_OF_GRIDS[grid]
        levels = (place + (sizes + np.float32(MOST + 1.5))).astype(np.int32) - (MOST + 1)
        symbols = _symbols(levels)
        states, words = encode_symbols(symbols, _frequencies(form, table, parts))
        if len(words) <= chunk.words.size:
            chunk.head[:] = unit.view(np.uint32), len(words) + (table << 16)
            chunk.scales[:] = codes
            chunk.states[:] = np.array(states, np.uint64).view(np.uint32)
            chunk.words[: len(words)] = words
            return levels
    return None


def _frequencies(form: CodedLevels, table: int, parts: Array) -> list[tuple[int, ...]]:
    return [coded.frequencies(form, table, part) for part in parts.tolist()]


def _fitting(ratio: Array, peak: np.float32, form: CodedLevels) -> Iterator[tuple[int, np.float32]]:
    """Yield the choices with which levels should fit into a chunk, and units, finest first.

    ``ratio``: of magnitudes and scales.
    """
    bins = np.minimum((ratio * np.float32(coded.BINS_OF_SCALE)).astype(np.int32), coded.BINS - 1)
    counts = np.bincount(bins, minlength=coded.BINS)
    counts[0] += ratio.size % 2  # the last symbol has two digits too
    fits = coded.costs(form) @ counts <= form.limit(ratio.size)
    with np.errstate(over="ignore"):
        units = np.repeat(peak * coded.STEPS_OF_GRIDS, 2)
    fits &= units.view(np.int32) >= MIN_NORMAL_BITS
    for choice in np.flatnonzero(fits)[::-1].tolist():
        if form.exists(choice):
            yield choice, units[choice]


def _spread(of_symbols: Array, n: int) -> Array:
    """Return what the values of each symbol share for each of the ``n`` values of a chunk."""
    width = -(-n // 2)
    return np.concatenate([of_symbols[:width]] * 2)[:n]


def _symbols(levels: Array) -> list[int]:
    """Return the symbols: of the first half of the levels, and the second half times 15."""
    width = -(-levels.size // 2)
    digits = np.full(2 * width, MOST)
    digits[: levels.size] += levels
    return (digits[:width] + RADIX * digits[width:]).tolist()


def _scales(values: Array, form: CodedLevels) -> tuple[np.float32, Array]:
    """Return the largest scale, and the code of each bucket's scale, uint8.

    A scale is the root of the mean square, or a sixth of the largest magnitude if that is more,
    rounded up to an eighth of a factor of two. Codes count eighths down from the largest scale;
    ``NO_SCALE`` is of buckets whose values are sent as zeros. In whole numbers, whose sums do not
    depend on their order.
    """
    rows = rows_of(np.abs(values), form.bucket)
    counts = np.full(len(rows), form.bucket)
    counts[-1] = values.size - (len(rows) - 1) * form.bucket
    exponents = (rows.max(1).view(np.int32) >> 23).astype(np.int64)  # 0: no normal number
    # The largest magnitude becomes 2^10 to 2^11; denormal numbers may become anything below.
    shifts = (_MAGNITUDE_BITS + 126 - exponents)[:, None]
    whole = np.ldexp(rows.astype(np.float64), shifts).astype(np.int64)
    squares = np.maximum((whole**2).sum(1) // counts, (whole.max(1) + 1) ** 2 // 35) + 1
    powers = np.int64(np.frexp(squares.astype(np.float64))[1]) - 1
    mantissas = squares << (22 - powers)
    eighths = 4 * powers + sum((mantissas > t).astype(np.int64) for t in coded.QUARTERS)
    eighths += 8 * (exponents - _MAGNITUDE_BITS + 1)
    eighths = np.where(exponents > 0, np.clip(eighths, 8, 8 * 255 - 1), 0)
    peak = int(eighths.max())
    codes = np.where(exponents > 0, np.minimum(peak - eighths, coded.NO_SCALE), coded.NO_SCALE)
    pattern = coded.EIGHTHS.view(np.int32)[-peak % 8] + ((-(-peak // 8) - 127) << 23)
    return np.int32(pattern).view(np.float32), codes.astype(np.uint8)


def _steps(unit: np.float32, codes: Array, form: CodedLevels, n: int) -> Array:
    """Return ``unit`` * 2^(-code / 8) for each of ``n`` values; 0 if that is below 2^-126."""
    wide = codes.astype(np.int64)
    patterns = (unit * coded.EIGHTHS).view(np.int32).astype(np.int64)
    steps = patterns[wide % 8] - (wide // 8 << 23)
    steps = np.where((steps < MIN_NORMAL_BITS) | (wide == coded.NO_SCALE), 0, steps)
    return np.repeat(steps.astype(np.int32).view(np.float32), form.bucket)[:n]


def _head(chunk: _Chunk, form: CodedLevels) -> tuple[np.float32, int, np.float32]:
    """Return the unit, the number of words, and the highest level; ValueError if one is invalid."""
    table, n_words = divmod(int(chunk.head[1]), 1 << 16)
    if table > 1 or n_words > chunk.words.size:
        raise ValueError(f"a chunk has {n_words} words, expected at most {chunk.words.size}")
    return chunk.head[:1].view(np.float32)[0], n_words, np.float32(form.highest[table])


def _values(
    levels: Array, dithers: _Dithers, unit: np.float32, chunk: _Chunk, form: CodedLevels
) -> Array:
    steps = _steps(unit, chunk.scales, form, levels.size)
    signs, sizes = _spread(dithers.signs, levels.size), _spread(dithers.sizes, levels.size)
    return steps * (signs * (levels.astype(np.float32) - sizes))


def add_coded(total: Array, form: CodedLevels, body: Array, scale: float) -> None:
    """Add the values encoded by ``encode_coded``; ValueError for bytes that it never writes."""
    key = int(body[0]) | int(body[1]) << 32
    dithers = _dithers(key, total.size)
    for chunk, own in zip(_chunks(total.size, form, body), dithers, strict=True):
        unit, n_words, highest = _head(chunk, form)
        if not chunk.head.any():
            continue
        with np.errstate(over="ignore"):
            is_valid = unit >= 0 and unit * highest <= np.float32(scale)
        if not is_valid:
            raise ValueError(f"a unit is not in [0, {scale}], the range that the header gives")
        states, part = chunk.states.view(np.uint64).tolist(), total[chunk.at]
        freqs = _frequencies(form, int(chunk.head[1] >> 16), own.parts[: -(-part.size // 2)])
        symbols = np.array(decode_symbols(states, chunk.words[:n_words].tolist(), freqs))
        levels = np.concatenate([symbols % RADIX, symbols // RADIX])[: part.size] - MOST
        part += _values(levels, own, unit, chunk, form)
