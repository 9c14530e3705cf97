"""Clipping of gradients on a device, before a momentum is applied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.kernels.cuda import structs
from horovod_fftcomp.kernels.cuda.ops.common import CommonOps
from horovod_fftcomp.types import Array, Tensor

_KERNELS = ("sum_parts<true>", "clip_factors")


class Clipping:
    """Clipping factors of a bucket's gradients, from their sums of squares.

    ``factors``: device address of the factor of each gradient, uint64.
    """

    def __init__(self, ops: CommonOps, tensors: Sequence[Tensor]) -> None:
        device = ops.device
        self._kernels, self._uploads = ops.kernels(*_KERNELS), structs.Uploads(device)
        self._rows = np.zeros(len(tensors), structs.TENSOR)
        self._rows["n"] = self._rows["numel"] = [math.prod(tensor.shape) for tensor in tensors]
        owners = ops.tiles(self._rows, self._rows["n"])
        self._n_tiles, self._owners = owners.size, device.upload(owners)
        elements = np.zeros(len(tensors), structs.ELEMENTS)
        elements["length"], elements["first_part"] = self._rows["n"], self._rows["first_tile"]
        self._elements = device.upload(elements.view(np.uint8))
        self._parts = device.empty(max(1, owners.size) * structs.PART.itemsize, np.uint8)
        self._factors = device.empty(len(tensors))
        self.factors: Array = device.address(self._factors) + 4 * np.arange(
            len(tensors), dtype=np.uint64
        )

    def find(self, ops: CommonOps, grads: Sequence[Any], largest_norm: float) -> None:
        """Launch the kernels that compute the factors for norms of at most ``largest_norm``."""
        self._rows["grad"] = [ops.address(grad) for grad in grads]
        table = self._uploads.of("gradients", self._rows)
        arguments = [table, self._owners, self._elements, np.uint32(0), self._parts]
        if self._n_tiles:
            self._kernels["sum_parts<true>"](self._n_tiles, 32, arguments, 0)
        arguments = [table, self._parts, np.float64(largest_norm), self._factors]
        self._kernels["clip_factors"](len(grads), 32, arguments, 0)


def clip_factors(
    ops: CommonOps, tensors: Sequence[Tensor], grads: Sequence[Any], largest_norm: float | None
) -> Array | int:
    """Return the device address of each gradient's clipping factor; 0 without clipping."""
    if largest_norm is None:
        return 0
    key = ("clipping", tuple(tensors))
    if key not in ops.device.cache:
        ops.device.cache[key] = Clipping(ops, tensors)
    clipping = ops.device.cache[key]
    clipping.find(ops, grads, largest_norm)
    return clipping.factors
