"""Device with guard bands around its arrays, which show whether kernels write outside of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from horovod_fftcomp.kernels.cuda import Device

_GUARD = 0xA5  # each byte of a band; no number that kernels often write


class GuardedDevice:
    """Device that allocates guard bands before and after each array of another device.

    ``band_nbytes``: of one band, a multiple of 256. A write outside an array that stays within its
    bands damages nothing else, and ``check`` finds it. All arrays are kept until this device is
    deleted.
    """

    def __init__(self, device: Device, band_nbytes: int) -> None:
        assert band_nbytes % 256 == 0, "arrays begin at multiples of 256 bytes"
        self.cache: dict[Any, Any] = {}
        self._device, self._band = device, np.full(band_nbytes, _GUARD, np.uint8)
        self._allocated: list[Any] = []  # arrays with their bands

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def empty(self, n: int, dtype: DTypeLike = np.float32) -> Any:
        """Return an array of ``n`` elements of any value."""
        return self.upload(np.full(n * np.dtype(dtype).itemsize, _GUARD, np.uint8).view(dtype))

    def zeros(self, n: int, dtype: DTypeLike = np.float32) -> Any:
        """Return an array of ``n`` zeros."""
        return self.upload(np.zeros(n, dtype))

    def upload(self, array: np.ndarray) -> Any:
        """Return a copy of a host array."""
        band = self._band.view(array.dtype)
        return self._kept(self._device.upload(np.concatenate([band, array.reshape(-1), band])))

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Return the concatenation of arrays of one dtype, a new array."""
        dtype = self._device.fetch(arrays[0][:0])().dtype
        band = self._device.upload(self._band.view(dtype))
        return self._kept(self._device.joined([band, *arrays, band]))

    def _kept(self, whole: Any) -> Any:
        self._allocated.append(whole)
        n = self._band.size // whole.itemsize
        return whole[n : len(whole) - n]

    def check(self) -> str | None:
        """Return a description of the first damaged guard band, or None; waits for the device."""
        n = self._band.size
        for whole in self._allocated:
            found = self._device.fetch(whole)().view(np.uint8)
            damaged = np.flatnonzero(np.concatenate([found[:n], found[-n:]]) != _GUARD)
            if damaged.size:
                where = int(damaged[0]) - n
                side = f"{-where} bytes before" if where < 0 else f"{where} bytes after"
                return (
                    f"{damaged.size} bytes were written outside an array of {found.size - 2 * n} "
                    f"bytes, the first {side} it"
                )
        return None
