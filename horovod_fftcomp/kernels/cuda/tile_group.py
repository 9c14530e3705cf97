"""Base class of the groups of tensors that are encoded by the same launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from horovod_fftcomp.kernels.cuda import Device, structs
from horovod_fftcomp.kernels.cuda.structs import THREADS, GroupPlan

Sums = Callable[[], np.ndarray]  # returns sums of squares of tiles; waits for the device


class TileGroup:
    """Group of tensors encoded by the same launches, cut into tiles.

    Encodes RAW tensors; subclasses encode others. ``reals``: floats in a coefficient. ``owners``:
    the tensor of each tile. ``names``: the kernels that the group needs.
    """

    def __init__(self, device: Device, group: GroupPlan, reals: int = 1) -> None:
        self.device, self.members, self._owners_on_host = device, group.members, group.owners
        self.n_tiles, self.owners = group.owners.size, device.upload(group.owners)
        self._square = f"square<{reals}>"
        self.is_raw = group.transform is None
        self.names = ["copy_raw"] if self.is_raw else [self._square]

    def choose(self, kernels: Any, rows: Any, found: Any, measure: bool, totals: Any) -> list[Sums]:
        """Launch the kernels that choose what is sent; ``totals``: None if sizes are fixed.

        With ``measure``, returns functions that wait for and return the sums of squares of the
        gradients and of gradient plus residual, by tile.
        """
        return []

    def write(self, kernels: Any, rows: Any, found: Any, before: list[Sums]) -> Sums:
        """Launch the kernels that write payloads, without headers.

        Returns a function that waits for and returns the sums of squares: float64 ``[3, tiles]``
        if they are measured; else under a threshold ``[1, tiles]``, of the residuals.
        """
        kernels["copy_raw"](self.n_tiles, THREADS, [rows, self.owners, found], 0)
        return lambda: np.zeros((3, self.n_tiles))

    def squared(self, kernels: Any, rows: Any, of_gradient: int) -> Sums:
        """Launch the sums of squares of all tiles; return a function that waits for them."""
        sums = self.device.empty(self.n_tiles, np.float64)
        arguments = [rows, self.owners, np.uint32(of_gradient), sums]
        kernels[self._square](self.n_tiles, THREADS, arguments, structs.SQUARES_NBYTES)
        return self.device.fetch(sums)

    def measured(self, kernels: Any, rows: Any) -> list[Sums]:
        """Launch the sum of gradient and residual, and the sums of squares of both; see ``choose``.

        For tensors whose elements are encoded.
        """
        kernels["add_elements"](self.n_tiles, THREADS, [rows, self.owners], 0)
        return [self.squared(kernels, rows, of) for of in (1, 0)]

    def completed(self, kernels: Any, rows: Any, before: list[Sums]) -> Sums:
        """Launch the sums of squares of the residuals, if they are measured; see ``write``."""
        if not before:
            return lambda: np.zeros((3, 0))
        sums = [*before, self.squared(kernels, rows, 0)]
        return lambda: np.stack([fetch() for fetch in sums])

    def by_tensor(self, of_tiles: np.ndarray) -> dict[int, tuple[float, float, float]]:
        """Return the three sums of squares of each tensor, from those of tiles, ``[3, tiles]``."""
        if self.is_raw:
            return {}
        n = max(self.members) + 1
        sums = [np.bincount(self._owners_on_host, part, n) for part in of_tiles]
        return {m: (float(sums[0][m]), float(sums[1][m]), float(sums[2][m])) for m in self.members}
