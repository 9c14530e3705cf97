"""The table of hot kernels and the choice of who runs them.

Each kernel has the same name and signature in ``reference`` (plain NumPy, the definition) and in
``cpu`` (Numba). The array's type chooses the backend; tests name one to compare them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.quantizers import Coding

Array = np.ndarray
Shape = tuple[int, ...]


class Signs(NamedTuple):
    """What ``encode_signs`` finds: the words, and what the means of both sides follow from."""

    words: Array
    sums: Array
    counts: Array


class Coefficients(NamedTuple):
    """A tensor's coefficients: of gradient plus residual, in an array of their own.

    ``array``: float32 or complex64, 1-D. ``peak``: bits of the largest |component|. ``key`` and
    ``ties``: what is to be sent are the coefficients whose keys are above ``key`` and the first
    ``ties`` of those equal to it. ``grad``: the gradient alone, of a codec that asks for it.
    ``signs``: if they were found in the same pass.
    """

    array: Array
    peak: int
    key: int
    ties: int
    grad: Array | None = None
    signs: Signs | None = None


class Part(NamedTuple):
    """A payload's body: bitmap, uint64 ``[ceil(n / 64)]``; packed codes, uint8; their coding."""

    bitmap: Array
    packed: Array
    coding: Coding


BACKENDS = ("reference", "cpu")

KERNELS = (
    "empty",
    "add",
    "rfft_blocks",
    "irfft_blocks",
    "irfft_sum",
    "dct_blocks",
    "idct_blocks",
    "idct_sum",
    "peak_bits",
    "rank",
    "take",
    "sum_values",
    "merge",
    "to_float16",
    "from_float16",
    "pack_bitmap",
    "unpack_bitmap",
    "pack_offsets",
    "unpack_offsets",
    "pack_entropy",
    "unpack_entropy",
    "count_above",
    "bin_winners",
    "sums_below",
    "draw_chosen",
    "take_chosen",
    "low_pass",
    "chunk_winners",
    "pack_bits",
    "unpack_bits",
    "positions_of",
    "accumulate",
    "clear",
    "orthonormal",
    "low_rank",
    "sketch",
    "estimate",
    "pack_words",
    "unpack_words",
    "pack_gamma",
    "unpack_gamma",
    "moments",
    "encode_levels",
    "add_levels",
    "encode_signs",
    "subtract_signs",
    "add_signs",
    "keep_signs",
    "encode_octaves",
    "add_octaves",
)


def load_backend(name: str) -> ModuleType:
    """Return the kernels called ``name`` ("reference" or "cpu"), importing them on first use."""
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def backend_for(array: object) -> ModuleType:
    """Return the kernels that serve ``array``: the CPU's for NumPy arrays."""
    if isinstance(array, (np.ndarray, np.generic)):
        return load_backend("cpu")
    raise TypeError(
        f"no backend serves {type(array).__module__}.{type(array).__name__}; pass a NumPy array "
        "(of a CPU torch tensor: tensor.detach().numpy())"
    )
