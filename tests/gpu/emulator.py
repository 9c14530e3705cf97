"""Kernels on the CPU: builds CUDA sources with g++ for ``cuda_emulator.h`` and launches them."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from horovod_fftcomp import Codec
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels.cuda.decoder import Decoder, ThresholdDecoder
from horovod_fftcomp.kernels.cuda.encoder import Encoder

HERE = Path(__file__).parent
FORWARD, BACKWARD, SHUFFLED = range(3)
# No contraction into fused multiply-adds, which would round otherwise than a device does.
FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing",
         "-ftls-model=initial-exec")  # fmt: skip
_C_TYPES = {
    np.dtype(np.uint32): ctypes.c_uint32,
    np.dtype(np.uint64): ctypes.c_uint64,
    np.dtype(np.float64): ctypes.c_double,
}


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
        """Return the kernels called ``names`` of ``source``, by name expression.

        Those of the package are built all at once, since one build serves all tests.
        """
        of_package = set(names) <= set(cuda.NAMES)
        built = cuda.NAMES if of_package else tuple(names)
        library = ctypes.CDLL(str(_built(source, built, self.flags)))
        library.emulator_error.restype = ctypes.c_char_p
        return {name: _Function(library, built.index(name), name, self) for name in names}


def decoder_for(
    device: cuda.Device, codec: Codec, shapes: list, encoder: Encoder, n_ranks: int
) -> Decoder | ThresholdDecoder:
    """Return what sums messages of ``encoder``, all of whose tensors have the same codec."""
    codecs = [codec] * len(shapes)
    if codec.has_fixed_size:
        return Decoder(device, codecs, shapes, encoder, n_ranks)
    return ThresholdDecoder(device, codecs, shapes, n_ranks)


class _Function:
    def __init__(self, library: ctypes.CDLL, number: int, name: str, emulator: Emulator) -> None:
        self._library, self._name, self._emulator = library, name, emulator
        self._launch = getattr(library, f"launch_{number}")
        sizes = (ctypes.c_int * 32)()
        count = getattr(library, f"sizes_{number}")(sizes)
        self._sizes = list(sizes[:count])

    def __call__(self, grid: int, threads: int, arguments: Sequence, shared_nbytes: int) -> None:
        values = [_c_value(argument) for argument in arguments]
        sizes = [ctypes.sizeof(value) for value in values]
        assert sizes == self._sizes, f"{self._name} takes arguments of {self._sizes} bytes: {sizes}"
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        self._library.emulator_schedule(self._emulator.schedule, self._emulator.seed)
        if self._launch(pointers, grid, threads, shared_nbytes):
            raise RuntimeError(f"{self._name}: {self._library.emulator_error().decode()}")


def _c_value(argument: np.ndarray | np.generic) -> ctypes._SimpleCData:
    if isinstance(argument, np.ndarray):
        return ctypes.c_uint64(argument.ctypes.data)
    return _C_TYPES[argument.dtype](argument.item())


def _built(source: str, names: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """Return the library of a source, built unless one of the same text is there."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing: no emulated kernels")
    parts = [source, *names, *flags, (HERE / "cuda_emulator.cpp").read_text()]
    parts.append((HERE / "cuda_emulator.h").read_text())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fftcomp-emulator-{os.getuid()}-{digest}"
    folder.mkdir(exist_ok=True)
    library = folder / "kernels.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building it
        if not library.exists():
            _build(source, names, flags, folder, library)
    return library


def _build(
    source: str, names: tuple[str, ...], flags: tuple[str, ...], folder: Path, library: Path
) -> None:
    (folder / "kernels.cu").write_text(source)
    exports = [f"EXPORT({number}, {name})\n" for number, name in enumerate(names)]
    (folder / "exports.inc").write_text("".join(exports))
    part = folder / "part.so"
    command = [
        "g++", *FLAGS, *flags, "-shared", "-I", str(HERE),
        f'-DKERNELS="{folder}/kernels.cu"', f'-DEXPORTS="{folder}/exports.inc"',
        str(HERE / "cuda_emulator.cpp"), "-o", str(part),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-5000:]
    part.replace(library)
