"""Implementations of the kernels: the reference, which defines them, and the CPU's."""

from __future__ import annotations

from types import ModuleType

from horovod_fftcomp.kernels import cpu
from tests import reference

_MODULES = {"reference": reference, "cpu": cpu}
BACKENDS = tuple(_MODULES)


def load_backend(name: str) -> ModuleType:
    """Return the module with the kernels of this name."""
    return _MODULES[name]


def given(name: str) -> dict[str, ModuleType]:
    """Return the arguments of ``encode`` and ``decode`` of codecs for these kernels.

    None for the CPU's: codecs then encode and decode by those of buckets, as in training.
    """
    return {"kernels": reference} if name == "reference" else {}
