"""Entropy code (rANS) of sparse bitmaps; its size depends on the number of ones alone.

Each byte of a bitmap of ``n`` bits with ``k`` ones is a symbol; its probability is that of
independent bits of density k / n. The cost of a byte is then almost linear in its ones, so all
bitmaps with k ones take almost the same number of bits, and a bound is known before the data.
Source: asymmetric numeral systems, Duda 2013; interleaved streams: Giesen 2014.

Layout: first the number of words of each chunk of ``CHUNK_SYMBOLS``, uint16, padded to 4 bytes;
then for each chunk ``LANES`` final states, uint64, and the words, uint32. Symbol i of a chunk
belongs to lane i mod ``LANES``; all lanes share the words, in the order in which a decoder reads
them.
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
    """Return the frequencies of bytes with 0, 1, .. 8 ones; over all 256 bytes they sum to 2^12.

    If ``can_code``, every byte has at least 1, so any bitmap can be coded. Computed in integers:
    equal on all machines.
    """
    total = 1 << PRECISION
    weights = [k**ones * (n - k) ** (8 - ones) for ones in range(9)]
    counts = [1, 8, 28, 56, 70, 56, 28, 8, 1]
    found = [max(1, (2 * total * weight + n**8) // (2 * n**8)) for weight in weights]
    rest = 8 if 2 * k > n else 0  # absorbs the rounding: 0x00 or 0xFF, whichever is more probable
    others = sum(f * count for f, count in zip(found, counts, strict=True)) - found[rest]
    found[rest] = total - others
    return tuple(found)


def can_code(n: int, k: int) -> bool:
    """Return whether every byte has a frequency above 0; near density 1/2 rounding may leave 0."""
    return min(frequencies(n, k)) > 0


@functools.lru_cache(_CACHED)
def coded_nbytes(n: int, k: int) -> int:
    """Return a size in bytes that suffices for every bitmap of ``n`` bits with ``k`` ones.

    For a given mean number of ones, the largest total cost is that of a mixture of two kinds of
    bytes; the bound is the largest over all pairs.
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
    """Return the number of chunks of a bitmap of ``n`` bits."""
    return -(-n // (8 * CHUNK_SYMBOLS))


def words_offset(n: int) -> int:
    """Return the offset in bytes of the first chunk, behind the table of lengths."""
    return -(-2 * n_chunks(n) // 4) * 4
