"""Entropy code (rANS) of bytes, and its use for sparse bitmaps.

The size of a coded bitmap depends on the number of ones alone. Each byte of a bitmap of ``n`` bits
with ``k`` ones is a symbol; its probability is that of independent bits of density k / n. The cost
of a byte is then almost linear in its ones, so all bitmaps with k ones take almost the same number
of bits, and a bound is known before the data.
Source: asymmetric numeral systems, Duda 2013; interleaved streams: Giesen 2014.

Layout: first the number of words of each chunk of ``CHUNK_SYMBOLS``, uint16, padded to 4 bytes;
then for each chunk ``LANES`` final states, uint64, and the words, uint32. Symbol i of a chunk
belongs to lane i mod ``LANES``; all lanes share the words, in the order in which a decoder reads
them.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

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


def cost(frequency: int, fraction: int) -> int:
    """Return what a symbol of this frequency costs, in bits / ``fraction``, rounded up."""
    return PRECISION * fraction - ((frequency**fraction).bit_length() - 1)


def encode(symbols: Sequence[int], tables: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
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


def decode(
    states: Sequence[int], words: Sequence[int], tables: Sequence[Sequence[int]]
) -> list[int]:
    """Return the symbols that ``encode`` encoded; ValueError for corrupt words."""
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


@functools.lru_cache(_CACHED)
def _starts(freqs: tuple[int, ...]) -> list[int]:
    """Return the first slot of each symbol."""
    return list(itertools.accumulate(freqs, initial=0))[:-1]


@functools.lru_cache(_CACHED)
def coded_nbytes(n: int, k: int) -> int:
    """Return a size in bytes that suffices for every bitmap of ``n`` bits with ``k`` ones.

    For a given mean number of ones, the largest total cost is that of a mixture of two kinds of
    bytes; the bound is the largest over all pairs.
    """
    symbols = -(-n // 8)
    costs = [cost(f, _FRACTION) for f in frequencies(n, k)]
    most = max(
        -(-((b * symbols - k) * costs[a] + (k - a * symbols) * costs[b]) // (b - a))
        for a, b in itertools.combinations(range(9), 2)
        if a * symbols <= k <= b * symbols
    )
    # A state of at least 2^31 rounds a cost up by less than 2^-18 bits.
    bits = most // _FRACTION + 1 + (symbols >> 18) + 1
    chunks = n_chunks(n)
    return words_offset(n) + chunks * _STATE_NBYTES + 4 * (bits // 32)


def n_chunks(n: int) -> int:
    """Return the number of chunks of a bitmap of ``n`` bits."""
    return -(-n // (8 * CHUNK_SYMBOLS))


def words_offset(n: int) -> int:
    """Return the offset in bytes of the first chunk, behind the table of lengths."""
    return -(-2 * n_chunks(n) // 4) * 4
