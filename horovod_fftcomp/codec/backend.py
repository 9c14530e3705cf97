"""Selection of the kernels that run a codec: by the type of an array, or by name."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np

BACKENDS = ("reference", "cpu")


def load_backend(name: str) -> ModuleType:
    """Return the kernel module ``name``, "reference" or "cpu"; it is imported on first use."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    return importlib.import_module(f"horovod_fftcomp.kernels.{name}")


def backend_for(array: object) -> ModuleType:
    """Return the kernels for arrays of this type; TypeError unless it is a NumPy array."""
    if isinstance(array, (np.ndarray, np.generic)):
        return load_backend("cpu")
    raise TypeError(
        f"expected a NumPy array, got {type(array).__module__}.{type(array).__name__}; "
        "convert a CPU torch tensor by tensor.detach().numpy()"
    )
