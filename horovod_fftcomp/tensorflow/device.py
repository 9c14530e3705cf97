"""TensorFlow tensors on a GPU as arrays of the CUDA kernels, without a copy, by DLPack."""

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
    """Interface of a device whose kernels can use memory allocated by TensorFlow."""

    def borrow(self, address: int, n: int, dtype: DTypeLike, owner: Any) -> Any:
        """Return an array of the ``n`` elements at ``address``; it keeps ``owner`` alive."""

    def owns(self, array: Any) -> bool:
        """Return whether ``array`` is an array of the device, not of NumPy."""

    def copy(self, array: Any, into: Any) -> None:
        """Copy ``array`` to the array ``into`` of the same dtype and size."""

    def wait(self) -> None:
        """Wait for all launched kernels and copies."""


class TensorFlowMemory:
    """Conversions between tensors on TensorFlow's device ``place`` and arrays of ``device``.

    TensorFlow and ``device`` use unsynchronized streams. So an input tensor waits for TensorFlow's
    stream, and output tensors have to wait for ours, see ``tensor_of``. Output tensors are in
    TensorFlow's memory, which TensorFlow frees.
    """

    def __init__(self, device: LendingDevice, place: str) -> None:
        self.device, self.place = device, place

    def array_of(self, tensor: tf.Tensor) -> Any:
        """Return a 1-D array on an eager tensor's memory, after the tensor has been computed."""
        n, dtype = tensor.shape.num_elements(), tensor.dtype.as_numpy_dtype
        return self.device.borrow(_address(tensor), n, dtype, tensor) if n else np.empty(0, dtype)

    def tensor_of(self, array: Any) -> tf.Tensor:
        """Return a copy of a 1-D array as a tensor, which is valid after ``device.wait()``."""
        with tf.device(self.place):
            tensor = tf.fill(tf.constant([array.size], tf.int64), tf.zeros([], array.dtype))
        if array.size:
            self.device.copy(array, self.array_of(tensor))
        return tensor


def _address(tensor: tf.Tensor) -> int:
    """Return the address of an eager tensor's memory; waits until the tensor is computed.

    The device id in DLPack is not used: TensorFlow numbers visible GPUs differently from CUDA.
    """
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    # The capsule points to a DLTensor, whose first member is the address.
    return ctypes.c_uint64.from_address(_pointer_in(capsule, b"dltensor")).value


def memory_of(
    variables: Sequence[tf.Variable], buckets: Sequence[Bucket]
) -> TensorFlowMemory | None:
    """Return the memory of the GPU with all variables; None if the CPU computes steps."""
    places = {variable.device for variable in variables}
    if len(places) != 1 or ":GPU:" not in (place := places.pop()):
        return None

    def make() -> LendingDevice:
        from horovod_fftcomp.kernels.cuda.cupy_device import CupyDevice, gpu_at

        with tf.init_scope(), tf.device(place):
            return CupyDevice(gpu_at(_address(tf.fill([1], 0.0))))

    device = trusted(make, place, buckets)
    return None if device is None else TensorFlowMemory(device, place)
