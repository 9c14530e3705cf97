"""The kernels that run codecs on a CPU, loaded on first use: they need Numba."""

from __future__ import annotations

import importlib
from types import ModuleType


def cpu_kernels() -> ModuleType:
    """Return the module ``kernels.cpu``."""
    return importlib.import_module("horovod_fftcomp.kernels.cpu")
