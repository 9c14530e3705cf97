"""A code for sparse bitmaps whose size follows from counts alone: 8 places a symbol, rANS.

Each byte of a bitmap of ``n`` places with ``k`` ones is a symbol with the probability that
independent places of density k / n would give it. Its cost is then all but linear in its ones, so
every bitmap with k ones takes all but the same number of bits, and their bound can be known
before the data. Source: asymmetric numeral systems, Duda 2013; several streams: Giesen 2014.

Layout: for each chunk of ``CHUNK_SYMBOLS`` its number of words, uint16, padded to 4 bytes; then
for each chunk ``LANES`` final states, uint64, and the words, uint32. Symbol i of a chunk belongs
to lane i mod ``LANES``; all lanes share the words in the order in which a decoder needs them.
"""

from __future__ import annotations

import functools
import itertools

PRECISION = 12  # frequencies add up to 2^PRECISION; the decoder's table then fits the L1 cache
LANES = 4
CHUNK_SYMBOLS = 4096
LOWEST_STATE = 1 << 31
_STATE_NBYTES = 8 * LANES
_FRACTION = 256  # costs are counted in bits / 256
_CACHED = 1 << 14


@functools.lru_cache(_CACHED)
def frequencies(n: int, k: int) -> tuple[int, ...]:
    """Return the frequency of a byte with 0, 1, .. 8 ones; those of all 256 add up to 2^12.

    Every byte has at least 1, so any bitmap can be coded, where ``can_code`` says so. In whole
    numbers: equal on all machines.
    """
    total = 1 << PRECISION
    weights = [k**ones * (n - k) ** (8 - ones) for ones in range(9)]
    counts = [1, 8, 28, 56, 70, 56, 28, 8, 1]
    found = [max(1, (2 * total * weight + n**8) // (2 * n**8)) for weight in weights]
    rest = 8 if 2 * k > n else 0  # the likelier of the two that stand for one byte each
    others = sum(f * count for f, count in zip(found, counts, strict=True)) - found[rest]
    found[rest] = total - others
    return tuple(found)


def can_code(n: int, k: int) -> bool:
    """Tell whether rounding leaves each byte a frequency; near density 1/2 it may not."""
    return min(frequencies(n, k)) > 0


@functools.lru_cache(_CACHED)
def coded_nbytes(n: int, k: int) -> int:
    """Return the bytes that suffice for every bitmap of ``n`` places with ``k`` ones.

    The largest sum of costs, under a given mean of ones, is a mixture of two kinds of bytes.
    """
    symbols = -(-n // 8)
    costs = [PRECISION * _FRACTION - ((f**_FRACTION).bit_length() - 1) for f in frequencies(n, k)]
    cost = max(
        -(-((b * symbols - k) * costs[a] + (k - a * symbols) * costs[b]) // (b - a))
        for a, b in itertools.combinations(range(9), 2)
        if a * symbols <= k <= b * symbols
    )
    # A state of at least 2^31 rounds a cost up by less than 2^-18 bits.
    bits = cost // _FRACTION + 1 + (symbols >> 18) + 1
    chunks = n_chunks(n)
    return words_offset(n) + chunks * _STATE_NBYTES + 4 * (bits // 32)


def n_chunks(n: int) -> int:
    """Return the number of chunks of ``n`` places."""
    return -(-n // (8 * CHUNK_SYMBOLS))


def words_offset(n: int) -> int:
    """Return where the first chunk lies, in bytes after the table of their lengths."""
    return -(-2 * n_chunks(n) // 4) * 4
