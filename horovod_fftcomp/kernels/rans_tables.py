"""Tables of the entropy code for its encoder and decoder, indexed by byte and by slot."""

from __future__ import annotations

import functools

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import rans

_SLOTS = 1 << rans.PRECISION


@functools.lru_cache(64)
def encoder_table(frequencies: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """Return each byte's frequency, reciprocal, shift and bias, the constants of an encoding step.

    For a state below 2^63, state // f is the upper half of state * reciprocal, shifted (Alverson
    1991). For f = 1 this is one too small, which the bias corrects.
    """
    freqs = np.array(frequencies, np.int64)
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


def pushes(frequencies: tuple[int, ...]) -> Array:
    """Return each byte's reciprocal, then its bias, frequency and shift in one word, uint64."""
    freqs, reciprocals, shifts, biases = encoder_table(frequencies)
    packed = biases | freqs << np.uint64(16) | shifts << np.uint64(32)
    return np.stack([reciprocals, packed], 1)


@functools.lru_cache(64)
def decoder_table(frequencies: tuple[int, ...]) -> Array:
    """Return symbol, frequency and offset of each of the 4096 slots: 8, 12 and 12 bits, uint32.

    The offset is the slot less the first one of its symbol.
    """
    freqs = np.array(frequencies, np.int64)
    starts = np.cumsum(freqs) - freqs
    symbols = np.repeat(np.arange(256), freqs)
    offsets = np.arange(_SLOTS) - starts[symbols]
    return (symbols | freqs[symbols] << 8 | offsets << 20).astype(np.uint32)
