"""Large arrays whose memory is used again: fresh pages cost as much as a pass over them, or ten.

Every step makes new residuals and sums of the sizes of the last step's. When such an array is
freed its memory is kept for the next of that size, until none is in use any more.
"""

from __future__ import annotations

import os
import threading

import numpy as np

from horovod_fftcomp.types import Array

ALIGNMENT = 64  # of a cache line
_LEAST_NBYTES = 1 << 20  # smaller ones come from the heap, which keeps its pages itself
_SLACK = 1.25  # work space that is needed in turn is an eighth of what is needed at once


class _Pool:
    """Blocks by size. Used and kept ones together never exceed ``_SLACK`` times the most used."""

    def __init__(self) -> None:
        self._kept: dict[int, list[Array]] = {}
        self._kept_nbytes = self._used_nbytes = self._most_nbytes = 0
        self.unlock()

    def unlock(self) -> None:
        """Begin with a new lock: of a forked child's threads none could release the old one."""
        # Reentrant, since a garbage collection may give back a block at any time.
        self._lock = threading.RLock()

    def take(self, size: int) -> Array:
        with self._lock:
            block = self._pop(size) if size in self._kept else np.empty(size, np.uint8)
            self._used_nbytes += size
            self._most_nbytes = max(self._most_nbytes, self._used_nbytes)
            while self._kept_nbytes + self._used_nbytes > _SLACK * self._most_nbytes:
                self._pop(next(iter(self._kept)))
        return block

    def give(self, block: Array) -> None:
        with self._lock:
            self._used_nbytes -= block.size
            self._kept_nbytes += block.size
            self._kept.setdefault(block.size, []).append(block)
            if not self._used_nbytes:
                self._kept.clear()
                self._kept_nbytes = self._most_nbytes = 0

    def _pop(self, size: int) -> Array:
        block = self._kept[size].pop()
        if not self._kept[size]:
            del self._kept[size]
        self._kept_nbytes -= size
        return block


_pool = _Pool()
os.register_at_fork(after_in_child=_pool.unlock)


class _Lease:
    """Owns a block while arrays use it; the last of them to go gives it back."""

    def __init__(self, pool: _Pool, n: int, dtype: np.dtype) -> None:
        self._block = pool.take(n * dtype.itemsize + ALIGNMENT)
        self._pool = pool  # a module's names are gone when an interpreter ends
        start = self._block.ctypes.data
        self.__array_interface__ = {
            "data": (start + -start % ALIGNMENT, False),
            "shape": (n,),
            "typestr": dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "_pool"):  # else there was no memory
            self._pool.give(self._block)


def empty(n: int, dtype: type = np.float32) -> Array:
    """Return an array of ``n`` elements with any contents, at a multiple of ``ALIGNMENT``."""
    kind = np.dtype(dtype)
    if n * kind.itemsize < _LEAST_NBYTES:
        return np.empty(n, kind)
    return np.asarray(_Lease(_pool, n, kind))


def zeros(n: int, dtype: type = np.float32) -> Array:
    """Return an array of ``n`` zeros; see ``empty``."""
    array = empty(n, dtype)
    array.fill(0)
    return array
