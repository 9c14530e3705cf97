"""Ops of a device that all schemes use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.cuda import Device, is_on_host, on_device, on_host, source, structs
from horovod_fftcomp.kernels.ops import Deferred, Flags
from horovod_fftcomp.kernels.plans import BucketPlan, check_size
from horovod_fftcomp.types import Array, Arrays

_KERNELS = ("find_beyond", "write_halves", "read_halves", "square<1>", "sum_rows")


AnyPlan = TypeVar("AnyPlan", bound=BucketPlan)
Made = TypeVar("Made")


class CudaCommonOps:
    """Ops on arrays of a device that schemes of all kinds use.

    Tables of descriptors are uploaded only if their contents are new.
    """

    def __init__(self, device: Device) -> None:
        self.device: Device = device
        self.uploads = structs.Uploads(device)
        self._made: WeakKeyDictionary[BucketPlan, dict[str, Any]] = WeakKeyDictionary()

    def kernels(self, *names: str) -> Any:
        """Return the compiled kernels with these names, by name; compiled once."""
        if names not in self.device.cache:
            self.device.cache[names] = self.device.functions(source(), names)
        return self.device.cache[names]

    def of_plan(self, kind: str, plan: AnyPlan, make: Callable[[AnyPlan], Made]) -> Made:
        """Return ``make(plan)``, cached as long as the plan exists."""
        made = self._made.setdefault(plan, {})
        if kind not in made:
            made[kind] = make(plan)
        return made[kind]

    def address(self, array: Any) -> int:
        """Return the address of an array; 0 for None."""
        return 0 if array is None else self.device.address(array)

    def addresses(self, array: Any, offsets: Sequence[int]) -> Array:
        """Return the addresses of the parts of an array between ``offsets``."""
        check_size(array, offsets)
        itemsize = array.nbytes // max(1, len(array))
        return np.uint64(self.address(array)) + np.uint64(itemsize) * np.array(
            offsets[:-1], np.uint64
        )

    def empty(self, n: int, dtype: type = np.float32) -> Any:
        """Return an uninitialized array of ``n`` elements on the device, float32 by default."""
        return self.device.empty(max(1, n), dtype)[:n]

    def zeros(self, n: int, dtype: type = np.float32) -> Any:
        """Return an array of ``n`` zeros on the device, float32 by default."""
        return self.device.zeros(max(1, n), dtype)[:n]

    def put(self, array: Any) -> Any:
        """Return ``array`` on the device, copied if it lies elsewhere."""
        return on_device(array, self.device)

    def get(self, array: Any) -> Array:
        """Return ``array`` as a NumPy array; waits for the device."""
        return on_host(array, self.device)

    def checked(self, kind: str, array: Any, numel: int) -> Any:
        """Return ``array`` on the device; ValueError for a NumPy array of another dtype or size."""
        if is_on_host(array):
            check_state(kind, array, (np.dtype(np.float32), numel))
        return self.put(array)

    def join(self, parts: Arrays, numels: Sequence[int], dtype: type = np.float32) -> Any:
        """Concatenate ``parts`` into a new array on the device; None stands for zeros."""
        return self.device.joined(
            [
                self.device.zeros(numel, dtype) if part is None else self.put(part)
                for part, numel in zip(parts, numels, strict=True)
            ]
        )

    rejoin = join

    def sum_rows(self, values: Any, own: Arrays, numels: Sequence[int], place: int) -> Any:
        """Return the sum of equal rows of ``values`` and, as row ``place``, of ``own``."""
        n = sum(numels)
        total, before = self.empty(n), place * n
        if n:
            sizes = before, *numels, len(values) - before
            every = self.join([values[:before], *own, values[before:]], sizes)
            self._on_each("sum_rows", n, every, np.uint64(n), np.uint32(len(every) // n), total)
        return total

    def squares(self, arrays: Arrays) -> Deferred:
        """Return a function that waits and returns the sums of squares, in a fixed order."""
        rows = np.zeros(len(arrays), structs.TENSOR)
        rows["coeffs"] = [self.address(array) for array in arrays]
        rows["n"] = [0 if array is None else len(array) for array in arrays]
        owners = structs.enter_tiles(rows, rows["n"])
        sums = self.device.empty(max(1, owners.size), np.float64)
        if owners.size:
            tables = [self.uploads.of("squares", rows), self.uploads.of("owners", owners)]
            arguments = [*tables, np.uint32(0), sums]
            kernel = self.kernels(*_KERNELS)["square<1>"]
            kernel(owners.size, structs.THREADS, arguments, structs.SQUARES_NBYTES)
        return _summed(self.device.fetch(sums), owners, len(arrays))

    def flags_of(self, values: Any) -> Flags:
        """Return flags with one word on the device: nonzero if a value is not finite."""
        beyond = self.device.zeros(1, np.uint32)
        self._find_beyond(values, LARGEST_FINITE_BITS, beyond)
        return Flags(True, beyond, self.device.zeros(0, np.uint32))

    def both(self, a: Flags, b: Flags) -> Flags:
        """Concatenate the words of two flags."""
        words, statuses = (
            [word for word in pair if word is not None]
            for pair in ((a.not_finite, b.not_finite), (a.arrived, b.arrived))
        )
        joined = [self.device.joined(parts) if parts else None for parts in (words, statuses)]
        return Flags(a.finite and b.finite, *joined)

    def _find_beyond(self, values: Any, largest: int, flag: Any) -> None:
        n = len(values)
        self._on_each("find_beyond", n, values, np.uint64(n), np.uint32(largest), flag)

    def _on_each(self, name: str, n: int, *arguments: Any) -> None:
        """Launch a kernel with a thread for each of ``n`` elements."""
        if n:
            kernel = self.kernels(*_KERNELS)[name]
            kernel(-(-n // structs.THREADS), structs.THREADS, list(arguments), 0)

    def to_half(self, values: Any, largest: int, limit: float) -> Any:
        """Convert to float16, saturated at ``limit``; NaN if a magnitude exceeds ``largest``."""
        n, beyond = len(values), self.device.zeros(1, np.uint32)
        message = self.device.empty(n, np.float16)
        self._find_beyond(values, largest, beyond)
        bits = np.float32(limit).view(np.uint32)
        self._on_each("write_halves", n, values, np.uint64(n), bits, beyond, message)
        return message

    def from_half(self, values: Any) -> Any:
        """Convert float16 to float32."""
        n = len(values)
        whole = self.device.empty(n)
        self._on_each("read_halves", n, values, np.uint64(n), whole)
        return whole


def _summed(sums: Callable[[], Array], owners: Array, n: int) -> Deferred:
    """Return a function that waits for the sums of tiles and adds those of each array."""
    return lambda: np.bincount(owners, sums()[: owners.size], n).astype(np.float64).tolist()
