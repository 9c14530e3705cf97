"""Views, copies and maxima of arrays for kernels, in place of Numba's own.

Those check shapes that kernels know, and compiling their messages takes a second.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from horovod_fftcomp.kernels.cpu.inlining import inlined


def _view(dtype: Any) -> Any:
    """Return ``view(array)`` for kernels: the memory of a contiguous array as 1-D of ``dtype``.

    Raises TypingError for an array that is not contiguous. At its end bytes may be left over.
    """

    @intrinsic
    def view(typing_context, array):
        """Return the elements of the other type."""
        if not isinstance(array, types.Array) or array.layout != "C":
            raise TypingError(f"expected a contiguous array, got {array}")
        to = types.Array(dtype, 1, "C", readonly=not array.mutable)

        def codegen(context, builder, signature, arguments):
            old = make_array(array)(context, builder, arguments[0])
            new = make_array(to)(context, builder)
            itemsize = context.get_constant(types.intp, dtype.bitwidth // 8)
            nbytes = builder.mul(old.nitems, old.itemsize)
            size = builder.udiv(nbytes, itemsize)
            data = builder.bitcast(old.data, context.get_data_type(dtype).as_pointer())
            populate_array(
                new, data, cgutils.pack_array(builder, [size]),
                cgutils.pack_array(builder, [itemsize]), itemsize, old.meminfo, old.parent,
            )  # fmt: skip
            return impl_ret_borrowed(context, builder, to, new._getvalue())

        return to(array), codegen

    return view


as_float32, as_int32 = _view(types.float32), _view(types.int32)
as_uint8, as_uint32, as_uint64 = _view(types.uint8), _view(types.uint32), _view(types.uint64)


@inlined
def copy_into(out, source):
    """Write ``source``, of at least as many elements, to all of ``out``."""
    if source.size < out.size:
        raise ValueError("the source of a copy is too short")
    for i in range(out.size):
        out[i] = source[i]


@inlined
def largest(values):
    """Return the largest of one or more finite values."""
    found = values[0]
    for value in values[1:]:
        found = max(found, value)
    return found


@inlined
def multiply(values, factor):
    """Multiply values in place, unless ``factor`` is 1."""
    if factor != 1:
        for i in range(values.size):
            values[i] *= factor
