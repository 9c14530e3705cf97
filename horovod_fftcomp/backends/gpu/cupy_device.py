"""The GPU that CuPy's current device is: its arrays, and kernels compiled by NVRTC."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cupy
import cupyx
import numpy as np
from numpy.typing import DTypeLike

from horovod_fftcomp.backends.gpu import OPTIONS, Launch

_known: dict[tuple[int, str], dict[str, Launch]] = {}


class CupyDevice:
    """Arrays and launches on CuPy's current stream; see ``gpu.Device``."""

    def __init__(self) -> None:
        self.cache: dict[Any, Any] = {}

    def empty(self, n: int, dtype: DTypeLike = np.float32) -> cupy.ndarray:
        """Return ``n`` elements with any contents."""
        return cupy.empty(n, dtype)

    def zeros(self, n: int, dtype: DTypeLike = np.float32) -> cupy.ndarray:
        """Return ``n`` zeros."""
        return cupy.zeros(n, dtype)

    def upload(self, array: np.ndarray) -> cupy.ndarray:
        """Return a copy on the GPU; goes through pinned memory, so the host does not wait."""
        return cupy.array(array.reshape(-1), blocking=False)

    def fetch(self, array: cupy.ndarray) -> Callable[[], np.ndarray]:
        """Begin to copy an array to the host; the function that is returned waits for that."""
        host = cupyx.empty_like_pinned(array)
        array.get(out=host, blocking=False)
        event = cupy.cuda.Event(disable_timing=True)
        event.record()

        def fetched() -> np.ndarray:
            event.synchronize()
            return host

        return fetched

    def joined(self, arrays: Sequence[cupy.ndarray]) -> cupy.ndarray:
        """Return arrays of one dtype one after the other, in a new one."""
        return cupy.concatenate(arrays)

    def clear(self, array: cupy.ndarray) -> None:
        """Fill an array with zeros."""
        array.fill(0)

    def address(self, array: cupy.ndarray) -> int:
        """Return where an array lies on the GPU."""
        return array.data.ptr

    def functions(self, source: str, names: Sequence[str]) -> Mapping[str, Launch]:
        """Return the kernels of ``source`` with these name expressions."""
        return compiled(source, names)


def compiled(source: str, names: Sequence[str]) -> dict[str, Launch]:
    """Return kernels for CuPy's current device; what a process has compiled it keeps."""
    key = (cupy.cuda.Device().id, source)
    known = _known.setdefault(key, {})
    missing = [name for name in names if name not in known]
    if missing:
        module = cupy.RawModule(code=source, options=OPTIONS, name_expressions=missing)
        for name in missing:
            known[name] = functools.partial(_launch, module.get_function(name))
    return {name: known[name] for name in names}


class Stream(NamedTuple):
    """A stream that is somebody else's, as CuPy's launches take it."""

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
