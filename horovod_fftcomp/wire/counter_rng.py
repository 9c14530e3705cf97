"""Random numbers that all ranks draw alike, from facts that all of them know.

No generator has a state: a number is a function of seed, step, tensor name and place. So a restored
or a new rank draws as the others do, and nobody's own random numbers change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from horovod_fftcomp.wire.header import fnv1a

_MASK = (1 << 64) - 1


class RngKey(NamedTuple):
    """Where a tensor is encoded: what random numbers of a rank's own are a function of."""

    step: int = 0
    name: str = ""
    rank: int = 0


NO_RNG_KEY = RngKey()


def mix(z: int) -> int:
    """Return a 64-bit number whose every bit depends on all of ``z`` (splitmix64; Vigna 2015)."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def draw(seed: int, step: int, name: str, place: int) -> int:
    """Return the 64-bit number of this ``seed``, ``step``, tensor ``name`` and ``place``."""
    return mix(mix(mix(fnv1a(name) ^ mix(seed & _MASK)) ^ step) ^ place)


def below(number: int, n: int) -> int:
    """Return a number in ``range(n)`` from a 64-bit ``number``, evenly to 2**-64 n."""
    return (number * n) >> 64


def check_seed(seed: object) -> None:
    """Raise ValueError unless ``seed`` is one."""
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be a whole number in [0, 2**64), got {seed!r}")


def uniform(seed: int, step: int, name: str, count: int) -> np.ndarray:
    """Return ``count`` float32 from [-1, 1), even, of the places 0, 1, ...; the same everywhere."""
    key = np.uint64(mix(mix(fnv1a(name) ^ mix(seed & _MASK)) ^ step))
    z = np.arange(count, dtype=np.uint64) ^ key
    z += np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
