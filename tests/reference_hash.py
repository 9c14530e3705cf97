"""The hash of parameters in plain NumPy: what the kernels of the host and of a GPU must return."""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.monitor import parameter_hash as own
from horovod_fftcomp.types import Array


def hash_bytes_reference(array: Array) -> int:
    """Return ``hash_bytes(array)``.

    The bytes are read as rows of 64 words of 8 bytes. Each of 64 lanes takes in the words of its
    column. One more lane takes in the lanes, then the words that fill no row, the last of them
    padded with zeros, and then the number of bytes.
    """
    rows, tail = own.words_of(array)
    lanes = own._SEEDS
    for row in rows:
        lanes = _step(lanes, row)
    total = np.zeros(1, np.uint64)  # an array, since only the arithmetic of arrays wraps silently
    for word in np.concatenate([lanes, tail])[:, None]:
        total = _step(total, word)
    return int(total[0])


def _step(lanes: Array, words: Array) -> Array:
    mixed = lanes + words * own._WORD_PRIME
    return ((mixed << own._LEFT) | (mixed >> own._RIGHT)) * own._PRIME
