"""Ops of the host that all schemes use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.codec.transforms import energy_of
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.kernels.cpu import buffer_pool
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.kernels.ops import Deferred, Flags
from horovod_fftcomp.types import Array, Arrays


class HostCommonOps:
    """Ops on NumPy arrays that schemes of all kinds use."""

    device: Device | None = None

    def empty(self, n: int, dtype: type = np.float32) -> Array:
        """Return an uninitialized array of ``n`` elements, float32 by default."""
        return cpu.empty(n, dtype)

    def zeros(self, n: int, dtype: type = np.float32) -> Array:
        """Return an array of ``n`` zeros, float32 by default."""
        return buffer_pool.zeros(n, dtype)

    def put(self, array: Array) -> Array:
        """Return ``array`` itself: it lies on the host."""
        return array

    def get(self, array: Array) -> Array:
        """Return ``array`` itself: it is a NumPy array."""
        return array

    def checked(self, kind: str, array: Array | None, numel: int) -> Array | None:
        """Return ``array``; ValueError unless it is None or has ``numel`` float32 elements."""
        check_state(kind, array, (np.dtype(np.float32), numel))
        return array

    def join(self, parts: Arrays, numels: Sequence[int], dtype: type = np.float32) -> Array:
        """Concatenate ``parts`` into a new array; None stands for zeros."""
        filled = [
            np.zeros(numel, dtype) if part is None else part
            for part, numel in zip(parts, numels, strict=True)
        ]
        return np.concatenate(filled, out=self.empty(sum(numels), dtype))

    def rejoin(self, parts: Arrays, numels: Sequence[int], dtype: type = np.float32) -> Array:
        """Concatenate ``parts``, without a copy if they are contiguous in memory."""
        whole = buffer_pool.joined(parts, dtype)
        return self.join(parts, numels, dtype) if whole is None else whole

    def sum_rows(self, values: Array, own: Arrays, numels: Sequence[int], place: int) -> Array:
        """Return the sum of equal rows of ``values`` and, as row ``place``, of ``own``."""
        sums, begin = self.empty(sum(numels)), 0
        rows = list(values.reshape(-1, sums.size)) if sums.size else []
        for part, numel in zip(own, numels, strict=True):
            here, begin = slice(begin, begin + numel), begin + numel
            terms = [row[here] for row in rows]
            terms.insert(place, np.zeros(numel, np.float32) if part is None else part)
            total = terms[0]
            with np.errstate(over="ignore", invalid="ignore"):  # the flags of the sums tell
                for term in terms[1:]:
                    total = np.add(total, term, out=sums[here])
            if not rows:
                sums[here] = total
        return sums

    def squares(self, arrays: Arrays) -> Deferred:
        """Return a function that returns the sum of squares of each array."""
        found = [energy_of(array) for array in arrays]
        return lambda: found

    def flags_of(self, values: Array) -> Flags:
        """Return whether all ``values`` are finite, as flags."""
        return Flags(cpu.max_abs_bits(values) <= LARGEST_FINITE_BITS)

    def both(self, a: Flags, b: Flags) -> Flags:
        """Return the flags of two parts of an exchange: finite if both are."""
        return Flags(a.finite and b.finite)

    def to_half(self, values: Array, largest: int, limit: float) -> Array:
        """Convert to float16, saturated at ``limit``; NaN if a magnitude exceeds ``largest``."""
        if cpu.max_abs_bits(values) > largest:
            return np.full(values.size, np.nan, np.float16)
        return cpu.to_float16(values, limit)

    def from_half(self, values: Array) -> Array:
        """Convert float16 to float32."""
        return cpu.from_float16(values)
