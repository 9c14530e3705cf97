"""Small numbers in words of 32 bits: how many fit, and where each of them lies.

Numbers below a radix R are the digits of words in base R, as many in a word as fit. They come in
groups of 4096: in a group of m numbers, W = ceil(m / digits) words, digit b of word j is number
b * W + j. So neighbours lie in neighbouring words, and vectors of words fill without shuffling.
"""

from __future__ import annotations

from typing import NamedTuple

GROUP = 4096
LANES = 64  # partial sums of a kernel: element i belongs to number i mod 64
L2, LARGEST, GIVEN = range(3)


class Levels(NamedTuple):
    """A grid of ``top + 1`` values, evenly from -scale to scale, and where its scales come from.

    ``norm``: the L2 norm of each bucket, its largest magnitude, or one number that is given.
    ``radix``: of the digits, above ``top``. ``bucket``: elements with a scale of their own.
    """

    top: int
    radix: int
    norm: int
    bucket: int


def digits_of(radix: int) -> int:
    """Return how many numbers below ``radix`` a word holds.

    >>> [digits_of(radix) for radix in (2, 3, 4, 15, 255)]
    [32, 20, 16, 8, 4]
    """
    digits = 1
    while radix ** (digits + 1) <= 1 << 32:
        digits += 1
    return digits


def count_words(n: int, radix: int) -> int:
    """Return how many words ``n`` numbers below ``radix`` take."""
    digits = digits_of(radix)
    whole, rest = divmod(n, GROUP)
    return whole * -(-GROUP // digits) + -(-rest // digits)


def sketch_bits(n: int, peak: int) -> int:
    """Return the bits after the point of ``n`` numbers whose sum shall fit into 64 bits.

    ``peak``: the float32 pattern of the largest magnitude, finite.

    >>> sketch_bits(1 << 20, 0x3F800000)  # numbers of at most 1.0
    41
    """
    exponent = max(peak >> 23, 1) - 127
    return 61 - max(n - 1, 0).bit_length() - exponent
