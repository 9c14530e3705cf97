"""Descriptor tables for CUDA launches: one row per tensor, for schemes with element-wise state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from horovod_fftcomp.kernels.cuda import Device, on_device, source
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Energy, Measured, Tensor
from horovod_fftcomp.types import Array


class BucketRows:
    """Descriptor table of a bucket without addresses, and the tensor of each CUDA block.

    ``kind``: name of the struct of a row, with fields "grad residual n first_tile n_tiles" at
    least. ``kernels``: names of the kernels to launch.
    """

    def __init__(
        self, device: Device, kind: str, tensors: Sequence[Tensor], kernels: Sequence[str]
    ) -> None:
        from horovod_fftcomp.kernels.cuda import structs  # imported only where there is a GPU

        self.device, self.tables, self.uploads = (
            device,
            structs,
            structs.Uploads(device),
        )
        numels = [math.prod(tensor.shape) for tensor in tensors]
        self.rows = np.zeros(len(tensors), getattr(structs, kind))
        self.rows["n"] = numels
        self.tiles = self.owners("tile", numels, structs.TILE)
        self._tiles = device.upload(self.tiles)
        self._kernels = device.functions(source(), ["square<1>", *kernels])

    def owners(self, kind: str, sizes: Sequence[int], each: int) -> Array:
        """Assign each tensor its blocks of ``each`` elements; return the tensor of each block."""
        counts = np.array([-(-size // each) for size in sizes], np.uint32)
        self.rows[f"first_{kind}"], self.rows[f"n_{kind}s"] = np.cumsum(counts) - counts, counts
        return np.repeat(np.arange(len(sizes), dtype=np.uint32), counts)

    def launch(self, name: str, n_blocks: int, arguments: Sequence[Any], nbytes: int = 0) -> None:
        """Launch a kernel if it has any blocks."""
        if n_blocks:
            self._kernels[name](n_blocks, self.tables.THREADS, arguments, nbytes)

    def on_tiles(self, name: str, table: Any, *arguments: Any) -> None:
        """Launch a kernel over all tiles of a table's tensors."""
        shared = self.tables.SQUARES_NBYTES if name == "square<1>" else 0
        self.launch(name, self.tiles.size, [table, self._tiles, *arguments], shared)

    def coeffs_table(self, rows: Array, kept: str) -> Any:
        """Return the table for kernels over coefficients, whose arrays are in field ``kept``."""
        others = np.zeros(len(rows), self.tables.TENSOR)
        others["grad"], others["residual"] = rows["grad"], rows["residual"]
        others["coeffs"], others["keep"] = rows[kept], rows[kept] != 0
        others["n"] = others["numel"] = np.where(others["coeffs"] != 0, rows["n"], 0)
        others["first_tile"], others["n_tiles"] = rows["first_tile"], rows["n_tiles"]
        return self.uploads.of(kept, others)


AnyBucket = TypeVar("AnyBucket", bound=BucketRows)


def cached(
    make: Callable[..., AnyBucket], device: Device, tensors: Sequence[Tensor], *made_for: Any
) -> AnyBucket:
    """Return ``make(device, tensors, *made_for)``; only the last result per bucket is cached."""
    key = ("rows", make, tuple(tensors))
    if key not in device.cache or device.cache[key][0] != made_for:
        device.cache[key] = (made_for, make(device, tensors, *made_for))
    return device.cache[key][1]


def placed(grads: Sequence[Any], numels: Sequence[int], device: Device) -> list[Any]:
    """Return gradients on the device, with zeros for a frozen tensor."""
    return [
        device.zeros(max(1, numel)) if grad is None else on_device(grad, device)
        for grad, numel in zip(grads, numels, strict=True)
    ]


class ExchangeRows:
    """Descriptor table of one exchange, with addresses, and its measurements.

    ``takes_part``: False for a frozen tensor, whose row has no gradient.
    """

    def __init__(
        self,
        bucket: BucketRows,
        tensors: Sequence[Tensor],
        grads: Sequence[Any],
        carried: Mapping[str, Any],
        context: Context,
    ) -> None:
        self.device, self.tensors, self.context = bucket.device, tensors, context
        self.rows, self._tiles, self._bucket = bucket.rows.copy(), bucket.tiles, bucket
        self.measures = context.step % MEASURE_EVERY == 0
        self.takes_part = [grad is not None for grad in grads]
        self._alive: list[Any] = []  # arrays whose addresses are in rows
        for row, tensor, grad in zip(self.rows, tensors, grads, strict=True):
            if grad is not None:
                row["grad"] = self.address(on_device(grad, self.device))
                if tensor.name in carried:
                    row["residual"] = self.address(on_device(carried[tensor.name], self.device))
        self._squares: list[Callable[[], Array]] = []

    def address(self, array: Any) -> int:
        """Return the address of an array, and keep the array alive as long as the exchange."""
        self._alive.append(array)
        return self.device.address(array)

    def new(self, field: str, wanted: Sequence[bool] | Array) -> list[Any]:
        """Return an array for each tensor with ``wanted``, and enter its address in ``field``."""
        made = [
            self.device.empty(max(1, n))[:n] if is_wanted else None
            for n, is_wanted in zip(self.rows["n"].tolist(), wanted, strict=True)
        ]
        self.point(field, made)
        return made

    def point(self, field: str, arrays: Sequence[Any]) -> None:
        """Enter the address of each tensor's array in ``field``; 0 for None."""
        self.rows[field] = [0 if array is None else self.address(array) for array in arrays]

    def square(self, of_gradient: bool, kept: str) -> None:
        """Launch the sum of squares of each gradient, or of the arrays in field ``kept``."""
        sums = self.device.empty(max(1, self._tiles.size), np.float64)
        table = self._bucket.coeffs_table(self.rows, kept)
        self._bucket.on_tiles("square<1>", table, np.uint32(of_gradient), sums)
        self._squares.append(self.device.fetch(sums))

    def energies(self) -> Callable[[], Measured]:
        """Return a function that waits for the energies and returns them.

        It keeps no array alive. ``square`` must have been called three times.
        """
        names = [
            tensor.name if takes_part else ""
            for tensor, takes_part in zip(self.tensors, self.takes_part, strict=True)
        ]
        return partial(_energies, names, self._tiles, self._squares)


def _energies(
    names: Sequence[str], tiles: Array, squares: Sequence[Callable[[], Array]]
) -> Measured:
    sums = [np.bincount(tiles, of()[: tiles.size], len(names)) for of in squares]
    named = zip(names, *sums, strict=True)
    return Measured({name: Energy(*map(float, of_tensor)) for name, *of_tensor in named if name})
