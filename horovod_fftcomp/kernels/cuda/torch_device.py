"""Device of PyTorch: kernels run on its tensors, on its current stream, without a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike

from horovod_fftcomp.kernels.cuda import Launch

# PyTorch supports few operations on unsigned integers; to kernels signed ones are the same bits.
_TYPES = {
    np.dtype(kind): held
    for kind, held in (
        (np.uint8, torch.uint8), (np.uint32, torch.int32), (np.uint64, torch.int64),
        (np.float16, torch.float16), (np.float32, torch.float32), (np.float64, torch.float64),
        (np.complex64, torch.complex64),
    )
}  # fmt: skip


class TorchDevice:
    """Device whose arrays are PyTorch tensors on one GPU; see ``cuda.Device``."""

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.cache: dict[Any, Any] = {}

    @functools.cached_property
    def n_processors(self) -> int:
        """Number of the GPU's multiprocessors."""
        return torch.cuda.get_device_properties(self.place).multi_processor_count

    def empty(self, n: int, dtype: DTypeLike = np.float32) -> torch.Tensor:
        """Return an uninitialized array of ``n`` elements."""
        return torch.empty(n, dtype=_TYPES[np.dtype(dtype)], device=self.place)

    def zeros(self, n: int, dtype: DTypeLike = np.float32) -> torch.Tensor:
        """Return an array of ``n`` zeros."""
        return torch.zeros(n, dtype=_TYPES[np.dtype(dtype)], device=self.place)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """Return a copy on the GPU, through pinned memory, so that the host does not wait."""
        kind = np.dtype(f"i{array.itemsize}") if array.dtype.kind == "u" else array.dtype
        kind = np.dtype(np.uint8) if array.dtype == np.uint8 else kind
        host = torch.from_numpy(array.reshape(-1).view(kind).copy())
        return self._pinned(host).to(self.place, non_blocking=True)

    def fetch(self, array: torch.Tensor) -> Callable[[], np.ndarray]:
        """Start a copy of an array to the host; return a function that waits for and returns it."""
        pinned = self.place.type == "cuda"
        host = torch.empty(array.shape, dtype=array.dtype, pin_memory=pinned)
        host.copy_(array, non_blocking=True)
        wait = self._mark()

        def fetched() -> np.ndarray:
            wait()
            return host.numpy()

        return fetched

    def joined(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the concatenation of arrays of one dtype, a new array."""
        return torch.cat(list(arrays))

    def clear(self, array: torch.Tensor) -> None:
        """Fill an array with zeros."""
        array.zero_()

    def scale(self, array: torch.Tensor, factor: np.float32) -> None:
        """Multiply an array by a number, in place."""
        array.mul_(float(factor))

    def multiply(self, matrix: Any, rows: int, factor: Any, out: Any, transposed: bool) -> None:
        """Write ``matrix``, or its transpose, times ``factor`` to ``out``; all are flat."""
        left = matrix.view(rows, -1).t() if transposed else matrix.view(rows, -1)
        torch.mm(left, factor.view(left.shape[1], -1), out=out.view(len(left), -1))

    def address(self, array: torch.Tensor) -> int:
        """Return the device address of an array."""
        return array.data_ptr()

    def functions(self, source: str, names: Sequence[str]) -> Mapping[str, Launch]:
        """Return the kernels of ``source`` with these name expressions, compiled by CuPy."""
        from horovod_fftcomp.kernels.cuda.cupy_device import compiled

        with torch.cuda.device(self.place):
            kernels = compiled(source, names)
        return {name: self._launcher(kernel) for name, kernel in kernels.items()}

    def _launcher(self, kernel: Launch) -> Launch:
        from horovod_fftcomp.kernels.cuda.cupy_device import Stream

        def launch(grid: int, threads: int, arguments: Sequence[Any], shared_nbytes: int) -> None:
            stream = Stream(torch.cuda.current_stream(self.place).cuda_stream)
            with torch.cuda.device(self.place):
                kernel(grid, threads, values_of(arguments), shared_nbytes, stream)

        return launch

    def _pinned(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory()

    def _mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.place))
        return lambda: None if event.query() else event.synchronize()


def values_of(arguments: Sequence[Any]) -> list[Any]:
    """Return kernel arguments with tensors replaced by their addresses."""
    return [np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
