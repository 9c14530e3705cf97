"""Hashes of arrays on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.kernels.cuda import Device, source, structs

_LANES = 64  # as in src/hash.cuh


def hashes_on_device(device: Device, arrays: Sequence[Any]) -> Any:
    """Return the 64-bit hash of each array, uint8 ``[8 * len(arrays)]``, without waiting for it.

    The hash is ``parameter_hash.hash_bytes``. ``arrays``: uint8 on the device, each at a multiple
    of 8 bytes; at least one.
    """
    if "hash_bytes" not in device.cache:
        device.cache.update(device.functions(source(), ["hash_bytes"]))
    rows = np.zeros(len(arrays), structs.HASHED)
    rows["bytes"] = [device.address(array) for array in arrays]
    rows["nbytes"] = [len(array) for array in arrays]
    hashes = device.empty(8 * len(arrays), np.uint8)
    table = device.upload(rows.view(np.uint8))
    device.cache["hash_bytes"](len(arrays), _LANES, [table, hashes], 8 * _LANES)
    return hashes
