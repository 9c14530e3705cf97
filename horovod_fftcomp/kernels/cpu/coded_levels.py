"""CPU kernels of entropy-coded levels; see ``codec.methods.coded_qsgd``, which defines the bytes.

A chunk goes through all stages before the next one: its arrays fit into a cache.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from horovod_fftcomp.kernels import threads
from horovod_fftcomp.kernels.cpu.dense import fill_random
from horovod_fftcomp.kernels.cpu.jit import inlined, kernel
from horovod_fftcomp.kernels.cpu.positions import decode_chunks, encode_chunks
from horovod_fftcomp.kernels.cpu.sparse import peak_bits
from horovod_fftcomp.kernels.cpu.value_codes import float_of
from horovod_fftcomp.kernels.rans_tables import decoder_table, encoder_table
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import coded_levels as coded
from horovod_fftcomp.wire.coded_levels import BINS, CHUNK, HEADER_WORDS, STATE_WORDS, CodedLevels
from horovod_fftcomp.wire.radix import GROUP

_LEAST_CHUNKS = 4  # per thread, at least
_LEAST_NORMAL, _INFINITY = np.int64(0x00800000), np.int64(0x7F800000)
_LEAST, _LARGEST = np.float32(2.0**-126), np.float32(np.finfo(np.float32).max)
_UNIT, _BINS = np.float32(2.0**-24), np.float32(BINS)
_TOP_BIN, _MIDDLE, _RADIX = np.int32(BINS - 1), np.int32(coded.MOST), np.int32(coded.RADIX)
_INVERSE = np.int32(-(-(1 << 16) // coded.RADIX))  # exact for 8 bits
_FAULTS = (
    "",
    "a chunk has more words than it has room for",
    "a unit is not in the range that the header gives",
    "a chunk of the entropy code is corrupt: it ends in other states",
)


@functools.cache
def _tables(form: CodedLevels) -> tuple[Array, ...]:
    """Return (bucket, first wide grid, the highest levels), costs, and the code's tables."""
    both = [coded.frequencies(form.levels, table) for table in (0, 1)]
    numbers = np.array([form.bucket, form.first_wide, *form.highest], np.int64)
    encoders = map(np.array, zip(*map(encoder_table, both), strict=True))
    return numbers, coded.costs(form), np.array(list(map(decoder_table, both))), *encoders


def _parts(n: int, form: CodedLevels) -> list[tuple[slice, slice, int, Array]]:
    """Return for each thread its (elements, body, first chunk), and of its chunks (room, limit)."""
    found = []
    for a, b in threads.ranges(-(-n // CHUNK), _LEAST_CHUNKS):
        begin, end = a * CHUNK, min(b * CHUNK, n)
        sizes = [CHUNK] * (b - a - 1) + [end - (b - 1) * CHUNK]
        pairs = [
            (form.room(m), coded.FRACTION * (32 * form.room(m) - form.slack(m))) for m in sizes
        ]
        body = slice(form.body_words(begin), form.body_words(end))
        found.append((slice(begin, end), body, a, np.array(pairs, np.int64)))
    return found


def encode_coded(values: Array, form: CodedLevels, body: Array, key: int, keep: bool) -> float:
    """See ``codec.methods.coded_qsgd.encode_coded``."""
    numbers, costs, _, *encoders = _tables(form)

    def work(at: slice, to: slice, chunk: int, rooms: Array) -> float:
        own = values[at], body[to], rooms, np.uint64(key), chunk, keep
        return encode_coded_chunks(*own, numbers, costs, *encoders)

    scales = threads.each(work, _parts(values.size, form))
    return math.nan if any(map(math.isnan, scales)) else max(scales)


@kernel
def encode_coded_chunks(
    values, body, rooms, key, first, keep, numbers, costs, freqs, reciprocals, shifts, biases
):  # fmt: skip
    """Write consecutive chunks; return the largest number on a grid, NaN for one not finite."""
    bucket, random, maxima = numbers[0], np.empty(CHUNK, np.uint32), np.empty(CHUNK // 64, np.int64)
    ratio, levels = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.int32)
    counts, symbols = np.empty(BINS, np.int32), np.empty(GROUP, np.uint8)
    out = np.empty(STATE_WORDS + GROUP // 2, np.uint32)  # at most 12 bits a symbol
    length, scale, at = np.empty(1, np.uint16), np.float32(0), 0
    for chunk in range(rooms.shape[0]):
        part, room = values[chunk * CHUNK : (chunk + 1) * CHUNK], rooms[chunk, 0]
        own, codes, states = _split(body, at, part.size, bucket, room)
        at += own.size
        peak = _write_maxima(part, bucket, maxima)
        if peak >= _INFINITY:
            return np.nan
        _write_ratios(part, maxima, float_of(peak), bucket, codes, ratio)
        _count(ratio[: part.size], counts)
        for half in range(2):
            fill_random(key, 2 * (first + chunk) + half, random[half * GROUP : (half + 1) * GROUP])
        grid, used = np.int64(coded.GRIDS), 0
        while used == 0:
            grid = _fitting(grid - 1, counts, costs, rooms[chunk, 1], float_of(peak), numbers)
            if grid < 0:
                own[:] = np.uint32(0)
                break
            _draw(part, ratio, coded.LEVELS_OF_GRIDS[grid], random, levels)
            t, width = np.int64(grid >= numbers[1]), _join(levels, part.size, symbols)
            code = freqs[t], reciprocals[t], shifts[t], biases[t]
            used = encode_chunks(symbols[:width], *code, length, out)
            used = used if length[0] <= room else 0
        if used:
            unit = np.float32(float_of(peak) * coded.STEPS_OF_GRIDS[grid])
            own[:1].view(np.float32)[0] = unit
            own[1] = np.uint32(length[0] + (t << 16))
            own[states : states + used] = out[:used]
            scale = max(scale, np.float32(unit * np.float32(numbers[2 + t])))
            if keep:
                _add_values(part, levels, codes, unit, bucket, np.float32(-1))
    return np.float64(scale)


@inlined
def _split(body, at, n, bucket, room):
    """Return a chunk's part of the body, the codes of its scales, and where its states begin."""
    states = HEADER_WORDS + ((n + bucket - 1) // bucket + 3) // 4
    own = body[at : at + states + STATE_WORDS + room]
    return own, own[HEADER_WORDS:states].view(np.uint8), states


@inlined
def _write_maxima(part, bucket, maxima):
    """Write the bits of the largest magnitudes of buckets; return those of the largest."""
    peak = np.int64(0)
    for b in range((part.size + bucket - 1) // bucket):
        maxima[b] = peak_bits(part[b * bucket : (b + 1) * bucket].view(np.int32))
        peak = max(peak, maxima[b])
    return peak


@inlined
def _write_patterns(unit, patterns):
    """Write the bit patterns of the unit times 1, 2^(-1/8), .. 2^(-7/8)."""
    for k in range(8):
        patterns[k : k + 1].view(np.float32)[0] = np.float32(unit * coded.EIGHTHS[k])


@inlined
def _step(patterns, code):
    pattern = np.int64(patterns[code & 7]) - (np.int64(code >> 3) << 23)
    return float_of(pattern) if pattern >= _LEAST_NORMAL else np.float32(0)


@inlined
def _write_ratios(part, maxima, peak, bucket, codes, ratio):
    """Write the codes of scales, and magnitudes relative to them."""
    patterns = np.empty(8, np.int32)
    _write_patterns(peak, patterns)
    for b in range((part.size + bucket - 1) // bucket):
        code = np.int64(0 if maxima[b] >= _LEAST_NORMAL else 255)
        for k in range(8):
            above = patterns[k] - maxima[b]
            code = max(code, (above >> 23) * 8 + k) if above >= 0 else code
        codes[b] = np.uint8(min(code, np.int64(255)))
        scale = _step(patterns, np.int64(codes[b]))
        piece, here = part[b * bucket : (b + 1) * bucket], ratio[b * bucket : (b + 1) * bucket]
        here[:] = np.float32(0)
        for i in range(piece.size if scale > 0 else 0):
            here[i] = np.float32(np.abs(piece[i]) / scale)


@inlined
def _count(ratio, counts):
    counts[:] = np.int32(0)
    counts[0] = np.int32(ratio.size & 1)  # the last symbol has two digits too
    for x in ratio:
        counts[min(np.int32(x * _BINS), _TOP_BIN)] += np.int32(1)


@inlined
def _fitting(first, counts, costs, limit, peak, numbers):
    """Return the finest grid from ``first`` down with which levels should fit, or -1."""
    for grid in range(first, -1, -1):
        cost = np.int32(0)
        for b in range(BINS):
            cost += costs[grid, b] * counts[b]
        unit = np.float32(peak * coded.STEPS_OF_GRIDS[grid])
        highest = np.float32(numbers[3] if grid >= numbers[1] else numbers[2])
        if cost <= limit and unit >= _LEAST and np.float32(unit * highest) <= _LARGEST:
            return grid
    return -1


@inlined
def _draw(part, ratio, count, random, levels):
    for i in range(part.size):
        place = np.float32(ratio[i] * count)
        floor = np.int32(place)
        u = np.float32(np.int32(random[i] >> np.uint32(8))) * _UNIT
        level = np.int32(floor + np.int32(u < np.float32(place - np.float32(floor))))
        levels[i] = np.int32(-level) if part[i] < np.float32(0) else level


@inlined
def _join(levels, n, symbols):
    """Write the symbols of ``n`` levels, see ``codec.methods.coded_qsgd``; return their number."""
    width = (n + 1) // 2
    if n < 2 * width:
        levels[n] = np.int32(0)
    for i in range(width):
        high = np.int32(_RADIX * np.int32(levels[width + i] + _MIDDLE))
        symbols[i] = np.uint8(np.int32(levels[i] + _MIDDLE) + high)
    return width


@inlined
def _add_values(part, levels, codes, unit, bucket, sign):
    patterns = np.empty(8, np.int32)
    _write_patterns(unit, patterns)
    for b in range((part.size + bucket - 1) // bucket):
        step = np.float32(sign * _step(patterns, np.int64(codes[b])))
        piece, here = part[b * bucket : (b + 1) * bucket], levels[b * bucket : (b + 1) * bucket]
        for i in range(piece.size):
            piece[i] += np.float32(step * np.float32(here[i]))


def add_coded(total: Array, form: CodedLevels, body: Array, scale: float) -> None:
    """See ``codec.methods.coded_qsgd.add_coded``."""
    numbers, _, decoders, *_ = _tables(form)

    def work(at: slice, to: slice, _: int, rooms: Array) -> int:
        return add_coded_chunks(total[at], body[to], rooms, np.float32(scale), numbers, decoders)

    if fault := max(threads.each(work, _parts(total.size, form))):
        raise ValueError(_FAULTS[fault])


@kernel
def add_coded_chunks(total, body, rooms, scale, numbers, decoders):
    """Add the values of consecutive chunks; return 0, or which fault the first invalid one has."""
    bucket, at = numbers[0], 0
    levels, symbols = np.empty(CHUNK, np.int32), np.empty(GROUP, np.uint8)
    length = np.empty(1, np.uint16)
    for chunk in range(rooms.shape[0]):
        part, room = total[chunk * CHUNK : (chunk + 1) * CHUNK], rooms[chunk, 0]
        own, codes, states = _split(body, at, part.size, bucket, room)
        at += own.size
        table, n_words = np.int64(own[1] >> np.uint32(16)), np.int64(own[1] & np.uint32(0xFFFF))
        if table > 1 or n_words > room:
            return np.int64(1)
        if own[0] == 0 and own[1] == 0:
            continue
        unit = own[:1].view(np.float32)[0]
        if not (unit >= 0 and np.float32(unit * np.float32(numbers[2 + table])) <= scale):
            return np.int64(2)
        width, length[0] = (part.size + 1) // 2, n_words
        if not decode_chunks(own[states:], length, decoders[table], symbols[:width]):
            return np.int64(3)
        for i in range(width):
            both = np.int32(symbols[i])
            high = np.int32(np.int32(both * _INVERSE) >> np.int32(16))
            levels[i] = np.int32(both - np.int32(_RADIX * high)) - _MIDDLE
            levels[width + i] = np.int32(high - _MIDDLE)
        _add_values(part, levels, codes, unit, bucket, np.float32(1))
    return np.int64(0)
