"""Dense allreduce of all values, in float32 or float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels.ops import Ops
from horovod_fftcomp.kernels.plans import split
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round, Scheme, Traits
from horovod_fftcomp.schemes.meter import Meter
from horovod_fftcomp.schemes.state import bucket_plan
from horovod_fftcomp.schemes.state_array import StateArrays
from horovod_fftcomp.types import Arrays, OldState, Tensor, Tensors


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
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        ops, plan, halves = context.ops, bucket_plan(tensors), self.dtype == "float16"
        values, meter = ops.join(grads, plan.numels), Meter(context, tensors)
        if halves:
            sent = ops.to_half(values, *half_limits(context))
            if meter.on:
                own, given = (split(v, plan.offsets) for v in (values, ops.from_half(sent)))
                meter.before(own, own)
                meter.after(_differences(ops, own, given))
            values = sent  # what they are made of is freed before the round
        reduced = yield Round("allreduce", values)
        if halves:
            reduced = ops.from_half(reduced)
        measured = meter.measured() if halves else None
        return Outcome(split(reduced, plan.offsets), {}, ops.flags_of(reduced), measured)

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return True: a GPU can compute this step's exchange; see ``Scheme``."""
        return True

    @property
    def traits(self) -> Traits:
        """Those of sums of this step's gradients; see ``Scheme``."""
        return Traits(compresses=False)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step."""
        return tensor.numel * np.dtype(self.dtype).itemsize

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return no arrays: it has no state; see ``Scheme``."""
        return {}


def _differences(ops: Ops, ours: Arrays, theirs: Arrays) -> list[Any]:
    """Return ``ours`` minus ``theirs``, which are written over; exact, by means of ``mix``."""
    nothing = [None] * len(ours)
    halves = ops.mix(ours, ops.mix(nothing, theirs, -1.0), 0.5)
    return ops.mix(nothing, halves, 2.0)


def half_limits(context: Context) -> tuple[int, float]:
    """Return (float32 bits of the largest magnitude that is not sent as NaN, saturation limit)."""
    share = np.finfo(np.float16).max / np.float32(context.world_size)
    limit = np.float16(share)
    if limit > share:  # rounding up would let the sum of all ranks overflow
        limit = np.nextafter(limit, np.float16(0))
    largest = LARGEST_FINITE_BITS if context.loss_scale == 1 else int(share.view(np.uint32))
    return largest, float(limit)
