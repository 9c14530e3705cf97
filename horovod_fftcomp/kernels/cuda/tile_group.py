"""What tensors that are launched together have in common, whatever encodes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from horovod_fftcomp.kernels.cuda import Device, structs
from horovod_fftcomp.kernels.cuda.structs import THREADS, Group


class TileGroup:
    """A group's tiles: which tensors they belong to, their squares, their old coefficients.

    Encodes tensors that travel as they are; whoever inherits from it encodes others. ``reals``:
    of a coefficient. ``names``: the kernels that it needs.
    """

    def __init__(self, device: Device, group: Group, reals: int = 1) -> None:
        self.device, self.members, self._owners_on_host = device, group.members, group.owners
        self.n_tiles, self.owners = group.owners.size, device.upload(group.owners)
        self._restore, self._square = f"restore<{reals}>", f"square<{reals}>"
        self.is_raw = group.transform is None
        self.names = ["copy_raw"] if self.is_raw else [self._restore, self._square]

    def choose(
        self, kernels: Any, rows: Any, found: Any, measure: bool, totals: Any
    ) -> list[Callable[[], np.ndarray]]:
        """Launch everything from gradients to what is sent; ``totals``: None of known sizes.

        Returns what waits for the sums of squares before that, if they are measured.
        """
        return []

    def write(
        self, kernels: Any, rows: Any, found: Any, before: list[Callable[[], np.ndarray]]
    ) -> Callable[[], np.ndarray]:
        """Launch what writes payloads, but for headers and entropy codes.

        Returns what waits for the sums of squares, float64 ``[3, tiles]`` if they are measured;
        ``[1, tiles]``, of what is left, with a threshold in any case.
        """
        kernels["copy_raw"](self.n_tiles, THREADS, [rows, self.owners, found], 0)
        return lambda: np.zeros((3, self.n_tiles))

    def squared(self, kernels: Any, rows: Any, of_gradient: int) -> Callable[[], np.ndarray]:
        """Launch the sums of squares of all tiles; return what waits for them."""
        sums = self.device.empty(self.n_tiles, np.float64)
        arguments = [rows, self.owners, np.uint32(of_gradient), sums]
        kernels[self._square](self.n_tiles, THREADS, arguments, structs.SQUARES_NBYTES)
        return self.device.fetch(sums)

    def restore(self, kernels: Any, rows: Any, verdict: Any) -> None:
        """Launch what brings old coefficients back if the verdict is not 0."""
        if not self.is_raw:
            kernels[self._restore](self.n_tiles, THREADS, [rows, self.owners, verdict], 0)

    def by_tensor(self, of_tiles: np.ndarray) -> dict[int, tuple[float, float, float]]:
        """Return three sums for each tensor, of ``[3, tiles]``."""
        if self.is_raw:
            return {}
        n = max(self.members) + 1
        sums = [np.bincount(self._owners_on_host, part, n) for part in of_tiles]
        return {m: (float(sums[0][m]), float(sums[1][m]), float(sums[2][m])) for m in self.members}
