"""Counter-based random numbers: functions of a seed, the step, a tensor's name and an index.

Generators have no state. So all ranks draw the same numbers, also a restored or a new rank, and
the user's own random numbers do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import fnv1a
from horovod_fftcomp.wire.radix import GROUP

_MASK = (1 << 64) - 1
_NAMES_CACHED = 1 << 14  # as plans: a few thousand tensors in large models


class RngKey(NamedTuple):
    """Step, tensor name and rank: with a seed, the key of random numbers that differ by rank."""

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


def draw(seed: int, step: int, name: str, index: int) -> int:
    """Return the 64-bit random number of this ``seed``, ``step``, tensor ``name`` and ``index``."""
    return mix(mix(_named(seed, name) ^ step) ^ index)


@functools.lru_cache(_NAMES_CACHED)
def _named(seed: int, name: str) -> int:
    """Return the part of ``draw`` that is the same in every step, cached: a hash in Python."""
    return mix(fnv1a(name) ^ mix(seed & _MASK))


def named(seeds_and_names: Iterable[tuple[int, str]]) -> np.ndarray:
    """Return what ``draws`` takes for these (seed, tensor name), uint64."""
    return np.array([_named(seed, name) for seed, name in seeds_and_names], np.uint64)


def draws(names: np.ndarray, step: int, index: int) -> np.ndarray:
    """Return ``draw`` of this ``step`` and ``index`` for each of ``names``, uint64."""
    return _mix_all(_mix_all(names ^ np.uint64(step)) ^ np.uint64(index))


def _mix_all(z: np.ndarray) -> np.ndarray:
    """Return ``mix`` of each element of a uint64 array."""
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def below(number: int, n: int) -> int:
    """Return a uniform number in ``range(n)`` from a 64-bit ``number``; its bias is 2**-64 n."""
    return (number * n) >> 64


def spaced(rank: int) -> int:
    """Return ``rank`` with its 32 bits in reverse order (van der Corput 1935).

    Of 2^k consecutive ranks from 0 on, these numbers are evenly spaced in [0, 2**32).
    """
    return int(f"{rank % (1 << 32):032b}"[::-1], 2)


def check_seed(seed: object) -> None:
    """Raise ValueError unless ``seed`` is a whole number in [0, 2**64)."""
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be a whole number in [0, 2**64), got {seed!r}")


def uniform(seed: int, step: int, name: str, count: int) -> np.ndarray:
    """Return ``count`` uniform float32 from [-1, 1), drawn at indices 0, 1, ...

    They are equal on all machines.
    """
    key = np.uint64(mix(_named(seed, name) ^ step))
    z = _mix_all(np.arange(count, dtype=np.uint64) ^ key)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


def random_words(key: int, n: int) -> Array:
    """Return ``n`` random 32-bit words, uint32: a function of the 64-bit ``key`` and the index.

    Each group of 4096 has a key of its own, ``mix(key + group)``, whose halves a multiplicative
    hash mixes with the index in the group (constants: Wellons 2018, "lowbias32").
    """
    keys = [mix(key + group & 0xFFFFFFFFFFFFFFFF) for group in range(-(-n // GROUP))]
    wide = np.array(keys, np.uint64)[:, None]
    low, high = wide.astype(np.uint32), (wide >> np.uint64(32)).astype(np.uint32)
    x: Any = low + np.arange(GROUP, dtype=np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= high
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x.reshape(-1)[:n]
