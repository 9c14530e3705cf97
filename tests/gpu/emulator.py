"""Kernels on the CPU: launches what ``build`` makes of CUDA sources or of their PTX."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from horovod_fftcomp import Codec
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels.cuda.decoder import Decoder, ThresholdDecoder
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from tests.gpu.build import Kernel, built
from tests.gpu.signatures import must_not_overlap

FORWARD, BACKWARD, SHUFFLED = range(3)
_C_TYPES = {
    np.dtype(np.uint32): ctypes.c_uint32,
    np.dtype(np.uint64): ctypes.c_uint64,
    np.dtype(np.float64): ctypes.c_double,
}

launches = Counter[str]()  # of each kernel in this process, by name expression


class _Borrowed:
    """Memory as NumPy asks for it."""

    def __init__(self, address: int, n: int, dtype: type, owner: object) -> None:
        kind = np.dtype(dtype).str
        self.owner = owner
        self.__array_interface__ = dict(data=(address, False), shape=(n,), typestr=kind, version=3)


class DeviceArray(np.ndarray):
    """An array that is the emulator's, or memory that it has borrowed."""


class Emulator:
    """A device whose arrays are NumPy's; the same face as ``horovod_fftcomp.kernels.cuda.Device``.

    ``schedule``: in which order the threads run between two synchronisations.
    """

    def __init__(self, schedule: int = FORWARD, seed: int = 1, *flags: str) -> None:
        self.schedule, self.seed, self.flags = schedule, seed, flags
        self.cache: dict = {}
        self.n_processors = 1

    def empty(self, n: int, dtype: type = np.float32) -> np.ndarray:
        """Return ``n`` elements with any contents, at an address as a device's."""
        room = DeviceArray(n * np.dtype(dtype).itemsize + 256, np.uint8)
        room[:] = 0xAB
        begin = -room.ctypes.data % 256
        return room[begin : begin + n * np.dtype(dtype).itemsize].view(dtype)

    def zeros(self, n: int, dtype: type = np.float32) -> np.ndarray:
        """Return ``n`` zeros."""
        array = self.empty(n, dtype)
        array.fill(0)
        return array

    def upload(self, array: np.ndarray) -> np.ndarray:
        """Return a copy on the device."""
        copied = self.empty(array.size, array.dtype)
        copied[:] = array.reshape(-1)
        return copied

    def fetch(self, array: np.ndarray) -> Callable[[], np.ndarray]:
        """Return what returns a copy of an array as it is now."""
        copied = np.array(array)  # NumPy's
        return lambda: copied

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return arrays of one dtype one after the other, in a new one."""
        return self.upload(np.concatenate(arrays))

    def clear(self, array: np.ndarray) -> None:
        """Fill an array with zeros."""
        array.fill(0)

    def scale(self, array: np.ndarray, factor: np.float32) -> None:
        """Multiply an array by a number."""
        array *= factor

    def multiply(self, matrix, rows: int, factor, out, transposed: bool) -> None:
        """Overwrite ``out`` by a matrix, or its transpose, times a factor; all flat."""
        left = matrix.reshape(rows, -1)
        left = left.T if transposed else left
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(left, factor.reshape(left.shape[1], -1), out=out.reshape(len(left), -1))

    def address(self, array: np.ndarray) -> int:
        """Return where an array lies."""
        return array.ctypes.data

    def borrow(self, address: int, n: int, dtype: type, owner: object) -> np.ndarray:
        """Return memory of others as an array, which keeps their owner alive."""
        return np.asarray(_Borrowed(address, n, dtype, owner)).view(DeviceArray)

    def owns(self, array: np.ndarray) -> bool:
        """Tell whether an array is the device's, not NumPy's."""
        return isinstance(array, DeviceArray)

    def copy(self, array: np.ndarray, into: np.ndarray) -> None:
        """Overwrite an array by another of its dtype and size."""
        assert self.owns(array)
        assert (array.dtype, array.shape) == (into.dtype, into.shape)
        into[:] = array

    def wait(self) -> None:
        """Do nothing: whatever is launched has been done."""

    def functions(self, source: str, names: Sequence[str]) -> dict[str, Callable[..., None]]:
        """Return the kernels of ``source`` with these name expressions, or of its PTX."""
        kernels = built(source, names, self.flags)
        return {name: _Function(kernels[name], name, source, self) for name in names}


def decoder_for(
    device: cuda.Device, codec: Codec, shapes: list, encoder: Encoder, n_ranks: int
) -> Decoder | ThresholdDecoder:
    """Return what sums messages of ``encoder``, all of whose tensors have the same codec."""
    codecs = [codec] * len(shapes)
    if codec.has_fixed_size:
        return Decoder(device, codecs, shapes, encoder, n_ranks)
    return ThresholdDecoder(device, codecs, shapes, n_ranks)


class _Function:
    def __init__(self, kernel: Kernel, name: str, source: str, emulator: Emulator) -> None:
        self._library, self._name, self._emulator = kernel.library, name, emulator
        self._library.emulator_error.restype = ctypes.c_char_p
        self._launch = getattr(kernel.library, f"launch_{kernel.number}")
        sizes = (ctypes.c_int * 32)()
        count = getattr(kernel.library, f"sizes_{kernel.number}")(sizes)
        self._sizes = list(sizes[:count])
        self._apart = must_not_overlap(source, name.partition("<")[0])

    def __call__(self, grid: int, threads: int, arguments: Sequence, shared_nbytes: int) -> None:
        launches[self._name] += 1
        values = [_c_value(argument) for argument in arguments]
        sizes = [ctypes.sizeof(value) for value in values]
        assert sizes == self._sizes, f"{self._name} takes arguments of {self._sizes} bytes: {sizes}"
        for one, other in self._apart:
            assert not _overlap(arguments[one.place], arguments[other.place]), (
                f"{self._name}: {one.name}, which is __restrict__, overlaps {other.name}"
            )
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        self._library.emulator_schedule(self._emulator.schedule, self._emulator.seed)
        if self._launch(pointers, grid, threads, shared_nbytes):
            raise RuntimeError(f"{self._name}: {self._library.emulator_error().decode()}")


def _overlap(one: np.ndarray | np.uint64, other: np.ndarray | np.uint64) -> bool:
    """Return whether arguments have bytes in common; of an address, which one byte is known."""
    (begin, end), (others_begin, others_end) = _bytes_of(one), _bytes_of(other)
    return max(begin, others_begin) < min(end, others_end)


def _bytes_of(argument: np.ndarray | np.uint64) -> tuple[int, int]:
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data, argument.ctypes.data + argument.nbytes
    return int(argument), int(argument) + 1


def _c_value(argument: np.ndarray | np.generic) -> ctypes._SimpleCData:
    if isinstance(argument, np.ndarray):
        return ctypes.c_uint64(argument.ctypes.data)
    return _C_TYPES[argument.dtype](argument.item())
