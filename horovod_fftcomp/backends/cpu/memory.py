"""Large arrays whose memory is used again: fresh pages cost as much as a pass over them.

Every step makes new residuals and sums of the sizes of the last step's. When such an array is
freed its memory is kept for the next of that size, as long as no more is kept than is in use.
"""

from __future__ import annotations

import numpy as np

from horovod_fftcomp.backends import Array

ALIGNMENT = 64  # of a cache line
_LEAST_NBYTES = 1 << 20  # smaller ones come from the heap, which keeps its pages itself

_kept: dict[int, list[Array]] = {}
_nbytes = {"kept": 0, "in use": 0}


class _Lease:
    """Owns a block while arrays use it; the last of them to go gives it back."""

    def __init__(self, block: Array, n: int, dtype: np.dtype) -> None:
        self._block = block
        start = block.ctypes.data
        self.__array_interface__ = {
            "data": (start + -start % ALIGNMENT, False),
            "shape": (n,),
            "typestr": dtype.str,
            "version": 3,
        }
        _nbytes["in use"] += block.size

    def __del__(self, nbytes: dict[str, int] = _nbytes, kept: dict = _kept) -> None:
        # Defaults, since a module's names are gone when an interpreter ends.
        size = self._block.size
        nbytes["in use"] -= size
        if nbytes["kept"] + size <= nbytes["in use"]:
            nbytes["kept"] += size
            kept.setdefault(size, []).append(self._block)


def empty(n: int, dtype: type = np.float32) -> Array:
    """Return an array of ``n`` elements with any contents, at a multiple of ``ALIGNMENT``."""
    kind = np.dtype(dtype)
    if n * kind.itemsize < _LEAST_NBYTES:
        return np.empty(n, kind)
    size = n * kind.itemsize + ALIGNMENT
    try:
        block = _kept[size].pop()
        _nbytes["kept"] -= size
    except (KeyError, IndexError):
        block = np.empty(size, np.uint8)
    return np.asarray(_Lease(block, n, kind))


def zeros(n: int, dtype: type = np.float32) -> Array:
    """Return an array of ``n`` zeros; see ``empty``."""
    array = empty(n, dtype)
    array.fill(0)
    return array
