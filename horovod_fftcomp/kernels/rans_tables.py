"""The entropy code's tables by byte, from the frequencies of numbers of ones."""

from __future__ import annotations

import functools

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import rans

_SLOTS = 1 << rans.PRECISION


@functools.lru_cache(64)
def encoder_table(frequencies: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """Return each byte's frequency, reciprocal, shift and bias, by which a state takes it in.

    A state below 2^63 over f is the upper half of state * reciprocal, shifted (Alverson 1991). Over
    1 that is not exact but one less, which the bias makes good.
    """
    freqs = _frequencies(frequencies)
    biases = np.cumsum(freqs) - freqs + np.where(freqs == 1, _SLOTS - 1, 0)
    shifts = [max(1, (f - 1).bit_length()) for f in freqs.tolist()]
    reciprocals = [
        -(-(1 << (shift + 63)) // f) if f > 1 else (1 << 64) - 1
        for f, shift in zip(freqs.tolist(), shifts, strict=True)
    ]
    return (
        freqs.astype(np.uint64),
        np.array(reciprocals, np.uint64),
        np.array(shifts, np.uint64) - np.uint64(1),
        biases.astype(np.uint64),
    )


@functools.lru_cache(64)
def decoder_table(frequencies: tuple[int, ...]) -> Array:
    """Return for each of the 4096 slots its symbol, frequency and place: 8, 12 and 12 bits."""
    freqs = _frequencies(frequencies)
    starts = np.cumsum(freqs) - freqs
    symbols = np.repeat(np.arange(256), freqs)
    places = np.arange(_SLOTS) - starts[symbols]
    return (symbols | freqs[symbols] << 8 | places << 20).astype(np.uint32)


def _frequencies(frequencies: tuple[int, ...]) -> Array:
    return np.array([frequencies[byte.bit_count()] for byte in range(256)], np.int64)
