"""PyTorch's device with the emulator's kernels: its arrays lie in the host's memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels.cuda import Launch
from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice, values_of
from tests.gpu.emulator import Emulator


class TorchEmulator(TorchDevice):
    """``TorchDevice`` but for what only a GPU has: compiled kernels, pinned memory, events."""

    n_processors = 1

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._emulator = Emulator()

    def functions(self, source: str, names: Sequence[str]) -> Mapping[str, Launch]:
        kernels = self._emulator.functions(source, names)

        def launcher(kernel: Launch) -> Launch:
            def launch(grid: int, threads: int, arguments: Sequence, shared: int) -> None:
                kernel(grid, threads, values_of(arguments), shared)

            return launch

        return {name: launcher(kernel) for name, kernel in kernels.items()}

    def _pinned(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def _mark(self) -> Callable[[], None]:
        return lambda: None


@functools.cache
def _compile_all() -> None:
    """Compile all kernels in one module, not in one for each recipe."""
    TorchDevice(torch.device("cuda", 0)).functions(cuda.source(), cuda.NAMES)


@contextlib.contextmanager
def on_gpu(has_gpu: bool, cases: dict[str, Any], compressor: ModuleType) -> Iterator[None]:
    """Make models that are made within lie on the GPU, or compressors use an emulated one.

    ``cases``: globals of the file of cases, whose ``_place`` is where models are made;
    ``compressor``: the module that chooses the device.
    """
    with pytest.MonkeyPatch.context() as patched:
        if has_gpu:
            _compile_all()
            patched.setitem(cases, "_place", "cuda")
        else:
            patched.setattr(compressor, "device_of", lambda parameters, buckets: TorchEmulator())
        yield
