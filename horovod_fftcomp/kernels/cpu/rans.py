"""Encoder and decoder of the entropy code on a CPU; see ``wire.rans``, which defines the bytes."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels.cpu.arrays import copy_into
from horovod_fftcomp.kernels.cpu.inlining import allocating, inlined
from horovod_fftcomp.kernels.cpu.vector_values import high_product
from horovod_fftcomp.wire.rans import CHUNK_SYMBOLS, LANES, LOWEST_STATE, PRECISION

_LOWEST = np.uint64(LOWEST_STATE)


@inlined
def _push(state, symbol, words, free, freqs, reciprocals, shifts, biases):
    """Return (the state after encoding a symbol, the index of the last free word)."""
    f = freqs[symbol]
    words[np.uint64(free)] = np.uint32(state & np.uint64(0xFFFFFFFF))
    full = state >> np.uint64(63 - PRECISION) >= f
    if full:
        state >>= np.uint64(32)
    product = high_product(np.int64(state), np.int64(reciprocals[symbol]))
    quotient = product >> shifts[symbol]
    # quotient * 2^12 + remainder + start
    return state + biases[symbol] + quotient * (np.uint64(1 << PRECISION) - f), free - full


@allocating
def encode_chunk(symbols, freqs, reciprocals, shifts, biases, out):
    """Write the final states of a chunk, then its words; return the number of words."""
    words = np.empty(CHUNK_SYMBOLS, np.uint32)  # at most 12 bits a symbol
    a = b = c = d = _LOWEST
    free, whole = words.size - 1, symbols.size // LANES * LANES
    if symbols.size > whole + 2:
        c, free = _push(c, symbols[whole + 2], words, free, freqs, reciprocals, shifts, biases)
    if symbols.size > whole + 1:
        b, free = _push(b, symbols[whole + 1], words, free, freqs, reciprocals, shifts, biases)
    if symbols.size > whole:
        a, free = _push(a, symbols[whole], words, free, freqs, reciprocals, shifts, biases)
    for i in range(whole, 0, -LANES):
        d, free = _push(d, symbols[i - 1], words, free, freqs, reciprocals, shifts, biases)
        c, free = _push(c, symbols[i - 2], words, free, freqs, reciprocals, shifts, biases)
        b, free = _push(b, symbols[i - 3], words, free, freqs, reciprocals, shifts, biases)
        a, free = _push(a, symbols[i - 4], words, free, freqs, reciprocals, shifts, biases)
    for lane, state in enumerate((a, b, c, d)):
        out[2 * lane] = np.uint32(state & np.uint64(0xFFFFFFFF))
        out[2 * lane + 1] = np.uint32(state >> np.uint64(32))
    n_words = words.size - 1 - free
    copy_into(out[2 * LANES : 2 * LANES + n_words], words[free + 1 :])
    return n_words


@inlined
def _state(words, at):
    return np.uint64(words[at]) | np.uint64(words[at + 1]) << np.uint64(32)


@inlined
def _step(state, table, part):
    """Return (the next state before ``_refill``, the decoded symbol)."""
    slot = state & np.uint64((1 << PRECISION) - 1) | np.uint64(part) << np.uint64(PRECISION)
    entry = np.uint64(table[slot])
    frequency = (entry >> np.uint64(8)) & np.uint64(0xFFF)
    state = frequency * (state >> np.uint64(PRECISION)) + (entry >> np.uint64(20))
    return state, np.uint8(entry & np.uint64(0xFF))


@inlined
def _refill(state, word, at):
    """Return (state, at) after reading a word if the state is low."""
    low = state < _LOWEST
    return (state << np.uint64(32) | np.uint64(word) if low else state), at + np.uint64(low)


@inlined
def decode_chunk(words, table, symbols, parts):
    """Write the symbols of a chunk; return False if it does not end in the lowest states.

    ``words``: the states, then the words. ``parts``: which part of the table each symbol has.
    Indices are unsigned: signed ones may count from the end, which takes time.
    """
    a, b, c, d = _state(words, 0), _state(words, 2), _state(words, 4), _state(words, 6)
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(LANES)
    at, i = np.uint64(2 * LANES), np.uint64(0)
    end, n = np.uint64(words.size), np.uint64(symbols.size)
    while i + four <= n and at + four <= end:
        a, symbols[i] = _step(a, table, parts[i])
        b, symbols[i + one] = _step(b, table, parts[i + one])
        c, symbols[i + two] = _step(c, table, parts[i + two])
        d, symbols[i + three] = _step(d, table, parts[i + three])
        a, at = _refill(a, words[at], at)
        b, at = _refill(b, words[at], at)
        c, at = _refill(c, words[at], at)
        d, at = _refill(d, words[at], at)
        i += four
    while i < n:  # words may have come to their end: then it is the last one that is read
        a, symbols[i] = _step(a, table, parts[i])
        a, at = _refill(a, words[min(at, end - one)], at)
        a, b, c, d = b, c, d, a
        i += one
    return at == end and a == _LOWEST and b == _LOWEST and c == _LOWEST and d == _LOWEST
