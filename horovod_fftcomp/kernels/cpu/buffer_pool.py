"""Pool of memory for large arrays: new pages cost as much as one to ten passes over an array.

Every step allocates residuals and sums of the same sizes as the last step. When such an array is
freed, its memory is kept for the next array of that size, until no array is in use any more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.types import Array

ALIGNMENT = 64  # bytes, a cache line
LEAST_NBYTES = 1 << 20  # smaller arrays come from the heap, which reuses its pages itself
SLACK = 1.25  # temporary arrays, used one after another, take an eighth of the memory in use


class Pool:
    """Freed blocks by size; used and kept blocks stay within ``SLACK`` times the most used."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Array]] = {}
        self.kept_nbytes = self.used_nbytes = self.most_nbytes = 0
        self.unlock()

    def unlock(self) -> None:
        """Create a new lock: in a forked child, no thread could release an old one that is held."""
        # Reentrant, since a garbage collection may return a block at any time.
        self._lock = threading.RLock()

    def take(self, size: int) -> Array:
        """Return a block of ``size`` bytes, a kept one if there is one."""
        with self._lock:
            block = self._pop(size) if size in self.kept else np.empty(size, np.uint8)
            self.used_nbytes += size
            self.most_nbytes = max(self.most_nbytes, self.used_nbytes)
            while self.kept_nbytes + self.used_nbytes > SLACK * self.most_nbytes:
                self._pop(next(iter(self.kept)))
        return block

    def give(self, block: Array) -> None:
        """Take back a block that no array uses any more."""
        with self._lock:
            self.used_nbytes -= block.size
            self.kept_nbytes += block.size
            self.kept.setdefault(block.size, []).append(block)
            if not self.used_nbytes:
                self.kept.clear()
                self.kept_nbytes = self.most_nbytes = 0

    def _pop(self, size: int) -> Array:
        block = self.kept[size].pop()
        if not self.kept[size]:
            del self.kept[size]
        self.kept_nbytes -= size
        return block


pool = Pool()
os.register_at_fork(after_in_child=pool.unlock)


class _Lease:
    """Owner of a block while arrays use it; returns it to the pool when the last one is freed."""

    def __init__(self, pool: Pool, n: int, dtype: np.dtype) -> None:
        self._block = pool.take(n * dtype.itemsize + ALIGNMENT)
        self.pool = pool  # module globals may be gone when ``__del__`` runs at exit
        start = self._block.ctypes.data
        self.__array_interface__ = {
            "data": (start + -start % ALIGNMENT, False),
            "shape": (n,),
            "typestr": dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "pool"):  # else the allocation failed
            self.pool.give(self._block)


def empty(n: int, dtype: type = np.float32) -> Array:
    """Return an uninitialized array of ``n`` elements; a large one is aligned to ``ALIGNMENT``."""
    kind = np.dtype(dtype)
    if n * kind.itemsize < LEAST_NBYTES:
        return np.empty(n, kind)
    return np.asarray(_Lease(pool, n, kind))


def joined(parts: Sequence[Array | None], dtype: type) -> Array | None:
    """Return views that follow each other in one array as one; None if they are no such ones."""
    whole = None if parts[0] is None else parts[0].base
    if not isinstance(whole, np.ndarray) or whole.ndim != 1 or not whole.flags.c_contiguous:
        return None
    begin = end = _address(parts[0])
    for part in parts:
        if part is None or (part.size and (part.base is not whole or _address(part) != end)):
            return None
        end += part.nbytes
    start = _address(whole)
    return whole.view(np.uint8)[begin - start : end - start].view(dtype)


def _address(array: Any) -> int:
    return array.__array_interface__["data"][0]


def zeros(n: int, dtype: type = np.float32) -> Array:
    """Return an array of ``n`` zeros; see ``empty``."""
    array = empty(n, dtype)
    array.fill(0)
    return array
