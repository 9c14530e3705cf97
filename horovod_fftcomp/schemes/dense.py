"""Dense allreduce of all values, in float32 or float16."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_fftcomp.codec.backend import load_backend
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.schemes import (
    Context,
    Exchange,
    Grads,
    OldState,
    OnDevice,
    Outcome,
    Round,
    Scheme,
    State,
    Tensor,
)
from horovod_fftcomp.schemes.device_rows import on_each
from horovod_fftcomp.schemes.wrapper import join, split
from horovod_fftcomp.types import Array


@dataclass(frozen=True)
class Dense(Scheme):
    """Allreduce all values as ``dtype`` ("float32" or "float16").

    In float16 each rank's values saturate at 65504 / world size, so that the sum cannot overflow. A
    rank with NaN or Inf sends only NaN. Under a loss scaler a rank whose values would saturate also
    sends NaN, since the scaler has to see that its scale is too large.
    """

    spec_name = "Dense"
    dtype: str = "float32"
    rounds = ("allreduce",)

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        del state
        sizes = [math.prod(tensor.shape) for tensor in tensors]
        if context.device is not None:
            halves = half_limits(context) if self.dtype == "float16" else None
            return (yield from _sum_on_device(grads, sizes, context.device, halves))
        kernels, values = load_backend("cpu"), join(grads, sizes, None)
        if self.dtype == "float16":
            values = saturated_half(values, context)
        reduced = yield Round("allreduce", values)
        if self.dtype == "float16":
            reduced = kernels.from_float16(reduced)
        finite = kernels.max_abs_bits(reduced) <= LARGEST_FINITE_BITS
        return Outcome(split(reduced, sizes), {}, finite)

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Return True: a GPU can compute this step's exchange; see ``Scheme``."""
        del tensors
        return True

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        return math.prod(tensor.shape) * np.dtype(self.dtype).itemsize

    def state_format(self, tensor: Tensor) -> str:
        """Return the state's shape and domain in words; see ``Scheme.state_format``."""
        del tensor
        return "none"


def _sum_on_device(
    grads: Sequence[Any], sizes: Sequence[int], device: Device, halves: tuple[int, float] | None
) -> Generator[Round, Any, Outcome]:
    """Allreduce device arrays without host synchronisation.

    ``halves``: for float16, what ``half_limits`` returns.
    """
    n = sum(sizes)
    launch = on_each(device, "find_beyond", "write_halves", "read_halves")
    values = join(grads, sizes, device)
    if halves is None:
        reduced = yield Round("allreduce", values)
    else:
        largest, limit = halves
        beyond, message = device.zeros(1, np.uint32), device.empty(n, np.float16)
        launch("find_beyond", n, values, np.uint64(n), np.uint32(largest), beyond)
        bits = np.float32(limit).view(np.uint32)
        launch("write_halves", n, values, np.uint64(n), bits, beyond, message)
        arrived = yield Round("allreduce", message)
        reduced = device.empty(n)
        launch("read_halves", n, arrived, np.uint64(n), reduced)
    return outcome_on_device(reduced, sizes, {}, device)


def outcome_on_device(reduced: Any, sizes: Sequence[int], state: State, device: Device) -> Outcome:
    """Return the outcome of sums that lie on the device in one array, ``reduced``."""
    not_finite = device.zeros(1, np.uint32)
    n, beyond = sum(sizes), np.uint32(LARGEST_FINITE_BITS)
    on_each(device, "find_beyond")("find_beyond", n, reduced, np.uint64(n), beyond, not_finite)
    flags = OnDevice(not_finite, device.zeros(0, np.uint32))
    return Outcome(split(reduced, sizes), state, True, on_device=flags)


def half_limits(context: Context) -> tuple[int, float]:
    """Return (float32 bits of the largest magnitude that is not sent as NaN, saturation limit)."""
    share = np.finfo(np.float16).max / np.float32(context.world_size)
    limit = np.float16(share)
    if limit > share:  # rounding up would let the sum of all ranks overflow
        limit = np.nextafter(limit, np.float16(0))
    largest = LARGEST_FINITE_BITS if context.loss_scale == 1 else int(share.view(np.uint32))
    return largest, float(limit)


def saturated_half(values: Array, context: Context) -> Array:
    """Return float32 ``values`` as float16 that can be summed over all ranks; see ``Dense``."""
    largest, limit = half_limits(context)
    if load_backend("cpu").max_abs_bits(values) > largest:
        return np.full(values.size, np.nan, np.float16)
    return load_backend("cpu").to_float16(values, limit)
