"""CPU kernels of dithered levels; see ``codec.methods.dither``, which defines the bytes.

A chunk goes through all stages before the next one: its arrays fit into a cache.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from horovod_fftcomp.kernels.cpu.arrays import as_float32, as_int32, as_uint8, copy_into
from horovod_fftcomp.kernels.cpu.dense import fill_random
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.jit import kernel_of
from horovod_fftcomp.kernels.cpu.rans import decode_chunk, encode_chunk
from horovod_fftcomp.kernels.cpu.sparse import peak_bits
from horovod_fftcomp.kernels.cpu.value_codes import float_of
from horovod_fftcomp.kernels.rans_tables import decoder_table, encoder_table
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import coded_levels as coded
from horovod_fftcomp.wire.coded_levels import (
    BINS,
    CHUNK,
    HEADER_WORDS,
    KEY_WORDS,
    STATE_WORDS,
    CodedLevels,
)
from horovod_fftcomp.wire.radix import GROUP

_LEAST_NORMAL, _INFINITY = np.int64(0x00800000), np.int64(0x7F800000)
_LEAST = np.float32(2.0**-126)
_WHOLE_EXPONENT = np.int64(127 + 10)  # the largest magnitude becomes 2^10 to 2^11
_UNIT, _BINS = np.float32(2.0**-coded.DITHER_BITS), np.float32(coded.BINS_OF_SCALE)
_MIDDLE_OF_UNIT, _NO_SCALE = np.float32(0.5), np.int64(coded.NO_SCALE)
_ABOVE, _LEAST_ABOVE = np.float32(coded.MOST + 1.5), np.int32(coded.MOST + 1)
_SHIFT, _HALF = np.uint32(32 - coded.DITHER_BITS), np.int32(1 << (coded.DITHER_BITS - 1))
_PART_SHIFT = np.int32(coded.DITHER_BITS - 1 - coded.PARTS.bit_length() + 1)
_EIGHTH_BITS = coded.EIGHTHS.view(np.int32)
_TOP_BIN, _MIDDLE, _RADIX = np.int32(BINS - 1), np.int32(coded.MOST), np.int32(coded.RADIX)
_INVERSE = np.int32(-(-(1 << 16) // coded.RADIX))  # exact for 8 bits


@functools.cache
def tables_of(form: CodedLevels) -> tuple[Array, ...]:
    """Return (bucket, the highest levels, the ends of grids), costs, and the code's tables.

    Of either set of tables, one part after another.
    """
    both = [
        [coded.frequencies(form, table, part) for part in range(coded.PARTS)] for table in (0, 1)
    ]
    encoders = [
        [np.concatenate(arrays) for arrays in zip(*map(encoder_table, parts), strict=True)]
        for parts in both
    ]
    decoders = np.array([np.concatenate([*map(decoder_table, parts)]) for parts in both])
    numbers = np.array([form.bucket, *form.highest, *form.ends], np.int64)
    return numbers, coded.costs(form), decoders, *map(np.array, zip(*encoders, strict=True))


def room_and_limit(form: CodedLevels, n: int) -> tuple[int, int]:
    """Return of a chunk of ``n`` values the words of code, and the highest cost that should fit."""
    return form.room(n), coded.FRACTION * (32 * form.room(n) - form.slack(n))


@allocating
def encode_coded_chunks(
    values, body, rooms, key, first, keep, numbers, costs, freqs, reciprocals, shifts, biases
):  # fmt: skip
    """Write consecutive chunks; return the largest number on a grid, NaN for one not finite."""
    bucket, dithers = numbers[0], np.empty(GROUP, np.uint32)
    eighths = np.empty(CHUNK // 128, np.int64)
    ratio, levels = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.int32)
    counts, symbols = np.empty(BINS, np.int32), np.empty(GROUP, np.uint16)
    bins, four = np.empty(CHUNK, np.uint8), np.zeros((4, BINS), np.int32)
    out = np.empty(STATE_WORDS + GROUP // 2, np.uint32)  # at most 12 bits a symbol
    scale, at = np.float32(0), 0
    for chunk in range(rooms.shape[0]):
        part, room = values[chunk * CHUNK : (chunk + 1) * CHUNK], rooms[chunk, 0]
        own, codes, states = _split(body, at, part.size, bucket, room)
        at += own.size
        peak = _write_scales(part, bucket, eighths, codes)
        if np.isnan(peak):
            return np.nan
        _write_ratios(part, peak, codes, bucket, ratio)
        _count(ratio[: part.size], bins, four, counts)
        _draw(key, first + chunk, dithers)
        choice, n_words = 2 * numbers[4], room + 1  # those with tails have finer grids
        while n_words > room:
            choice = _fitting(choice - 1, counts, costs, rooms[chunk, 1], peak, numbers)
            if choice < 0:
                own[:] = np.uint32(0)
                break
            t, width = choice & 1, (part.size + 1) // 2
            _write_levels(ratio[: part.size], coded.LEVELS_OF_GRIDS[choice >> 1], dithers, levels)
            _join(levels, part.size, dithers, symbols)
            code = freqs[t], reciprocals[t], shifts[t], biases[t]
            n_words = encode_chunk(symbols[:width], *code, out)
        if choice >= 0:
            unit = np.float32(peak * coded.STEPS_OF_GRIDS[choice >> 1])
            as_float32(own[:1])[0] = unit
            own[1] = np.uint32(n_words + (t << 16))
            copy_into(own[states : states + STATE_WORDS + n_words], out)
            scale = max(scale, np.float32(unit * np.float32(numbers[1 + t])))
            if keep:
                _add_values(part, levels, dithers, codes, unit, bucket, np.float32(-1))
    return np.float64(scale)


@allocating
def _split(body, at, n, bucket, room):
    """Return a chunk's part of the body, the codes of its scales, and where its states begin."""
    states = HEADER_WORDS + ((n + bucket - 1) // bucket + 3) // 4
    own = body[at : at + states + STATE_WORDS + room]
    return own, as_uint8(own[HEADER_WORDS:states]), states


@inlined
def _eighths_of(piece, most, found):
    """Return a bucket's scale, see ``codec.methods.dither``, in eighths above 2^-127.

    ``most``: bits of the largest magnitude, at least those of a normal number; ``found``: room for
    one float32.
    """
    exponent = most >> 23
    # Two factors, since 2^shift may be above the largest number. Both products are exact, but
    # where they end below 1: then the whole number is 0.
    shift = _WHOLE_EXPONENT - exponent
    half = shift >> 1
    up, further = float_of((half + 127) << 23), float_of((shift - half + 127) << 23)
    total = np.uint32(0)
    for i in range(piece.size):
        whole = np.int32(np.float32(np.float32(np.abs(piece[i]) * up) * further))
        total = np.uint32(total + np.uint32(whole * whole))
    largest = ((most & 0x7FFFFF | 0x800000) >> 13) + 1
    square = max(np.int64(total) // piece.size, largest * largest // 35) + 1
    found[0] = np.float32(square)  # below 2^23, so exact
    pattern = np.int64(as_int32(found)[0])
    half = pattern >> 1 & 0x3FFFFF | 0x400000
    above = np.int64(0)
    for quarter in coded.QUARTERS:
        above += half > quarter
    eighths = 4 * ((pattern >> 23) - 127) + above + 8 * (exponent - 10)
    return min(max(eighths, np.int64(8)), np.int64(8 * 255 - 1))


@allocating
def _write_scales(part, bucket, eighths, codes):
    """Write the codes of scales; return the largest scale, NaN if a value is not finite."""
    n, peak = (part.size + bucket - 1) // bucket, np.int64(0)
    found = np.empty(1, np.float32)
    for b in range(n):
        piece = part[b * bucket : (b + 1) * bucket]
        most = peak_bits(as_int32(piece))
        if most >= _INFINITY:
            return np.float32(np.nan)
        eighths[b] = _eighths_of(piece, most, found) if most >= _LEAST_NORMAL else np.int64(0)
        peak = max(peak, eighths[b])
    for b in range(n):
        less = peak - eighths[b] if eighths[b] else _NO_SCALE
        codes[b] = np.uint8(min(less, _NO_SCALE))
    up = (peak + 7) >> 3
    return float_of(np.int64(_EIGHTH_BITS[(up << 3) - peak]) + ((up - 127) << 23))


@inlined
def _write_patterns(unit, patterns):
    """Write the bit patterns of the unit times 1, 2^(-1/8), .. 2^(-7/8)."""
    for k in range(8):
        as_float32(patterns[k : k + 1])[0] = np.float32(unit * coded.EIGHTHS[k])


@inlined
def _step(patterns, code):
    pattern = np.int64(patterns[code & 7]) - (np.int64(code >> 3) << 23)
    exists = pattern >= _LEAST_NORMAL and code != _NO_SCALE
    return float_of(pattern) if exists else np.float32(0)


@allocating
def _write_ratios(part, peak, codes, bucket, ratio):
    """Write the values relative to their scales."""
    patterns = np.empty(8, np.int32)
    _write_patterns(peak, patterns)
    for b in range((part.size + bucket - 1) // bucket):
        scale = _step(patterns, np.int64(codes[b]))
        piece, here = part[b * bucket : (b + 1) * bucket], ratio[b * bucket : (b + 1) * bucket]
        here[:] = np.float32(0)
        for i in range(piece.size if scale > 0 else 0):
            here[i] = np.float32(piece[i] / scale)


@inlined
def _count(ratio, bins, four, counts):
    """Count magnitudes by bin; ``bins`` and ``four``, zero at the end too, are room for it.

    Four counters of each bin: with one, an addition often waits for the one before it.
    """
    for i in range(ratio.size):
        bins[i] = np.uint8(min(np.int32(np.abs(ratio[i]) * _BINS), _TOP_BIN))
    whole = ratio.size // 4 * 4
    for i in range(0, whole, 4):
        for k in range(4):
            four[k, bins[i + k]] += np.int32(1)
    for i in range(whole, ratio.size):
        four[0, bins[i]] += np.int32(1)
    for b in range(BINS):
        counts[b] = four[0, b] + four[1, b] + four[2, b] + four[3, b]
    four[:] = np.int32(0)
    counts[0] += np.int32(ratio.size & 1)  # the last symbol has two digits too


@inlined
def _fitting(first, counts, costs, limit, peak, numbers):
    """Return the finest choice from ``first`` down with which levels should fit, or -1."""
    for choice in range(first, -1, -1):
        if choice >> 1 >= numbers[3 + (choice & 1)]:
            continue
        cost = np.int32(0)
        for b in range(BINS):
            cost += costs[choice, b] * counts[b]
        unit = np.float32(peak * coded.STEPS_OF_GRIDS[choice >> 1])
        if cost <= limit and unit >= _LEAST:
            return choice
    return np.int64(-1)


@inlined
def _draw(key, chunk, dithers):
    """Write the dithers of a chunk's symbols: 20 bits, from the middle on."""
    fill_random(key >> np.uint64(32), chunk, dithers)
    offset = np.uint32(key & np.uint64(0xFFFFFFFF))
    for j in range(dithers.size):
        dithers[j] = np.uint32(dithers[j] + offset) >> _SHIFT


@inlined
def _of_dither(dither):
    """Return (sign, magnitude in levels) of a dither."""
    above = np.int32(np.int32(dither) - _HALF)
    size = np.int32(~above) if above < 0 else above
    sign = np.float32(-1) if above < 0 else np.float32(1)
    return sign, np.float32(np.float32(np.float32(size) + _MIDDLE_OF_UNIT) * _UNIT)


@inlined
def _part_of(dither):
    """Return the part of a dither."""
    above = np.int32(np.int32(dither) - _HALF)
    return np.int32((np.int32(~above) if above < 0 else above) >> _PART_SHIFT)


@inlined
def _write_levels(ratio, count, dithers, levels):
    width = (ratio.size + 1) // 2
    for begin in (0, width):
        here, there = ratio[begin : begin + width], levels[begin : begin + width]
        for j in range(here.size):
            sign, size = _of_dither(dithers[j])
            place = np.float32(np.float32(here[j] * sign) * count)
            there[j] = np.int32(np.int32(place + np.float32(size + _ABOVE)) - _LEAST_ABOVE)


@inlined
def _join(levels, n, dithers, symbols):
    """Write the symbols of ``n`` levels, see ``codec.methods.dither``, after those of parts."""
    width = (n + 1) // 2
    if n < 2 * width:
        levels[n] = np.int32(0)
    for i in range(width):
        high = np.int32(_RADIX * np.int32(levels[width + i] + _MIDDLE))
        symbol = np.int32(np.int32(levels[i] + _MIDDLE) + high)
        symbols[i] = np.uint16(np.int32(symbol + (_part_of(dithers[i]) << np.int32(8))))


@allocating
def _add_values(part, levels, dithers, codes, unit, bucket, factor):
    """Add what ``levels`` stand for, times ``factor``, which is 1 or -1."""
    patterns, width = np.empty(8, np.int32), (part.size + 1) // 2
    _write_patterns(unit, patterns)
    for b in range((part.size + bucket - 1) // bucket):
        step = np.float32(factor * _step(patterns, np.int64(codes[b])))
        first, last = b * bucket, min((b + 1) * bucket, part.size)
        middle = min(max(first, width), last)
        # Two loops, since with one whose index wraps around nothing is vectorized.
        for begin, end, back in ((first, middle, 0), (middle, last, width)):
            total, own = part[begin:end], levels[begin:end]
            drawn = dithers[begin - back : end - back]
            for i in range(total.size):
                sign, size = _of_dither(drawn[i])
                sent = np.float32(sign * np.float32(np.float32(own[i]) - size))
                total[i] += np.float32(step * sent)


@allocating
def add_coded_chunks(total, body, rooms, key, first, scale, numbers, decoders):
    """Add the values of consecutive chunks; return 0, or another number for an invalid one."""
    bucket, at = numbers[0], 0
    levels, symbols = np.empty(CHUNK, np.int32), np.empty(GROUP, np.uint8)
    dithers, parts = np.empty(GROUP, np.uint32), np.empty(GROUP, np.uint8)
    for chunk in range(rooms.shape[0]):
        part, room = total[chunk * CHUNK : (chunk + 1) * CHUNK], rooms[chunk, 0]
        own, codes, states = _split(body, at, part.size, bucket, room)
        at += own.size
        table, n_words = np.int64(own[1] >> np.uint32(16)), np.int64(own[1] & np.uint32(0xFFFF))
        if table > 1 or n_words > room:
            return np.int64(1)
        if own[0] == 0 and own[1] == 0:
            continue
        unit = as_float32(own[:1])[0]
        if not (unit >= 0 and np.float32(unit * np.float32(numbers[1 + table])) <= scale):
            return np.int64(2)
        width = (part.size + 1) // 2
        _draw(key, first + chunk, dithers)
        for i in range(width):
            parts[i] = np.uint8(_part_of(dithers[i]))
        words = own[states : states + STATE_WORDS + n_words]
        if not decode_chunk(words, decoders[table], symbols[:width], parts):
            return np.int64(3)
        for i in range(width):
            both = np.int32(symbols[i])
            high = np.int32(np.int32(both * _INVERSE) >> np.int32(16))
            levels[i] = np.int32(both - np.int32(_RADIX * high)) - _MIDDLE
            levels[width + i] = np.int32(high - _MIDDLE)
        _add_values(part, levels, dithers, codes, unit, bucket, np.float32(1))
    return np.int64(0)


run_encode_chunks, run_add_chunks = kernel_of(encode_coded_chunks), kernel_of(add_coded_chunks)


def encode_coded(values: Array, form: CodedLevels, body: Array, key: int, keep: bool) -> float:
    """Write the key and the chunks of ``values`` to ``body``; return the scale, NaN for none."""
    numbers, costs, _, *encoders = tables_of(form)
    body[:KEY_WORDS] = key & 0xFFFFFFFF, key >> 32
    chunks = values, body[KEY_WORDS:], _rooms(form, values.size), np.uint64(key), 0, keep
    scale = run_encode_chunks(*chunks, numbers, costs, *encoders)
    return float(scale) if np.isfinite(scale) else math.nan


def add_coded(total: Array, form: CodedLevels, body: Array, scale: float) -> None:
    """Add the values of ``body``; ValueError for one that ``encode_coded`` never writes."""
    numbers, _, decoders, *_ = tables_of(form)
    key = np.uint64(int(body[0]) | int(body[1]) << 32)
    chunks = total, body[KEY_WORDS:], _rooms(form, total.size), key, 0, np.float32(scale)
    if run_add_chunks(*chunks, numbers, decoders):
        raise ValueError("a chunk is none that an encoder writes")


def _rooms(form: CodedLevels, n: int) -> Array:
    sizes = [min(CHUNK, n - begin) for begin in range(0, n, CHUNK)]
    return np.array([room_and_limit(form, size) for size in sizes], np.int64)
