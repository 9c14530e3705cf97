"""Steps that the kernels of ``kernels.cuda`` compute: TensorFlow's tensors on a GPU, by DLPack."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.device_selftest import trusted
from horovod_fftcomp.kernels.cuda import Device

_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class LendingDevice(Device, Protocol):
    """A device that computes on memory of others, too."""

    def borrow(self, address: int, n: int, dtype: DTypeLike, owner: Any) -> Any:
        """Return ``n`` elements at an address as an array, which keeps their owner alive."""
        ...

    def owns(self, array: Any) -> bool:
        """Tell whether an array is the device's, not NumPy's."""
        ...

    def copy(self, array: Any, into: Any) -> None:
        """Overwrite an array by another of its dtype and size."""
        ...

    def wait(self) -> None:
        """Wait until everything is done that was launched."""
        ...


class TensorFlowMemory:
    """Tensors of TensorFlow's device ``place`` as arrays of ``device``, and back.

    The two launch on streams that do not know of each other. So TensorFlow's is waited for where a
    tensor comes in, and ours where tensors go out; TensorFlow owns all that goes out, and reuses it
    when it has done with it.
    """

    def __init__(self, device: LendingDevice, place: str) -> None:
        self.device, self.place = device, place

    def array_of(self, tensor: tf.Tensor) -> Any:
        """Return an eager tensor's memory, 1-D, once it has been computed."""
        n, dtype = tensor.shape.num_elements(), tensor.dtype.as_numpy_dtype
        return self.device.borrow(_address(tensor), n, dtype, tensor) if n else np.empty(0, dtype)

    def tensor_of(self, array: Any) -> tf.Tensor:
        """Return a tensor that is a copy of a 1-D array after ``device.wait``."""
        with tf.device(self.place):
            tensor = tf.fill(tf.constant([array.size], tf.int64), tf.zeros([], array.dtype))
        if array.size:
            self.device.copy(array, self.array_of(tensor))
        return tensor


def _address(tensor: tf.Tensor) -> int:
    """Return where an eager tensor lies, when it is ready.

    DLPack's number of the GPU is TensorFlow's own, which counts visible ones; CUDA knows another.
    """
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    # It points to DLPack's struct, whose first member is the address.
    return ctypes.c_uint64.from_address(_pointer_in(capsule, b"dltensor")).value


def memory_of(
    variables: Sequence[tf.Variable], buckets: Sequence[Bucket]
) -> TensorFlowMemory | None:
    """Return the memory of the GPU that holds all variables, if it can compute a bucket."""
    places = {variable.device for variable in variables}
    if len(places) != 1 or ":GPU:" not in (place := places.pop()):
        return None

    def make() -> LendingDevice:
        from horovod_fftcomp.kernels.cuda.cupy_device import CupyDevice, gpu_at

        with tf.init_scope(), tf.device(place):
            return CupyDevice(gpu_at(_address(tf.fill([1], 0.0))))

    device = trusted(make, place, buckets)
    return None if device is None else TensorFlowMemory(device, place)
