"""Dense methods on the device: launches that encode gradients and sum payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.base import Method
from horovod_fftcomp.codec.methods.signs import SignMethod
from horovod_fftcomp.kernels.cuda import Device, structs
from horovod_fftcomp.kernels.cuda.structs import THREADS, WORDS, GroupPlan
from horovod_fftcomp.kernels.cuda.tile_group import Sums, TileGroup
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import Plan
from horovod_fftcomp.wire.radix import GIVEN, GROUP, digits_of

# As in src/elements.cuh.
_KINDS = ("means", "magnitude", "votes", "clipped", "octaves", "peaks", "norms")
_CLIPPED, _PEAKS = _KINDS.index("clipped"), _KINDS.index("peaks")


def _described(group: GroupPlan, plans: Sequence[Plan], codecs: Sequence[DenseCodec]) -> Array:
    """Return the ELEMENTS row of each tensor of a bucket; zeros for tensors of other groups."""
    rows = np.zeros(len(plans), structs.ELEMENTS)
    n_rows = n_parts = 0
    for number in group.members:
        row, plan, method = rows[number], plans[number], codecs[number].method
        _enter_method(row, plan, method)
        row["n_rows"] = plan.numel // int(row["length"])
        row["first_row"], row["first_part"] = n_rows, n_parts
        n_rows += int(row["n_rows"])
        n_parts += int(row["n_rows"]) + -(-plan.numel // structs.TILE)
    return rows


def _enter_method(row: np.void, plan: Plan, method: Method) -> None:
    if method.cuda is None:
        raise TypeError(f"there are no CUDA kernels for {method!r}")
    kind, grid, clip = method.cuda
    row["method"], row["clip"] = _KINDS.index(kind), np.float64(clip).view(np.uint64)
    row["length"] = plan.numel
    if isinstance(method, SignMethod):
        row["length"] = method.row_length(plan.shape)
    bucket = GROUP if grid.norm == GIVEN else grid.bucket
    row["bucket_bits"], row["top"] = (bucket - 1).bit_length(), grid.top
    if grid.radix:
        row["radix"], row["digits"] = grid.radix, digits_of(grid.radix)


class ElementGroup(TileGroup):
    """Group of tensors encoded by dense methods of one kind."""

    def __init__(
        self, device: Device, group: GroupPlan, plans: Sequence[Plan], codecs: Sequence[DenseCodec]
    ) -> None:
        super().__init__(device, group)
        rows = _described(group, plans, codecs)
        first = rows[group.members[0]]
        self._elements = device.upload(rows.view(np.uint8))
        self._is_of_signs = int(first["method"]) < _CLIPPED
        self._sum = f"sum_parts<{str(not self._is_of_signs).lower()}>"
        self._write = "write_signs" if self._is_of_signs else "write_levels"
        self.names += ["add_elements", self._write]
        self._parts: Any = None
        if int(first["method"]) >= _PEAKS:
            return
        self.names += [self._sum, "settle_rows"]
        owners = np.repeat(np.arange(len(rows), dtype=np.uint32), rows["n_rows"])
        self._n_rows, self._row_owners = owners.size, device.upload(owners)
        n_parts = self._n_rows + self.n_tiles
        self._parts = device.empty(n_parts * structs.PART.itemsize, np.uint8)

    def choose(self, kernels: Any, rows: Any, found: Any, measure: bool, totals: Any) -> list[Sums]:
        """Launch the kernels that compute scales of tensors or rows; see ``TileGroup``."""
        squares = self.measured(kernels, rows) if measure else []
        if self._parts is not None:
            arguments = [rows, self.owners, self._elements, np.uint32(measure), self._parts]
            kernels[self._sum](self.n_tiles, 32, arguments, 0)
            arguments = [rows, self._row_owners, self._elements, self._parts, found]
            kernels["settle_rows"](self._n_rows, 32, arguments, 0)
        return squares

    def write(self, kernels: Any, rows: Any, found: Any, before: list[Sums]) -> Sums:
        """Launch the kernel that writes the bodies of payloads; see ``TileGroup``."""
        arguments = [rows, self.owners, self._elements, np.uint32(bool(before)), found]
        threads, shared = (WORDS, 0) if self._is_of_signs else (THREADS, structs.LEVELS_NBYTES)
        kernels[self._write](self.n_tiles, threads, arguments, shared)
        return self.completed(kernels, rows, before)


class ElementSums:
    """Sums of all ranks' payloads of a group, encoded by dense methods of one kind."""

    def __init__(
        self, device: Device, group: GroupPlan, plans: Sequence[Plan], codecs: Sequence[DenseCodec]
    ) -> None:
        rows = _described(group, plans, codecs)
        self.n_tiles, self.owners = group.owners.size, device.upload(group.owners)
        self._elements = device.upload(rows.view(np.uint8))
        is_of_signs = int(rows[group.members[0]]["method"]) < _CLIPPED
        self.names = ["sum_signs" if is_of_signs else "sum_levels"]
        self._threads = WORDS if is_of_signs else THREADS
        self._shared = 0 if is_of_signs else 4 * (int(rows["top"].max()) + 1)

    def decode(self, kernels: Any, common: list[Any], not_finite: Any) -> None:
        """Launch the kernel that decodes and sums payloads whose headers have been read."""
        arguments = [*common, self.owners, self._elements, not_finite]
        kernels[self.names[0]](self.n_tiles, self._threads, arguments, self._shared)
