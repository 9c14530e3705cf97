"""Hard threshold: all values above a fixed threshold, given or calibrated by top-k."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.quantizers import Float32, Quantizer
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import LEAST_THRESHOLD, Threshold, TopK
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import check_whole
from horovod_fftcomp.kernels.ops import Deferred, Feedback
from horovod_fftcomp.schemes import Context, Exchange, Grads, Measured, Round
from horovod_fftcomp.schemes.allgather import gather, serves
from horovod_fftcomp.schemes.shards import SHARD_RESIDUAL
from horovod_fftcomp.schemes.state import LowPass, on_the_host
from horovod_fftcomp.schemes.state_array import StateArray, StateArrays, coefficients
from horovod_fftcomp.types import Array, OldState, Tensor, Tensors


@dataclass(frozen=True)
class HardThreshold(LowPass):
    """Send all values of at least ``threshold`` in magnitude, with optional error feedback.

    With ``threshold`` None each tensor begins with ``calibrate_steps`` steps of top-k at
    ``density``, steps with zero gradients not counted. From then on its threshold is the k-th
    largest magnitude, averaged over ranks and over the last half of these steps. A given
    ``threshold`` is in units of a gradient before any loss scale.

    The payload size depends on the values. Source: Sahu et al., NeurIPS 2021, which minimises the
    total error.
    """

    spec_name = "HardThreshold"
    quantizer: Quantizer
    density: float
    threshold: float | None = None
    calibrate_steps: int = 100
    error_feedback: bool = True
    rounds = ("allgather",)

    def __post_init__(self) -> None:
        super().__post_init__()
        TopK(self.density)
        if self.threshold is not None:
            Threshold(self.threshold)
        check_whole("calibrate_steps", self.calibrate_steps, 1)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        levels = dict(state.get("levels", {}))
        codecs = [self._codec(levels.get(tensor.name), context) for tensor in tensors]
        if any(codec.has_fixed_size for codec in codecs):  # calibration reads the payloads
            context, grads, state = on_the_host(context, grads, state)
            if context.second is not None:  # so it gathers them, after an empty round
                empty = np.empty(0, np.uint8)
                yield Round("alltoall", empty, splits=(0,) * context.world_size)
                context = context._replace(second=None)
        feedback = Feedback(self.error_feedback, beta=self.beta)
        found = yield from gather(codecs, tensors, grads, state, context, feedback)
        outcome, read = found.outcome, found.payloads
        payloads = read() if read and any(codec.has_fixed_size for codec in codecs) else []
        for number, (codec, tensor) in enumerate(zip(codecs, tensors, strict=True)):
            if codec.has_fixed_size and outcome.flags.finite:
                seen = [_level(codec, *payload) for payload in payloads[number :: len(tensors)]]
                levels[tensor.name] = self._with(levels.get(tensor.name), float(np.mean(seen)))
        if self.threshold is None:
            outcome.state["levels"] = levels
        if not self.error_feedback:
            return outcome
        residuals, left = outcome.state["residual"], found.left
        frozen = {t.name for t, grad in zip(tensors, grads, strict=True) if grad is None}
        rest = [array for name, array in residuals.items() if left is None or name in frozen]
        rest += outcome.state.get(SHARD_RESIDUAL, {}).values()
        measured = partial(_measured, outcome.measured, left, context.ops.squares(rest))
        return outcome._replace(measured=measured)

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``.

        During calibration this scheme itself copies arrays to the host.
        """
        return serves(_codec(LEAST_THRESHOLD, self.quantizer), tensors)

    @property
    def codec(self) -> Codec:
        """The codec of a given threshold; ValueError if ``threshold`` is None."""
        if self.threshold is None:
            raise ValueError("threshold is None, so it is known only in a run; give threshold=")
        return _codec(self.threshold, self.quantizer)

    def _codec(self, levels: Array | None, context: Context) -> Codec:
        """Return the codec of a tensor: float32 top-k in calibration, then its threshold's."""
        if self.threshold is not None:
            return _codec(self.threshold, self.quantizer).at_loss_scale(context.loss_scale)
        if levels is None or np.isnan(levels[-1]):
            return calibrating(self.density)
        last = levels[self.calibrate_steps // 2 :]
        return _codec(max(float(last.mean(dtype=np.float64)), LEAST_THRESHOLD), self.quantizer)

    def _with(self, levels: Array | None, level: float) -> Array:
        """Return ``levels`` with ``level`` appended; 0, from zero gradients, is skipped."""
        if levels is None:
            levels = np.full(self.calibrate_steps, np.nan, np.float32)
        if level > 0:
            levels = levels.copy()
            levels[np.flatnonzero(np.isnan(levels))[0]] = level
        return levels

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` at ``density``, an estimate: the values decide."""
        codec = Codec(Identity(), TopK(self.density), self.quantizer)
        return wire.align(codec.payload_nbytes(tensor.shape))

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return the residual and, of the calibration, the levels; see ``Scheme``."""
        residual = coefficients(calibrating(self.density), tensor, self.error_feedback)
        levels = StateArray(self.calibrate_steps, is_kept=self.threshold is None)
        return {"residual": residual, "levels": levels}


def _measured(
    measured: Callable[[], Measured] | None, left: Callable[[], float] | None, rest: Deferred
) -> Measured:
    """Return the measurements, with the squares of all residuals: ``left`` and ``rest``."""
    missed = sum(rest()) + (0.0 if left is None else left())
    return Measured({} if measured is None else measured().energies, missed=missed)


@functools.lru_cache(64)
def calibrating(density: float) -> Codec:
    """Return the codec of calibration, always the same object, by which coders are cached."""
    return Codec(Identity(), TopK(density), Float32())


@functools.lru_cache(1 << 14)
def _codec(threshold: float, quantizer: Quantizer) -> Codec:
    """Return a cached codec: its fingerprint takes longer to make than a small tensor to encode."""
    return Codec(Identity(), Threshold(threshold), quantizer)


def _level(codec: Codec, header: wire.Header, payload: Array) -> float:
    """Return the k-th largest magnitude of a float32 top-k payload."""
    plan = codec.plan(header.shape)
    values = np.abs(payload[plan.values_offset :].view(np.float32))
    assert isinstance(codec.sparsifier, TopK)
    k = codec.sparsifier.count(plan.numel)
    return float(np.sort(values)[-k]) if k else 0.0
