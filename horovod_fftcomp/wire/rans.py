"""Entropy code (rANS) of bytes.

Source: asymmetric numeral systems, Duda 2013; interleaved streams: Giesen 2014.

Symbols come in chunks of at most ``CHUNK_SYMBOLS``. A chunk becomes ``LANES`` final states, uint64,
and words, uint32. Symbol i belongs to lane i mod ``LANES``; all lanes share the words, in the order
in which a decoder reads them.
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
_CACHED = 1 << 14


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
