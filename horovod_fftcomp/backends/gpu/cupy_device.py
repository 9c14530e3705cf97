"""The GPU that CuPy's current device is: its arrays, and kernels compiled by NVRTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cupy
import numpy as np

from horovod_fftcomp.backends.gpu import Launch

# Contraction into fused multiply-adds would round otherwise than the CPU, or another GPU.
_OPTIONS = ("-std=c++17", "-fmad=false")


class CupyDevice:
    """Arrays and launches on CuPy's current stream; see ``gpu.Device``."""

    def empty(self, n: int, dtype: type = np.float32) -> cupy.ndarray:
        """Return ``n`` elements with any contents."""
        return cupy.empty(n, dtype)

    def zeros(self, n: int, dtype: type = np.float32) -> cupy.ndarray:
        """Return ``n`` zeros."""
        return cupy.zeros(n, dtype)

    def upload(self, array: np.ndarray) -> cupy.ndarray:
        """Return a copy on the GPU; goes through pinned memory, so the host does not wait."""
        return cupy.array(array.reshape(-1), blocking=False)

    def address(self, array: Any) -> int:
        """Return where an array, CuPy's or PyTorch's, lies on the GPU."""
        return array.data.ptr if isinstance(array, cupy.ndarray) else array.data_ptr()

    def functions(self, source: str, names: Sequence[str]) -> Mapping[str, Launch]:
        """Return kernels; CuPy keeps what is compiled in its cache on disk."""
        module = cupy.RawModule(code=source, options=_OPTIONS, name_expressions=list(names))
        return {name: _Function(module.get_function(name)) for name in names}


class _Function:
    def __init__(self, kernel: cupy.RawKernel) -> None:
        self._kernel = kernel

    def __call__(
        self, grid: int, threads: int, arguments: Sequence[Any], shared_nbytes: int
    ) -> None:
        self._kernel((grid,), (threads,), tuple(arguments), shared_mem=shared_nbytes)
