"""CPU kernels of the dense methods: codes are computed and packed group by group.

Loops are written so that they are vectorized: 32-bit integers throughout, no branch on a value,
and digits of a word that lie apart in the group.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels.cpu.arrays import as_float32, as_int32, copy_into
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.jit import kernel_of
from horovod_fftcomp.kernels.cpu.sparse import peak_bits
from horovod_fftcomp.kernels.cpu.value_codes import float_of
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.radix import GIVEN, GROUP, L2, LANES

_SLACK = 32  # codes after a group: the digits of its last words
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LARGEST = np.float64(np.finfo(np.float32).max)
_LEAST_NORMAL = np.float32(2.0**-126)
_UNIT = np.float32(2.0**-24)
_ZERO = np.float32(0)  # a plain 0 would compare in 64 bits
_U = np.uint32


@inlined
def fill_random(key, group, out):
    """Write the random words of a group; see ``counter_rng.random_words``."""
    z = np.uint64(key) + np.uint64(group) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    low, high = _U(z & np.uint64(0xFFFFFFFF)), _U(z >> np.uint64(32))
    for j in range(out.size):
        x = _U(_U(j) + low)
        x = _U(x ^ (x >> _U(16)))
        x = _U(x * _U(0x7FEB352D))
        x = _U(x ^ high)
        x = _U(x ^ (x >> _U(15)))
        x = _U(x * _U(0x846CA68B))
        out[j] = _U(x ^ (x >> _U(16)))


@inlined
def write_words(codes, m, radix, digits, words):
    """Pack the first ``m`` codes of a group; set the codes after them, up to the slack, to 0."""
    width = (m + digits - 1) // digits
    codes[m : width * digits] = _U(0)
    out = words[:width]
    copy_into(out, codes[(digits - 1) * width :])
    for b in range(digits - 2, -1, -1):
        plane = codes[b * width : (b + 1) * width]
        for j in range(width):
            out[j] = _U(_U(out[j] * radix) + plane[j])


@allocating
def read_words(words, m, radix, digits, codes):
    """Unpack the ``m`` codes of a group; return the largest. See ``radix.unpack_words``."""
    width = (m + digits - 1) // digits
    rest = np.empty(width, np.uint32)
    copy_into(rest, words)
    power = radix & _U(radix - _U(1)) == 0
    shift, mask = _U(0), _U(radix - _U(1))
    while power and _U(1) << shift < radix:
        shift = _U(shift + _U(1))
    inverse = 1.0 / np.float64(radix)
    for b in range(digits - 1):
        plane = codes[b * width : (b + 1) * width]
        if power:
            for j in range(width):
                plane[j] = rest[j] & mask
                rest[j] = rest[j] >> shift
        else:  # (x + 1/2) / radix is too far from a whole number to be rounded to it
            for j in range(width):
                x = rest[j]
                q = _U(np.int64((np.float64(x) + 0.5) * inverse))
                plane[j] = _U(x - _U(q * radix))
                rest[j] = q
    copy_into(codes[(digits - 1) * width : digits * width], rest)
    top = _U(0)
    for j in range(m):
        top = max(top, codes[j])
    return top


def moments(values: Array) -> tuple[int, Array, Array]:
    """Return (bits of the largest magnitude, sums and sums of squares of groups, float64)."""
    sums = np.empty((-(-values.size // GROUP), 2))
    return run_moments_by_group(values, sums), sums[:, 0], sums[:, 1]


@allocating
def moments_by_group(values, sums):
    """Write the groups' sums and sums of squares, ``[n, 2]``; return the bits of the peak."""
    first, second = np.empty(LANES), np.empty(LANES)
    patterns = as_int32(values)
    peak = np.int64(0)
    for group in range((values.size + GROUP - 1) // GROUP):
        begin, end = group * GROUP, min((group + 1) * GROUP, values.size)
        peak = max(peak, peak_bits(patterns[begin:end]))
        first[:], second[:] = 0.0, 0.0
        part = values[begin:end]
        whole = part.size // LANES * LANES
        for i in range(0, whole, LANES):
            for j in range(LANES):
                x = np.float64(part[i + j])
                first[j] += x
                second[j] += x * x
        for j in range(part.size - whole):
            x = np.float64(part[whole + j])
            first[j] += x
            second[j] += x * x
        sums[group, 0], sums[group, 1] = fold(first), fold(second)
    return peak


run_moments_by_group = kernel_of(moments_by_group)


@inlined
def fold(lanes):
    """Return the sum of partial sums, which are overwritten; see ``methods.sums.lane_sums``."""
    width = lanes.size // 2
    while width:
        for j in range(width):
            lanes[j] += lanes[width + j]
        width //= 2
    return lanes[0]


@inlined
def _norm(part, lanes):
    """Return the L2 norm, float32; see ``methods.levels``."""
    lanes[:] = 0.0
    whole = part.size // LANES * LANES
    for i in range(0, whole, LANES):
        for j in range(LANES):
            x = np.float64(part[i + j])
            lanes[j] += x * x
    for j in range(part.size - whole):
        x = np.float64(part[whole + j])
        lanes[j] += x * x
    return np.float32(min(np.sqrt(fold(lanes)), _LARGEST))


@allocating
def encode_level_groups(values, levels, scales, words, key, first_group, keep):
    """Write scales and words of consecutive groups; return the bits of the peak."""
    top, radix, norm, bucket, digits = levels[0], levels[1], levels[2], levels[3], levels[4]
    random = np.empty(GROUP, np.uint32)
    codes = np.empty(GROUP + _SLACK, np.uint32)
    lanes = np.empty(LANES)
    peak, to = np.int64(0), 0
    for begin in range(0, values.size, GROUP):
        part = values[begin : begin + GROUP]
        fill_random(key, first_group + begin // GROUP, random)
        if norm == GIVEN:
            _round(part, scales[0], top, random, codes, keep)
        else:
            found = peak_bits(as_int32(part))
            peak = max(peak, found)
            if found >= 0x7F800000:  # not finite: the body is discarded
                break
            for at in range(0, part.size, bucket):
                piece = part[at : at + bucket]
                scale = _norm(piece, lanes) if norm == L2 else _top(piece)
                scale = np.float32(0) if scale < _LEAST_NORMAL else scale
                scales[(begin + at) // bucket] = scale
                _round(piece, scale, top, random[at:], codes[at:], keep)
        write_words(codes, part.size, _U(radix), digits, words[to:])
        to += (part.size + digits - 1) // digits
    return peak


@inlined
def _top(values):
    top = np.float32(0)
    for x in values:
        top = max(top, np.abs(x))
    return top


@inlined
def _round(values, scale, top, random, codes, keep):
    """Write the codes of values that share a scale; see ``methods.levels``."""
    half = np.float32(np.float32(top) * np.float32(0.5))
    middle = np.int32(top // 2)
    if scale == 0:
        codes[: values.size] = _U(middle)
        if top % 2:
            one_place = np.int32(half)
            for i in range(values.size):
                u = np.float32(np.int32(random[i] >> _U(8))) * _UNIT
                codes[i] = _U(one_place + np.int32(u < np.float32(half - np.float32(one_place))))
    elif top % 2:
        for i in range(values.size):
            ratio = np.float32(values[i] / scale)
            ratio = min(max(ratio, np.float32(-1)), np.float32(1))
            place = np.float32(np.float32(ratio * half) + half)
            floor = np.int32(place)
            u = np.float32(np.int32(random[i] >> _U(8))) * _UNIT
            up = np.int32(u < np.float32(place - np.float32(floor)))
            codes[i] = _U(min(np.int32(floor + up), np.int32(top)))
    else:
        for i in range(values.size):
            ratio = min(np.abs(np.float32(values[i] / scale)), np.float32(1))
            place = np.float32(ratio * half)
            floor = np.int32(place)
            u = np.float32(np.int32(random[i] >> _U(8))) * _UNIT
            level = np.int32(floor + np.int32(u < np.float32(place - np.float32(floor))))
            level = np.int32(-level) if values[i] < _ZERO else level
            codes[i] = _U(np.int32(middle + level))
    if keep:
        for i in range(values.size):
            twice = np.float32(np.int32(np.int32(2) * np.int32(codes[i]) - np.int32(top)))
            values[i] -= np.float32(scale * np.float32(twice / np.float32(top)))


@allocating
def add_level_groups(total, words, scales, levels):
    """Add the values of consecutive groups; return the largest level."""
    top, radix, norm, bucket, digits = levels[0], levels[1], levels[2], levels[3], levels[4]
    codes = np.empty(GROUP + _SLACK, np.uint32)
    largest, at = _U(0), 0
    for begin in range(0, total.size, GROUP):
        part = total[begin : begin + GROUP]
        largest = max(largest, read_words(words[at:], part.size, _U(radix), digits, codes))
        at += (part.size + digits - 1) // digits
        step = GROUP if norm == GIVEN else bucket
        for i in range(0, part.size, step):
            scale = scales[0] if norm == GIVEN else scales[(begin + i) // bucket]
            piece, levels_of = part[i : i + step], codes[i:]
            for j in range(piece.size):
                twice = np.float32(np.int32(np.int32(2) * np.int32(levels_of[j]) - np.int32(top)))
                piece[j] += np.float32(scale * np.float32(twice / np.float32(top)))
    return np.int64(largest)


@allocating
def encode_octave_groups(values, words, base, top, key, first_group, keep):
    """Write the words of consecutive groups; see ``methods.natural``."""
    random = np.empty(GROUP, np.uint32)
    codes = np.empty(GROUP + _SLACK, np.uint32)
    least, lowest = float_of(base << 23), np.int32(base << 23)
    last, shift = np.int32(top - base + 1), np.int32(base - 1)
    to = 0
    for begin in range(0, values.size, GROUP):
        part = values[begin : begin + GROUP]
        patterns = as_int32(part)
        fill_random(key, first_group + begin // GROUP, random)
        for i in range(part.size):
            pattern = np.int32(patterns[i] & _MAGNITUDE)
            carried = _U(_U(_U(pattern) + (random[i] >> _U(9))) >> _U(23))
            above = min(np.int32(np.int32(carried) - shift), last)
            u = np.float32(np.int32(random[i] >> _U(8))) * _UNIT
            below = np.int32(u < np.float32(np.abs(part[i]) / least))
            level = below if pattern < lowest else above
            negative = (part[i] < _ZERO) & (level > 0)
            codes[i] = _U(np.int32(level + np.int32(127)) if negative else level)
        if keep:
            _add_values(part, codes, shift, np.float32(-1))
        write_words(codes, part.size, _U(255), 4, words[to:])
        to += (part.size + 3) // 4


@allocating
def _add_values(part, codes, shift, sign):
    """Add the values of codes, times ``sign``; return the largest level."""
    patterns = np.empty(GROUP, np.int32)
    highest = np.int32(0)
    for i in range(part.size):
        code = np.int32(codes[i])
        level = np.int32(code - np.int32(127)) if code > 127 else code
        highest = max(highest, level)
        pattern = np.int32(np.int32(level + shift) << np.int32(23))
        patterns[i] = pattern if level > 0 else np.int32(0)
    magnitudes = as_float32(patterns)
    for i in range(part.size):
        value = -magnitudes[i] if codes[i] > _U(127) else magnitudes[i]
        part[i] += np.float32(sign * value)
    return highest


@allocating
def add_octave_groups(total, words, base, top):
    """Add the values of consecutive groups; return the largest level, 255 for an invalid code."""
    codes = np.empty(GROUP + _SLACK, np.uint32)
    highest, at = np.int32(0), 0
    for begin in range(0, total.size, GROUP):
        part = total[begin : begin + GROUP]
        largest = read_words(words[at:], part.size, _U(255), 4, codes)
        at += (part.size + 3) // 4
        if largest > _U(254):
            return np.int64(255)
        highest = max(highest, _add_values(part, codes, np.int32(base - 1), np.float32(1)))
        if highest > top - base + 1:
            break
    return np.int64(highest)
