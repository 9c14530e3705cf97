"""Packing of small integers into 32-bit words, as digits in a given radix.

Integers below a radix R are the digits of words in base R, as many in a word as fit. They are
packed in groups of 4096: a group of m integers takes W = ceil(m / digits) words, and digit b of
word j is integer b * W + j. So neighbours lie in neighbouring words, and vector registers fill
without shuffling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from horovod_fftcomp.types import Array

GROUP = 4096
LANES = 64  # partial sums of a kernel: element i is added to sum i mod 64
L2, LARGEST, GIVEN = range(3)


class Levels(NamedTuple):
    """Quantization grid of ``top + 1`` values, evenly spaced from -scale to scale.

    ``radix``: of the packed codes, above ``top``. ``norm``: the definition of the scale: the L2
    norm of each bucket, its largest magnitude (LARGEST), or one GIVEN number. ``bucket``: the
    number of consecutive elements that share a scale.
    """

    top: int
    radix: int
    norm: int
    bucket: int


def digits_of(radix: int) -> int:
    """Return how many integers below ``radix`` fit into a 32-bit word.

    >>> [digits_of(radix) for radix in (2, 3, 4, 15, 255)]
    [32, 20, 16, 8, 4]
    """
    digits = 1
    while radix ** (digits + 1) <= 1 << 32:
        digits += 1
    return digits


def count_words(n: int, radix: int) -> int:
    """Return the number of 32-bit words of ``n`` packed integers below ``radix``."""
    digits = digits_of(radix)
    whole, rest = divmod(n, GROUP)
    return whole * -(-GROUP // digits) + -(-rest // digits)


def sketch_bits(n: int, peak: int) -> int:
    """Return the number of fraction bits with which the sum of ``n`` numbers fits into 64 bits.

    ``peak``: the float32 bit pattern of the largest magnitude, finite.

    >>> sketch_bits(1 << 20, 0x3F800000)  # numbers of at most 1.0
    41
    """
    exponent = max(peak >> 23, 1) - 127
    return 61 - max(n - 1, 0).bit_length() - exponent


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
