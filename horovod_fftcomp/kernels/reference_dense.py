"""Reference kernels of the dense methods, in plain NumPy; see ``reference``."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.counter_rng import mix
from horovod_fftcomp.wire.radix import GIVEN, GROUP, L2, LANES, Levels, count_words, digits_of

_LARGEST = np.finfo(np.float32).max
_LEAST_NORMAL = np.float32(2.0**-126)
_NOT_FINITE = 0x7F800000


def _peak(values: Array) -> int:
    return int((values.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(initial=0))


def random_words(key: int, n: int) -> Array:
    """Return ``n`` random 32-bit words, uint32: a function of the 64-bit ``key`` and the index.

    Each group of 4096 has a key of its own, ``mix(key + group)``, whose halves a multiplicative
    hash mixes with the index in the group (constants: Wellons 2018, "lowbias32").
    """
    keys = [mix(key + group & 0xFFFFFFFFFFFFFFFF) for group in range(-(-n // GROUP))]
    wide = np.array(keys, np.uint64)[:, None]
    low, high = wide.astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)
    x: Any = low + np.arange(GROUP, dtype=np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= high
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x.reshape(-1)[:n]


def pack_words(codes: Array, radix: int) -> Array:
    """Return uint32 ``codes``, below ``radix``, packed into words, uint32; see ``wire.radix``."""
    n, digits = codes.size, digits_of(radix)
    powers = np.array([[radix**b] for b in range(digits)], np.uint64)
    words = np.empty(count_words(n, radix), np.uint32)
    at = 0
    for begin in range(0, n, GROUP):
        group = codes[begin : begin + GROUP].astype(np.uint64)
        width = -(-group.size // digits)
        padded = np.zeros(width * digits, np.uint64)
        padded[: group.size] = group
        words[at : at + width] = (padded.reshape(digits, width) * powers).sum(0)
        at += width
    return words


def unpack_words(words: Array, n: int, radix: int) -> Array:
    """Return the ``n`` codes that ``pack_words`` packed, uint32; does not check the words.

    In corrupt words the last digit can be ``radix`` or more.
    """
    digits = digits_of(radix)
    codes = np.empty(n, np.uint32)
    at = 0
    for begin in range(0, n, GROUP):
        m = min(GROUP, n - begin)
        width = -(-m // digits)
        rest = words[at : at + width].astype(np.uint64)
        rows = []
        for _ in range(digits - 1):
            rest, digit = np.divmod(rest, np.uint64(radix))
            rows.append(digit)
        codes[begin : begin + m] = np.concatenate([*rows, rest])[:m]
        at += width
    return codes


def lane_sums(values: Array, length: int) -> Array:
    """Return the sums of consecutive pieces of ``length`` float64 values, in a fixed order.

    Value i of a piece is added to partial sum i mod 64; then the upper half of the partial sums is
    added to the lower half until one remains. ``length`` is a multiple of 64; the last piece may be
    shorter.
    """
    pieces = -(-values.size // length)
    padded = np.zeros(pieces * length)
    padded[: values.size] = values
    lanes = np.zeros((pieces, LANES))
    for row in padded.reshape(pieces, length // LANES, LANES).swapaxes(0, 1):
        lanes += row
    width = LANES // 2
    while width:
        lanes[:, :width] += lanes[:, width : 2 * width]
        width //= 2
    return lanes[:, 0].copy()


def moments(values: Array) -> tuple[int, Array, Array]:
    """Return (bits of the largest magnitude, sums and sums of squares of groups, float64)."""
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return _peak(values), lane_sums(wide, GROUP), lane_sums(wide * wide, GROUP)


def bucket_scales(values: Array, norm: int, bucket: int) -> Array:
    """Return the scale of each bucket of finite ``values``, float32; below 2^-126 it is 0."""
    if norm == L2:
        wide = values.astype(np.float64)
        scales = np.minimum(np.sqrt(lane_sums(wide * wide, bucket)), _LARGEST).astype(np.float32)
    else:
        padded = np.zeros(-(-values.size // bucket) * bucket, np.float32)
        padded[: values.size] = np.abs(values)
        scales = padded.reshape(-1, bucket).max(1)
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
        peak = _peak(values)
        if peak >= _NOT_FINITE:
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


def encode_signs(
    values: Array,
    starts: Array,
    words: Array,
    flat: Array | None = None,
    residual: Array | None = None,
) -> tuple[Array, Array]:
    """Write the signs of ``values`` as packed bits; return sums and counts for their means.

    ``words``: uint32, a bit for each value, 1 below 0. ``starts``: int64, the starts of pieces of
    ``values``, each inside one group, and the end. With ``flat`` and ``residual`` their sum is
    first written to ``values``. Returns (float64 ``[pieces, 2]``, sums of the values from 0 up and
    of those below, not finite if a value is not; int64 ``[pieces]``, the number of values below 0).
    """
    if flat is not None and residual is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            np.add(flat, residual, out=values)
    negative = values < 0
    words[:] = pack_words(negative.astype(np.uint32), 2)
    sums, counts = np.zeros((starts.size - 1, 2)), np.zeros(starts.size - 1, np.int64)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = values.astype(np.float64)
        for piece in range(starts.size - 1):
            here = slice(starts[piece], starts[piece + 1])
            down = negative[here]
            sums[piece] = [
                lane_sums(np.where(down == side, wide[here], 0), GROUP).sum()
                for side in (False, True)
            ]
            counts[piece] = np.count_nonzero(down)
    return sums, counts


def subtract_signs(values: Array, sides: Array, length: int) -> None:
    """Subtract from each value what its sign decodes to, in place.

    ``sides``: float32 ``[rows, 2]``: what values from 0 up and values below 0 decode to, in each
    row of ``length`` values.
    """
    values -= sides[np.arange(values.size) // length, (values < 0).astype(np.intp)]


def add_signs(total: Array, words: Array, sides: Array, length: int) -> None:
    """Add the values that the bits of ``encode_signs`` decode to; see ``subtract_signs``."""
    bits = unpack_words(words, total.size, 2).astype(np.intp)
    total += sides[np.arange(total.size) // length, bits]


def majority_sign(values: Array, many: float, tie: float) -> None:
    """Replace values by ``many`` times their signs, in place; 0 by ``tie``. NaN is kept."""
    values[:] = np.where(values == 0, np.float32(tie), np.float32(many) * np.sign(values))


def encode_octaves(values: Array, words: Array, top: int, key: int, keep: bool) -> None:
    """Write finite ``values`` as signs and powers of two, rounded at random to a neighbour.

    Level 127 is 2^(top - 127), level l 2^(top - 127 - (127 - l)), level 0 is 0; the code of a
    negative value is its level plus 127. The smallest power is at least 2^-126. ``top``: the biased
    exponent of a power of two that is no smaller than any value. With ``keep`` what is sent is
    subtracted from ``values``.
    """
    base = max(top - 126, 1)
    random = random_words(key, values.size)
    pattern = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
    above = ((pattern + (random >> np.uint32(9))) >> np.uint32(23)).astype(np.int64) - base + 1
    least = np.float32(2.0 ** (base - 127))
    uniform = (random >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    below = uniform < np.abs(values) / least
    levels = np.where(pattern < base << 23, below, np.minimum(above, top - base + 1))
    codes = np.where((values < 0) & (levels > 0), levels + 127, levels).astype(np.uint32)
    words[:] = pack_words(codes, 255)
    if keep:
        values -= _octaves(codes, base)


def add_octaves(total: Array, words: Array, top: int) -> None:
    """Add the values that ``encode_octaves`` encoded; ValueError for a code it never writes."""
    base = max(top - 126, 1)
    codes = unpack_words(words, total.size, 255)
    highest = (codes - np.where(codes > 127, 127, 0)).max(initial=0)
    if codes.max(initial=0) > 254 or highest > top - base + 1:
        raise ValueError("a power of two exceeds the header's scale")
    total += _octaves(codes, base)


def _octaves(codes: Array, base: int) -> Array:
    wide = codes.astype(np.int64)
    levels = np.where(wide > 127, wide - 127, wide)
    patterns = (levels + base - 1) << 23 | (wide > 127).astype(np.int64) << 31
    return np.where(wide == 0, 0, patterns).astype(np.uint32).view(np.float32)
