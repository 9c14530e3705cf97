"""Arrays by address: kernels that work on all tensors of a bucket in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from horovod_fftcomp.kernels.cpu.jit import inlined, kernel
from horovod_fftcomp.types import Array

_DATA = 16  # offset of the pointer to the data in an array object, fixed by NumPy's C interface


@intrinsic
def _pointer(typing_context, address, like):
    """Return an int64 as a pointer to elements of the dtype of the array ``like``."""
    kind = types.CPointer(like.dtype)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, like), codegen


@inlined
def view_at(address, n, like):
    """Return the ``n`` elements at an address, of the dtype of the array ``like``, as an array."""
    return carray(_pointer(address, like), (n,))  # type: ignore[call-arg]


@kernel
def _read_addresses(objects, like, addresses):
    """Write the address of the data of each array object."""
    for i in range(objects.size):
        if objects[i]:
            addresses[i] = view_at(objects[i] + _DATA, 1, like)[0]


def _data_is_found() -> bool:
    """Return whether this interpreter's array objects have the layout that is read above."""
    found, array = np.zeros(1, np.int64), np.zeros(3)
    if object.__basicsize__ != _DATA:
        return False
    _read_addresses(np.array([id(array)]), found, found)
    return bool(found[0] == array.ctypes.data)


_FOUND: list[bool] = []


def addresses_of(arrays: Sequence[Array | None], out: Array) -> None:
    """Write the address of each array to ``out``, int64; 0 for None.

    ``array.ctypes.data`` takes a microsecond, which is too long for each of many small tensors.
    """
    if not _FOUND:
        _FOUND.append(_data_is_found())
    if _FOUND[0]:
        objects = np.array([0 if array is None else id(array) for array in arrays], np.int64)
        out.fill(0)
        _read_addresses(objects, out, out)
    else:
        out[:] = [0 if array is None else array.ctypes.data for array in arrays]
