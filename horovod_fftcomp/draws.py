"""Random numbers that all ranks draw alike, from facts that all of them know.

No generator has a state: a number is a function of seed, step, tensor name and place. So a restored
or a new rank draws as the others do, and nobody's own random numbers change.
"""

from __future__ import annotations

from horovod_fftcomp.wire import fnv1a

_MASK = (1 << 64) - 1


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
