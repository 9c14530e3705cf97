"""Addresses of arrays, from Python for many arrays at once, and arrays at addresses in kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.kernels.cpu.inlining import allocating
from horovod_fftcomp.kernels.cpu.jit import kernel
from horovod_fftcomp.types import Array, Arrays

_DATA = 16  # offset of the pointer to the data in an array object, fixed by NumPy's C interface


@intrinsic
def _pointer(typing_context, address, like):
    """Return an int64 as a pointer to elements of the dtype of the array ``like``."""
    kind = types.CPointer(like.dtype)

    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(types.int64, like), codegen


@allocating
def view_at(address, n, like):
    """Return the ``n`` elements at an address, of the dtype of the array ``like``, as an array."""
    return carray(_pointer(address, like), (n,))  # type: ignore[call-arg]


_FLOATS = np.zeros(0, np.float32)


@allocating
def floats_at(address, n):
    """Return the ``n`` float32 at an address as an array."""
    return view_at(address, n, _FLOATS)


@kernel
def _read_addresses(objects, like, addresses):
    """Write the address of the data of each array object."""
    for i in range(objects.size):
        if objects[i]:
            addresses[i] = view_at(objects[i] + _DATA, 1, like)[0]


def data_is_found() -> bool:
    """Return whether this interpreter's array objects have the layout that is read above."""
    found, array = np.zeros(1, np.int64), np.zeros(3)
    if object.__basicsize__ != _DATA:
        return False
    _read_addresses(np.array([id(array)]), found, found)
    return bool(found[0] == array.ctypes.data)


FOUND: list[bool] = []


def addresses_of(arrays: Arrays, out: Array) -> None:
    """Write the address of each array to ``out``, int64; 0 for None.

    ``array.ctypes.data`` takes a microsecond, which is too long for each of many small tensors.
    """
    if not FOUND:
        FOUND.append(data_is_found())
    if FOUND[0]:
        objects = np.array([0 if array is None else id(array) for array in arrays], np.int64)
        out.fill(0)
        _read_addresses(objects, out, out)
    else:
        out[:] = [0 if array is None else array.ctypes.data for array in arrays]


def addresses(kind: str, arrays: Arrays, formats: Sequence[tuple[np.dtype, int]]) -> Array:
    """Return the addresses of contiguous arrays, int64; 0 for None.

    Raises ValueError unless each array has its format, (dtype, elements). ``kind``: what they are.
    """
    for array, form in zip(arrays, formats, strict=True):
        if array is None:
            continue
        if (array.dtype, array.size) != form:
            check_state(kind, array, form)
        if not array.flags.c_contiguous:
            raise ValueError(f"a {kind} has strides {array.strides}, expected contiguous")
    found = np.empty(len(arrays), np.int64)
    addresses_of(arrays, found)
    return found


@allocating
def residual_at(at, n, decay, scaled):
    """Return the residual of ``n`` floats at an address, times ``decay``; an empty one for 0.

    ``scaled``: a buffer for the product.
    """
    residual = floats_at(at, n if at else 0)
    if decay == 1:
        return residual
    for i in range(residual.size):
        scaled[i] = residual[i] * decay
    return scaled[: residual.size]
