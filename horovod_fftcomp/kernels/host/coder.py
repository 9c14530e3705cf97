"""Coder of a bucket on the host."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.base import check_state
from horovod_fftcomp.codec.dense_methods import ordered_sum
from horovod_fftcomp.codec.quantizers import LARGEST_FINITE_BITS
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.kernels.host.common import energy_of
from horovod_fftcomp.kernels.host.payloads import joined, outputs_for, summed
from horovod_fftcomp.kernels.ops import AnyCodec, Encoded, Feedback, Momentum, Summed
from horovod_fftcomp.types import Array, Coefficients, Tensor
from horovod_fftcomp.wire import positions
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.positions import Layout

Squares = tuple[float, float, float]
_MOST_CODERS = 1024


class _One(NamedTuple):
    """Payload and new state of one tensor; ``squares``: see ``Encoded``."""

    payload: Array
    residual: Array | None = None
    velocity: Array | None = None
    squares: Squares | None = None


class HostCoder:
    """See ``Coder``. Several threads may use one."""

    def __init__(self, codecs: Sequence[AnyCodec], tensors: Sequence[Tensor], n_ranks: int) -> None:
        self._codecs, self._tensors, self._n_ranks = codecs, tensors, n_ranks

    def encode(
        self,
        grads: Sequence[Array | None],
        state: Mapping[str, Mapping[str, Array]],
        at: tuple[int, int],
        feedback: Feedback,
        measure: bool,
    ) -> Encoded:
        """See ``Coder.encode``."""
        message, outs = outputs_for(self._codecs, self._tensors)
        step, rank = at
        done = [
            self._encode(
                number, grad, state, out, RngKey(step, tensor.name, rank), feedback, measure
            )
            for number, (tensor, grad, out) in enumerate(
                zip(self._tensors, grads, outs, strict=True)
            )
        ]
        if message is None:
            message = joined([one.payload for one in done])
        squares = {n: one.squares for n, one in enumerate(done) if one.squares is not None}
        return Encoded(
            message,
            [one.residual for one in done],
            [one.velocity for one in done],
            (lambda: squares) if measure else None,
        )

    def _encode(
        self,
        number: int,
        grad: Array | None,
        state: Mapping[str, Mapping[str, Array]],
        out: Array | None,
        rng_key: RngKey,
        feedback: Feedback,
        measure: bool,
    ) -> _One:
        """Encode one tensor, into ``out`` if given."""
        codec, tensor = self._codecs[number], self._tensors[number]
        residual = state.get("residual", {}).get(tensor.name)
        velocity = state.get("velocity", {}).get(tensor.name)
        keep, moved = feedback.keep or measure, None
        if grad is None:
            grad, keep, measure = np.zeros(math.prod(tensor.shape), np.float32), False, False
            coeffs = codec.coeffs_of(grad, tensor.shape, cpu, own=False)
        elif feedback.momentum is not None:
            coeffs, moved = _accumulated(codec, tensor, grad, residual, velocity, feedback.momentum)
        else:
            if residual is not None and feedback.decay < 1:
                residual = _scaled(residual, feedback.decay)
            coeffs = codec.coeffs_of(grad, tensor.shape, cpu, residual, own=keep)
        wanted = _energy(codec, tensor, coeffs.array) if measure else 0.0
        subtract = keep and not feedback.keeps_sent
        payload, new = codec.encode_coeffs(
            coeffs, tensor.shape, kernels=cpu, keep_residual=subtract, out=out, rng_key=rng_key
        )
        if keep and feedback.keeps_sent:
            return _One(payload, coeffs.array)
        if moved is not None and new is not None and feedback.momentum is not None:
            _mask(feedback.momentum, codec, tensor, payload, moved)
        squares = None
        if measure and new is not None:
            squares = (energy_of(grad), wanted, _energy(codec, tensor, new))
        elif measure and moved is not None and coeffs.peak <= LARGEST_FINITE_BITS:
            squares = (energy_of(grad), wanted, 0.0)  # all is sent
        return _One(payload, new if keep and feedback.keep else None, moved, squares)

    def decode_sum(self, gathered: Array, sign: bool | str) -> Summed:
        """See ``Coder.decode_sum``."""
        found = summed(self._codecs, self._tensors, gathered, self._n_ranks)
        if sign:
            assert found.payloads is not None
            for number, total in enumerate(found.sums):
                votes = found.payloads[number :: len(found.sums)]
                voted = sign == "vote" and any(header.scale for header, _ in votes)
                cpu.majority_sign(total, self._n_ranks, self._n_ranks if voted else 0)
        return found


def _energy(codec: AnyCodec, tensor: Tensor, coeffs: Array) -> float:
    with np.errstate(over="ignore"):
        return codec.energy(coeffs, tensor.shape)


def _scaled(array: Array, factor: float) -> Array:
    reals = array.view(np.float32)
    out = cpu.empty(reals.size)
    return np.multiply(reals, np.float32(factor), out=out).view(array.dtype)


def _accumulated(
    codec: AnyCodec,
    tensor: Tensor,
    grad: Array,
    residual: Array | None,
    velocity: Array | None,
    momentum: Momentum,
) -> tuple[Coefficients, Array]:
    """Return (residual plus velocity, with its top-k threshold; the new velocity)."""
    for kind, array in (("velocity", velocity), ("residual", residual)):
        check_state(kind, array, (np.dtype(np.float32), grad.size))
    plan = codec.plan(tensor.shape)
    k = 0 if plan.layout in (Layout.RAW, Layout.ALL) else plan.k
    factor = clip_factor(grad, momentum.largest_norm)
    return cpu.momentum_accumulate(
        grad, velocity, residual, momentum.momentum, momentum.nesterov, factor, k
    )


def clip_factor(grad: Array, largest_norm: float | None) -> float:
    """Return the factor that clips the gradient, at most 1; NaN if the gradient has NaN."""
    if largest_norm is None or not grad.size:
        return 1.0
    _, _, squares = cpu.moments(grad)
    square = ordered_sum(squares)
    return 1.0 if square <= largest_norm * largest_norm else largest_norm / math.sqrt(square)


def _mask(
    momentum: Momentum, codec: AnyCodec, tensor: Tensor, payload: Array, velocity: Array
) -> None:
    """Reset the velocity where elements are sent, unless all of the tensor is."""
    plan = codec.plan(tensor.shape)
    if momentum.masking and plan.layout not in (Layout.RAW, Layout.ALL):
        packed = payload[plan.header_nbytes : plan.header_nbytes + plan.positions.nbytes]
        cpu.zero_at(velocity, positions.unpack(packed, plan.positions, cpu))


class CoderOps:
    """See ``Ops``."""

    def __init__(self) -> None:
        self._coders: dict[tuple, tuple[Sequence[AnyCodec], HostCoder]] = {}
        self._lock = threading.Lock()

    def coder(
        self, codecs: Sequence[AnyCodec], tensors: Sequence[Tensor], n_ranks: int
    ) -> HostCoder:
        """See ``Ops.coder``. Those of the last buckets are cached, each for its last codecs."""
        key = (tuple(tensors), n_ranks)
        with self._lock:
            made_for, coder = self._coders.pop(key, ((), None))
            if coder is None or not _are_same(made_for, codecs):
                coder = HostCoder(codecs, tensors, n_ranks)
            self._coders[key] = (codecs, coder)  # the last one used is the last one to go
            if len(self._coders) > _MOST_CODERS:
                del self._coders[next(iter(self._coders))]
        return coder


def _are_same(a: Sequence[AnyCodec], b: Sequence[AnyCodec]) -> bool:
    """Return whether codecs are the same objects: comparing their options takes longer."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
