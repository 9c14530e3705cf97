"""CUDA backend: kernels in ``src``, descriptor tables of buckets, and the launches in order.

Nothing in this module waits for the device but ``on_host``. A ``Device`` owns arrays and compiles
kernels: PyTorch's or CuPy's in a training, an emulator in the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from horovod_fftcomp.codec.transforms import BLOCK_LENGTHS

_FOLDER = Path(__file__).parent / "src"
# In the order in which they are concatenated: each file uses declarations of those before it.
_SOURCES = ("common", "select", "transform", "emit", "entropy", "header", "decode", "step",
            "shared", "hash", "elements", "coded", "chosen", "halves", "momentum",
            "lowrank")  # fmt: skip

_OF_COEFFICIENTS = ("emit", "count_offsets", "count_values", "square")
# Name expressions of all kernels; a training compiles those that it uses.
NAMES = (
    *("add_residual", "copy_raw", "write_header"),
    *("read_headers", "count_unary", "sum_raw", "majority_sign"),
    *("choose_winners", "count_common", "filter_low", "take_shares", "check_shares"),
    *("clear_sums", "add_shares", "take_whole", "check_factors", "orthonormalize"),
    *("subtract_products", "sum_products", "keep_factors"),
    *("add_elements", "sum_parts<false>", "sum_parts<true>", "settle_rows"),
    *("write_signs", "sum_signs", "write_levels", "sum_levels", "write_coded", "sum_coded"),
    *("judge", "find_beyond", "write_halves", "read_halves"),
    *("count_corrupt", "count_step", "select_state", "sum_rows"),
    *("hash_bytes", "add_up", "sums_below", "choose<0>", "choose<1>", "choose<2>"),
    *("clip_factors", "accumulate"),
    *(f"{name}<{reals}>" for name in _OF_COEFFICIENTS for reals in (1, 2)),
    *(f"narrow<{reals}, {digit}>" for reals in (1, 2) for digit in (1, 2, 3)),
    *(f"forward<{block}, {cosine}>" for block in BLOCK_LENGTHS for cosine in ("false", "true")),
    "sum_payloads<64, 0>",
    *(f"sum_payloads<{block}, {domain}>" for block in BLOCK_LENGTHS for domain in (1, 2)),
)

# Options of every compiler. Contraction (FMA) would round differently from the CPU or another GPU.
OPTIONS = ("-std=c++17", "-fmad=false")

Launch = Callable[..., None]  # grid, threads, arguments, shared bytes


class Device(Protocol):
    """Interface of one device: 1-D arrays and compiled kernels, all on its current stream.

    ``cache``: compiled kernels and buffers that are kept as long as the device.
    """

    cache: dict[Any, Any]

    @property
    def n_processors(self) -> int:
        """Number of multiprocessors, which share the blocks of a launch."""

    def empty(self, n: int, dtype: DTypeLike = np.float32) -> Any:
        """Return an uninitialized array of ``n`` elements, at a multiple of 256 bytes."""

    def zeros(self, n: int, dtype: DTypeLike = np.float32) -> Any:
        """Return an array of ``n`` zeros, at a multiple of 256 bytes."""

    def upload(self, array: np.ndarray) -> Any:
        """Return a copy of a host array on the device; the caller may then overwrite the array."""

    def fetch(self, array: Any) -> Callable[[], np.ndarray]:
        """Start a copy of an array to the host; return a function that waits for and returns it."""

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Return the concatenation of arrays of one dtype, a new array."""

    def clear(self, array: Any) -> None:
        """Fill an array with zeros."""

    def scale(self, array: Any, factor: np.float32) -> None:
        """Multiply an array by a number, in place."""

    def multiply(self, matrix: Any, rows: int, factor: Any, out: Any, transposed: bool) -> None:
        """Write the product of ``matrix`` and ``factor`` to ``out``.

        ``transposed``: of the transpose of ``matrix``. ``rows``: of ``matrix``. All are flat, in
        row-major order.
        """

    def address(self, array: Any) -> int:
        """Return the device address of an array's first element."""

    def functions(self, source: str, names: Sequence[str]) -> Mapping[str, Launch]:
        """Return the compiled kernels of ``source`` with these name expressions."""


@functools.cache
def source() -> str:
    """Return the source text of all kernels."""
    return "".join((_FOLDER / f"{name}.cuh").read_text(encoding="utf-8") for name in _SOURCES)


def is_on_host(array: Any) -> bool:
    """Return whether ``array`` is NumPy's; a device's may be of a subclass of NumPy's."""
    return type(array) is np.ndarray


def on_device(array: Any, device: Device) -> Any:
    """Return ``array`` on the device; uploads a NumPy array."""
    return device.upload(array) if is_on_host(array) else array


def on_host(array: Any, device: Device | None) -> Any:
    """Return ``array`` as a NumPy array; waits for the device if the array is there."""
    if device is None or is_on_host(array):
        return array
    return device.fetch(array)()
