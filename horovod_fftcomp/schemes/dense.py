"""Every value by allreduce, in float32 or float16."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_fftcomp.backends import Array, load_backend
from horovod_fftcomp.backends.gpu import Device, Launch, on_device, source
from horovod_fftcomp.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.schemes import (
    Context,
    Exchange,
    Grads,
    OldState,
    OnDevice,
    Outcome,
    Round,
    Scheme,
    Tensor,
)


@dataclass(frozen=True)
class Dense(Scheme):
    """Sum all values as ``dtype`` ("float32" or "float16").

    In float16 each rank's values saturate at 65504 / world size, so that the sum cannot
    overflow; a rank with NaN or Inf sends NaN alone. Under a loss scaler so does a rank that
    would saturate: the scaler has to see that its scale is too large.
    """

    dtype: str = "float32"
    rounds = ("allreduce",)

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        del state
        sizes = [math.prod(tensor.shape) for tensor in tensors]
        if context.device is not None:
            return (yield from _sum_on_device(grads, sizes, context.device))
        parts = [
            np.zeros(size, np.float32) if grad is None else grad
            for grad, size in zip(grads, sizes, strict=True)
        ]
        kernels = load_backend("cpu")
        values = np.concatenate(parts, out=kernels.empty(sum(sizes)))
        if self.dtype == "float16":
            values = saturated_half(values, context)
        reduced = yield Round("allreduce", values)
        if self.dtype == "float16":
            reduced = kernels.from_float16(reduced)
        finite = kernels.peak_bits(reduced) <= LARGEST_FINITE_BITS
        return Outcome(np.split(reduced, np.cumsum(sizes)[:-1]), {}, finite)

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether a GPU can compute this step's exchange: in float32; see ``Scheme``."""
        del tensors
        return self.dtype == "float32"

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes that a rank hands to collectives for ``tensor`` in each step."""
        return math.prod(tensor.shape) * np.dtype(self.dtype).itemsize

    def state_format(self, tensor: Tensor) -> str:
        """Return what a state has to agree in to be this scheme's; see ``Scheme``."""
        del tensor
        return "none"

    def state_arrays(self, tensor: Tensor, state: OldState) -> Mapping[str, tuple[np.dtype, int]]:
        """Return nothing: there is no state."""
        del tensor, state
        return {}


def _check_on(device: Device) -> Launch:
    name = "find_not_finite"
    if name not in device.cache:
        device.cache.update(device.functions(source(), [name]))
    return device.cache[name]


def _sum_on_device(
    grads: Sequence[Any], sizes: Sequence[int], device: Device
) -> Generator[Round, Any, Outcome]:
    """Sum float32 values that stay on a GPU, without a wait for it."""
    from horovod_fftcomp.backends.gpu.tables import THREADS  # not for whoever has no GPU

    parts = [
        device.zeros(size) if grad is None else on_device(grad, device)
        for grad, size in zip(grads, sizes, strict=True)
    ]
    reduced = yield Round("allreduce", device.joined(parts))
    not_finite, n = device.zeros(1, np.uint32), sum(sizes)
    _check_on(device)(-(-n // THREADS), THREADS, [reduced, np.uint64(n), not_finite], 0)
    ends = np.cumsum(sizes).tolist()
    sums = [reduced[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    later = OnDevice(not_finite, device.zeros(0, np.uint32), lambda verdict: None, None)
    return Outcome(sums, {}, True, on_device=later)


def saturated_half(values: Array, context: Context) -> Array:
    """Return float32 ``values`` as float16 that can be summed over all ranks; see ``Dense``."""
    share = np.finfo(np.float16).max / np.float32(context.world_size)
    largest = LARGEST_FINITE_BITS if context.loss_scale == 1 else int(share.view(np.uint32))
    if load_backend("cpu").peak_bits(values) > largest:
        return np.full(values.size, np.nan, np.float16)
    limit = np.float16(share)
    if limit > share:  # rounding up would let the sum of all ranks overflow
        limit = np.nextafter(limit, np.float16(0))
    return load_backend("cpu").to_float16(values, float(limit))
