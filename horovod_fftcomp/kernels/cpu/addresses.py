"""Addresses of arrays, from Python for many arrays at once, and arrays at addresses in kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.kernels.cpu.jit import inlined
from horovod_fftcomp.types import Array

_address_of: Callable[[Any], int] = ctypes.addressof
_first_byte: Callable[[Any], Any] = ctypes.c_char.from_buffer


def address(array: Array) -> int:
    """Return the address of the data of a contiguous array; ValueError if it is not contiguous."""
    try:
        return _address_of(_first_byte(array))  # a quarter of the time of ``array.ctypes.data``
    except (TypeError, ValueError):  # read-only, strided or empty
        if not array.flags.c_contiguous:
            raise ValueError(f"an array has strides {array.strides}, expected contiguous") from None
        return array.ctypes.data


def addresses(
    kind: str, arrays: Sequence[Array | None], formats: Sequence[tuple[np.dtype, int]]
) -> Array:
    """Return the addresses of contiguous arrays, int64; 0 for None.

    Raises ValueError unless each array has its format, (dtype, elements). ``kind``: what they are.
    """
    found = np.zeros(len(arrays), np.int64)
    for number, (array, form) in enumerate(zip(arrays, formats, strict=True)):
        if array is not None:
            if (array.dtype, array.size) != form:
                check_state(kind, array, form)
            try:
                found[number] = _address_of(_first_byte(array))
            except (TypeError, ValueError):
                found[number] = address(array)
    return found


def _pointer_to(kind: types.Type) -> Any:
    """Return a function for kernels from an address, int64, to a pointer to ``kind``."""

    @intrinsic
    def pointer(context, at):
        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


def _array_at(kind: types.Type) -> Callable[[int, int], Array]:
    """Return a function for kernels from (address, number of elements) to an array of ``kind``."""
    pointer = _pointer_to(kind)

    @inlined
    def array_at(at, n):
        return numba.carray(pointer(at), (n,))

    return array_at


floats_at = _array_at(types.float32)


@inlined
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
