"""Descriptor table of a bucket: a row for each tensor, with the addresses of an exchange."""

from __future__ import annotations

from typing import Any

from horovod_fftcomp.kernels.cuda import structs
from horovod_fftcomp.kernels.cuda.ops.common import CudaCommonOps
from horovod_fftcomp.kernels.plans import BucketPlan
from horovod_fftcomp.types import Array


class PlanTable:
    """Rows of a plan without addresses, and the row of each tile.

    ``rows``: of a struct with fields "n first_tile n_tiles" at least. ``kernels``: by name.
    """

    def __init__(self, ops: CudaCommonOps, plan: BucketPlan, rows: Array, kernels: Any) -> None:
        rows["n"] = plan.numels
        self.rows, self._ops, self._kernels = rows, ops, kernels
        owners = structs.enter_tiles(rows, plan.numels)
        self.n_tiles, self._owners = owners.size, ops.device.upload(owners)
        self._uploads = structs.Uploads(ops.device)

    def at(self, name: str, **fields: Any) -> Any:
        """Return the table on the device; ``fields``: arrays, or their addresses, by tensor."""
        rows = self.rows.copy()
        for field, arrays in fields.items():
            is_list = isinstance(arrays, list)
            rows[field] = [self._ops.address(array) for array in arrays] if is_list else arrays
        return self._uploads.of(name, rows)

    def on_tiles(
        self, name: str, table: Any, *arguments: Any, threads: int = structs.THREADS
    ) -> None:
        """Launch a kernel with a block for each tile."""
        if self.n_tiles:
            self._kernels[name](self.n_tiles, threads, [table, self._owners, *arguments], 0)

    def on_rows(
        self, name: str, table: Any, *arguments: Any, threads: int = structs.THREADS
    ) -> None:
        """Launch a kernel with a block for each row, and shared memory of a double a thread."""
        self._kernels[name](len(self.rows), threads, [table, *arguments], 8 * threads)
