"""Encoder and decoder of the entropy code on a CPU; see ``wire.rans``, which defines the bytes."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.kernels.cpu.jit import inlined, kernel
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


@kernel
def encode_chunks(symbols, freqs, reciprocals, shifts, biases, lengths, out):
    """Write all chunks to ``out``, one after another; return the number of words used."""
    at = 0
    words = np.empty(CHUNK_SYMBOLS, np.uint32)  # at most 12 bits a symbol
    for chunk in range(lengths.size):
        begin = chunk * CHUNK_SYMBOLS
        part = symbols[begin : min(begin + CHUNK_SYMBOLS, symbols.size)]
        a = b = c = d = _LOWEST
        free, whole = words.size - 1, part.size // LANES * LANES
        if part.size > whole + 2:
            c, free = _push(c, part[whole + 2], words, free, freqs, reciprocals, shifts, biases)
        if part.size > whole + 1:
            b, free = _push(b, part[whole + 1], words, free, freqs, reciprocals, shifts, biases)
        if part.size > whole:
            a, free = _push(a, part[whole], words, free, freqs, reciprocals, shifts, biases)
        for i in range(whole, 0, -LANES):
            d, free = _push(d, part[i - 1], words, free, freqs, reciprocals, shifts, biases)
            c, free = _push(c, part[i - 2], words, free, freqs, reciprocals, shifts, biases)
            b, free = _push(b, part[i - 3], words, free, freqs, reciprocals, shifts, biases)
            a, free = _push(a, part[i - 4], words, free, freqs, reciprocals, shifts, biases)
        for state in (a, b, c, d):
            out[at] = np.uint32(state & np.uint64(0xFFFFFFFF))
            out[at + 1] = np.uint32(state >> np.uint64(32))
            at += 2
        n_words = words.size - 1 - free
        lengths[chunk] = n_words
        out[at : at + n_words] = words[free + 1 :]
        at += n_words
    return at


@inlined
def _state(words, at):
    return np.uint64(words[at]) | np.uint64(words[at + 1]) << np.uint64(32)


@inlined
def _step(state, table, parts, i):
    """Return (the next state before ``_refill``, the decoded symbol)."""
    slot = state & np.uint64((1 << PRECISION) - 1)
    if parts is not None:  # known when this is compiled
        slot |= np.uint64(parts[i]) << np.uint64(PRECISION)
    entry = np.uint64(table[slot])
    frequency = (entry >> np.uint64(8)) & np.uint64(0xFFF)
    state = frequency * (state >> np.uint64(PRECISION)) + (entry >> np.uint64(20))
    return state, np.uint8(entry & np.uint64(0xFF))


@inlined
def _refill(state, words, at, end):
    """Return (state, at) after reading a word if the state is low; never reads beyond ``end``."""
    word = np.uint64(words[min(at, end - 1)])
    low = state < _LOWEST
    return ((state << np.uint64(32)) | word if low else state), at + low


@kernel
def decode_chunks(words, lengths, table, symbols, parts):
    """Write the symbols of all chunks; return False if one does not end in the lowest states.

    ``parts``: which part of the table each symbol has; None if there is one.
    """
    at = 0
    for chunk in range(lengths.size):
        begin = chunk * CHUNK_SYMBOLS
        stop = min(begin + CHUNK_SYMBOLS, symbols.size)
        a, b = _state(words, at), _state(words, at + 2)
        c, d = _state(words, at + 4), _state(words, at + 6)
        at += 2 * LANES
        end = at + lengths[chunk]
        i = begin
        while i + LANES <= stop:
            a, symbols[i] = _step(a, table, parts, i)
            b, symbols[i + 1] = _step(b, table, parts, i + 1)
            c, symbols[i + 2] = _step(c, table, parts, i + 2)
            d, symbols[i + 3] = _step(d, table, parts, i + 3)
            a, at = _refill(a, words, at, end)
            b, at = _refill(b, words, at, end)
            c, at = _refill(c, words, at, end)
            d, at = _refill(d, words, at, end)
            i += LANES
        if i < stop:
            a, symbols[i] = _step(a, table, parts, i)
            a, at = _refill(a, words, at, end)
        if i + 1 < stop:
            b, symbols[i + 1] = _step(b, table, parts, i + 1)
            b, at = _refill(b, words, at, end)
        if i + 2 < stop:
            c, symbols[i + 2] = _step(c, table, parts, i + 2)
            c, at = _refill(c, words, at, end)
        if at != end or a != _LOWEST or b != _LOWEST or c != _LOWEST or d != _LOWEST:
            return False
    return True
