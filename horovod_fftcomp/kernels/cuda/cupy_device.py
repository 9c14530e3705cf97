"""Device of CuPy: its arrays, and kernels compiled by NVRTC."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import cupy
import cupyx
import numpy as np
from numpy.typing import DTypeLike

from horovod_fftcomp.kernels.cuda import NAMES, OPTIONS, Launch

_known: dict[tuple[int, str], dict[str, Launch]] = {}


class CupyDevice:
    """Device whose arrays are CuPy's on one GPU; see ``cuda.Device``.

    Kernels run on the default stream, from any thread. ``gpu``: the CUDA device number in this
    process; None: CuPy's current device.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self.cache: dict[Any, Any] = {}
        self._copies: list[tuple[Any, np.ndarray]] = []  # to the host, some not yet done
        self._gpu = cupy.cuda.Device().id if gpu is None else gpu
        attributes = cupy.cuda.Device(self._gpu).attributes
        self.n_processors = attributes["MultiProcessorCount"]

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        # Not restored: that would create a context on the GPU that a thread starts with.
        if cupy.cuda.runtime.getDevice() != self._gpu:
            cupy.cuda.runtime.setDevice(self._gpu)
        with cupy.cuda.Stream.null:
            yield

    def empty(self, n: int, dtype: DTypeLike = np.float32) -> cupy.ndarray:
        """Return an uninitialized array of ``n`` elements."""
        with self._here():
            return cupy.empty(n, dtype)

    def zeros(self, n: int, dtype: DTypeLike = np.float32) -> cupy.ndarray:
        """Return an array of ``n`` zeros."""
        with self._here():
            return cupy.zeros(n, dtype)

    def upload(self, array: np.ndarray) -> cupy.ndarray:
        """Return a copy on the GPU, through pinned memory, so that the host does not wait."""
        with self._here():
            # ``np.array`` copies to pageable memory: CuPy reads pinned memory after it returns.
            return cupy.array(np.array(array).reshape(-1), blocking=False)

    def fetch(self, array: cupy.ndarray) -> Callable[[], np.ndarray]:
        """Start a copy of an array to the host; return a function that waits for and returns it."""
        with self._here():
            host = cupyx.empty_like_pinned(array)
            array.get(out=host, blocking=False)
            event = cupy.cuda.Event(disable_timing=True)
            event.record()
        # The caller may drop the function; the memory must not be reused before the copy is done.
        self._copies = [copy for copy in self._copies if not copy[0].done] + [(event, host)]

        def fetched() -> np.ndarray:
            event.synchronize()
            return host

        return fetched

    def joined(self, arrays: Sequence[cupy.ndarray]) -> cupy.ndarray:
        """Return the concatenation of arrays of one dtype, a new array."""
        with self._here():
            return cupy.concatenate(arrays)

    def clear(self, array: cupy.ndarray) -> None:
        """Fill an array with zeros."""
        with self._here():
            array.fill(0)

    def scale(self, array: cupy.ndarray, factor: np.float32) -> None:
        """Multiply an array by a number, in place."""
        with self._here():
            array *= factor

    def multiply(self, matrix: Any, rows: int, factor: Any, out: Any, transposed: bool) -> None:
        """Write ``matrix``, or its transpose, times ``factor`` to ``out``; all are flat."""
        with self._here():
            left = matrix.reshape(rows, -1).T if transposed else matrix.reshape(rows, -1)
            cupy.matmul(left, factor.reshape(left.shape[1], -1), out=out.reshape(len(left), -1))

    def address(self, array: cupy.ndarray) -> int:
        """Return the device address of an array."""
        return array.data.ptr

    def functions(self, source: str, names: Sequence[str]) -> Mapping[str, Launch]:
        """Return the compiled kernels of ``source`` with these name expressions."""
        with self._here():
            kernels = compiled(source, names)
        return {name: self._launcher(kernel) for name, kernel in kernels.items()}

    def _launcher(self, kernel: Launch) -> Launch:
        def launch(grid: int, threads: int, arguments: Sequence[Any], shared_nbytes: int) -> None:
            with self._here():
                kernel(grid, threads, arguments, shared_nbytes)

        return launch

    # Methods for memory that another library owns.

    def borrow(self, address: int, n: int, dtype: DTypeLike, owner: Any) -> cupy.ndarray:
        """Return ``n`` elements at an address as an array that keeps ``owner`` alive."""
        nbytes = n * np.dtype(dtype).itemsize
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self._gpu)
        return cupy.ndarray(n, dtype, cupy.cuda.MemoryPointer(memory, 0))

    def owns(self, array: Any) -> bool:
        """Return whether an array is CuPy's, not NumPy's."""
        return isinstance(array, cupy.ndarray)

    def copy(self, array: cupy.ndarray, into: cupy.ndarray) -> None:
        """Copy an array into another of its dtype and size."""
        with self._here():
            into[...] = array

    def wait(self) -> None:
        """Wait until all launched kernels and copies are done."""
        with self._here():
            cupy.cuda.Stream.null.synchronize()


def gpu_at(address: int) -> int:
    """Return the number of the GPU whose memory contains an address."""
    return cupy.cuda.runtime.pointerGetAttributes(address).device


def compiled(source: str, names: Sequence[str]) -> dict[str, Launch]:
    """Return kernels for CuPy's current device; a process compiles each of them once."""
    key = (cupy.cuda.Device().id, source)
    known = _known.setdefault(key, {})
    missing = [name for name in names if name not in known]
    if missing:
        # Kernels that are no templates are part of every module that is compiled.
        plain = [name for name in NAMES if "<" not in name and name not in known]
        missing = [*dict.fromkeys([*missing, *plain])]
        module = cupy.RawModule(code=source, options=OPTIONS, name_expressions=missing)
        for name in missing:
            known[name] = functools.partial(_launch, module.get_function(name))
    return {name: known[name] for name in names}


class Stream(NamedTuple):
    """Stream of another library, in the form that CuPy's launches take."""

    ptr: int


def _launch(
    kernel: cupy.RawKernel,
    grid: int,
    threads: int,
    arguments: Sequence[Any],
    shared_nbytes: int,
    stream: Stream | None = None,
) -> None:
    kernel((grid,), (threads,), tuple(arguments), shared_mem=shared_nbytes, stream=stream)
