"""Parameter hashes: check that all ranks still hold the same parameters.

Hashes arrays, rotates over the tensors to hash and finds the ranks that differ; the caller gathers
the hashes. Hash parameters only: running statistics of batch normalization differ between ranks by
design.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from horovod_fftcomp.errors import list_ranks
from horovod_fftcomp.types import Array

# One step is the round of XXH64 (Collet 2012), h -> rotate(h + word * odd) * odd: a bijection in h
# and in the word, so one changed word always changes the hash. With a single product, before or
# after the rotation, one flipped bit undoes a certain other one in the next word.
_WORD_PRIME = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME = np.uint64(0x9E3779B185EBCA87)
_LEFT, _RIGHT = np.uint64(31), np.uint64(64 - 31)

# At 64 lanes LLVM makes vector code of the loop: on AVX2 16 GB/s from the cache, 12 with 8 lanes.
_LANES = 64
_SEEDS = np.arange(1, _LANES + 1, dtype=np.uint64) * _PRIME

_SHOWN = 8


def hash_bytes(array: Array) -> int:
    """Return a 64-bit hash of the bytes of ``array`` in C order, at about a memcpy's speed.

    Equal bytes give equal hashes on all machines of one byte order; one changed word of 8 bytes
    always changes the hash, any other difference except with probability 2^-64 or so. It is no
    protection against tampering. Bytes count, not values: 0.0 and -0.0 differ, and the shape and
    dtype do not enter. ``array``: of any shape and of any dtype but object, neither changed nor
    aliased; copied only if it is not contiguous. The first call loads Numba.

    >>> hash_bytes(np.zeros(3)) == hash_bytes(np.zeros((1, 3)))
    True
    >>> hash_bytes(np.zeros(3)) == hash_bytes(np.zeros(4))
    False
    """
    return int(hash_kernel()(*words_of(array)))


def words_of(array: Array) -> tuple[Array, Array]:
    """Return (words in whole rows ``[rows, 64]``; remaining words and the byte count)."""
    if array.dtype.hasobject:
        raise TypeError(f"{array.dtype} arrays hold references, not values; pass numbers")
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = raw.size - raw.size % (8 * _LANES)
    rest = raw[whole:]
    tail = np.zeros(-(-rest.size // 8) + 1, np.uint64)
    tail.view(np.uint8)[: rest.size] = rest
    tail[-1] = raw.size
    return raw[:whole].view(np.uint64).reshape(-1, _LANES), tail


@functools.cache
def hash_kernel() -> Callable[[Array, Array], int]:
    """Compile ``_hash_words`` once, for aligned, unaligned, writable and read-only arrays."""
    from numba import njit, types  # here, since importing this package must not load Numba

    rows = types.Array(types.uint64, 2, "C", readonly=True, aligned=False)
    return njit(types.uint64(rows, types.uint64[::1]), cache=True, nogil=True)(_hash_words)


def _hash_words(rows, tail):
    lanes = np.empty(_LANES, np.uint64)
    lanes[:] = _SEEDS
    for i in range(rows.shape[0]):
        for j in range(_LANES):
            mixed = lanes[j] + rows[i, j] * _WORD_PRIME
            lanes[j] = ((mixed << _LEFT) | (mixed >> _RIGHT)) * _PRIME
    total = np.uint64(0)
    for words in (lanes, tail):
        for word in words:
            mixed = total + word * _WORD_PRIME
            total = ((mixed << _LEFT) | (mixed >> _RIGHT)) * _PRIME
    return total


class Rotation:
    """Rotation over the tensors to hash, so that no step hashes all of them.

    The tensors are split into ``within // every`` groups of consecutive ones. At each step that
    ``every`` divides one group is due, so any ``within`` steps in a row hash every tensor. A group
    exceeds an equal share of the bytes by no more than its largest tensor. A tensor of two shares
    or more has a group to itself, and then others may be empty.

    Parameters
    ----------
    nbytes : sequence of int
        Size of each tensor in bytes, the same on all ranks.
    within : int
        Number of steps in which every tensor is hashed once; at least ``every``.
    every : int
        Steps from one group to the next; at least 1.

    Raises
    ------
    ValueError
        If a number is out of its range.

    Examples
    --------
    >>> rotation = Rotation([40, 40, 80], within=20, every=10)
    >>> rotation.due(0), rotation.due(1), rotation.due(10)
    (range(0, 2), range(0, 0), range(2, 3))
    """

    def __init__(self, nbytes: Sequence[int], within: int = 100, every: int = 10) -> None:
        if not 1 <= every <= within:
            raise ValueError(
                f"every must lie in [1, within], got every={every!r} and within={within!r}; "
                "every=10, within=100 hashes a tenth of the bytes at each tenth step"
            )
        if min(nbytes, default=0) < 0:
            raise ValueError(f"nbytes must not be negative, got {min(nbytes)}")
        self.every = every
        self._groups = _split(nbytes, within // every)

    def due(self, step: int) -> range:
        """Return the indices of the tensors to hash at ``step``; the same on all ranks."""
        if step % self.every:
            return range(0)
        return self._groups[step // self.every % len(self._groups)]


def _split(nbytes: Sequence[int], n_groups: int) -> list[range]:
    """Put each tensor in the equal share of the bytes in which its middle lies."""
    total, before = max(1, sum(nbytes)), 0
    sizes = [0] * n_groups
    for size in nbytes:
        # An empty tensor at the very end would fall into a group after the last.
        group = (2 * before + size) * n_groups // (2 * total)
        sizes[min(group, n_groups - 1)] += 1
        before += size
    starts = [sum(sizes[:group]) for group in range(n_groups + 1)]
    return [range(*ends) for ends in itertools.pairwise(starts)]


def find_differences(gathered: Array, names: Sequence[str]) -> dict[str, list[int]]:
    """Return, for each tensor that differs between ranks, the ranks outside its majority.

    The majority is the hash that most ranks hold; of equally frequent ones that of the lowest
    rank. The majority is not necessarily right.

    Parameters
    ----------
    gathered : array
        uint64 ``[ranks, tensors]``: the hashes of rank r in row r. Unchanged.
    names : sequence of str
        A distinct name for each column.

    Returns
    -------
    dict of str to list of int
        Ranks in ascending order, for the tensors that differ, in the order of ``names``.

    Raises
    ------
    ValueError
        If ``gathered`` does not have two axes and one column for each name.

    Examples
    --------
    >>> find_differences(np.array([[7, 5], [7, 6], [7, 5]], np.uint64), ["bias", "weight"])
    {'weight': [1]}
    """
    if gathered.ndim != 2 or gathered.shape[1] != len(names):
        raise ValueError(
            f"gathered must have shape (ranks, {len(names)}), one column for each name; "
            f"got {gathered.shape}"
        )
    differences = {}
    for column in np.flatnonzero((gathered != gathered[:1]).any(axis=0)).tolist():
        hashes = gathered[:, column].tolist()
        # most_common keeps the order of first sight among equals: the lowest rank's comes first.
        [(majority, _)] = Counter(hashes).most_common(1)
        differences[names[column]] = [r for r, value in enumerate(hashes) if value != majority]
    return differences


def describe(differences: Mapping[str, Sequence[int]]) -> str:
    """Return a message about the result of ``find_differences``: tensors, ranks, causes, cure."""
    if not differences:
        return "all ranks hold the same values"
    places = [f"{name!r} on {list_ranks(ranks)}" for name, ranks in differences.items()]
    if len(places) > _SHOWN:
        places[_SHOWN:] = [f"and {len(places) - _SHOWN} more"]
    return (
        "the ranks no longer hold the same parameters; these differ from the majority: "
        + ", ".join(places)
        + ". Likely causes: parameters or optimizer state that were not broadcast from rank 0 at "
        "the start or after loading a checkpoint; an update that only some ranks made; ranks "
        "whose hardware or library versions differ, so that they round differently; or, if it is "
        "always the same rank, a faulty machine. Remove the cause, then restart all ranks from "
        "the last good checkpoint and broadcast parameters and optimizer state. If they are to "
        'differ, replica_check="off" ends this comparison.'
    )
