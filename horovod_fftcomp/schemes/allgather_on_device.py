"""Allgather of payloads that a GPU encodes and sums, without host synchronisation.

The host waits only where payload sizes depend on the values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from horovod_fftcomp.codec.adaptive import AdaptiveCodec
from horovod_fftcomp.codec.base import PayloadCodec
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.signs import SignMethod
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.kernels.cuda import Device, on_device, on_host
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Energy, OnDevice, Outcome, Round, Tensor
from horovod_fftcomp.schemes.device_rows import placed, state_of
from horovod_fftcomp.schemes.momentum_on_device import velocities_of
from horovod_fftcomp.wire.counter_rng import RngKey
from horovod_fftcomp.wire.positions import Layout

if TYPE_CHECKING:
    from horovod_fftcomp.kernels.cuda.decoder import Decoder, ThresholdDecoder
    from horovod_fftcomp.kernels.cuda.encoder import Encoder
    from horovod_fftcomp.kernels.cuda.structs import DeviceCodec
    from horovod_fftcomp.schemes.momentum import MomentumCorrection


def serves(codec: PayloadCodec, tensors: Sequence[Tensor], of_signs: bool = False) -> bool:
    """Return whether a GPU can encode and sum these tensors' payloads; the same on all ranks.

    Tensors must have fewer than 2^32 coefficients; with ``of_signs`` only sign methods are
    accepted. A tensor whose payload is its raw values may have a residual from an earlier density,
    which is sent with it: the host does that.
    """
    if isinstance(codec, (DenseCodec, AdaptiveCodec)):
        if codec.method.cuda is None or (of_signs and not isinstance(codec.method, SignMethod)):
            return False
    elif of_signs or not isinstance(codec, Codec):
        return False
    if not codec.has_fixed_size:
        return all(math.prod(tensor.shape) < 1 << 32 for tensor in tensors)
    plans = [codec.plan(tensor.shape) for tensor in tensors]
    return all(
        plan.n_bins < 1 << 32 and (plan.layout is not Layout.RAW or not plan.numel)
        for plan in plans
    )


def _coders(
    device: Device, codecs: Sequence[DeviceCodec], tensors: Sequence[Tensor], n_ranks: int
) -> tuple[Encoder, Decoder | ThresholdDecoder]:
    """Return a bucket's encoder and decoder; one bucket's are cached for its last codecs only."""
    # Imported only where there is a GPU.
    from horovod_fftcomp.kernels.cuda.decoder import Decoder, ThresholdDecoder
    from horovod_fftcomp.kernels.cuda.encoder import Encoder

    key, made_for = ("coders", tuple(tensors)), (tuple(codecs), n_ranks)
    if key not in device.cache or device.cache[key][0] != made_for:
        shapes = [tensor.shape for tensor in tensors]
        device.cache.pop(key, None)  # frees its memory first
        encoder = Encoder(device, codecs, shapes)
        decoder: Decoder | ThresholdDecoder
        if all(codec.has_fixed_size for codec in codecs):
            decoder = Decoder(device, codecs, shapes, encoder, n_ranks)
        else:
            decoder = ThresholdDecoder(device, codecs, shapes, n_ranks)
        device.cache[key] = (made_for, encoder, decoder)
    _, encoder, decoder = device.cache[key]
    return encoder, decoder


class _Residuals(NamedTuple):
    old: list[Any]  # residuals to add; None if the tensor has none or is frozen
    new: list[Any]  # output of the encoder; None where no residual is kept


def gather_on_device(
    codecs: Sequence[DeviceCodec],
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    carried: Mapping[str, Mapping[str, Any]],
    context: Context,
    error_feedback: bool,
    correction: MomentumCorrection | None = None,
    *,
    decay: float = 1.0,
    keeps_sent: bool = False,
    sign: bool | str = False,
) -> Generator[Round, Any, Outcome]:
    """Exchange payloads; see ``gather``. NumPy arrays are copied to the device.

    ``carried``: the state. ``codecs``: all of fixed payload size, or none. ``correction``: the
    momentum correction before a top-k. ``decay``, ``sign``: see ``Allgather``; ``keeps_sent`` is
    its ``momentum``.
    """
    device = context.device
    assert device is not None
    measure = context.step % MEASURE_EVERY == 0 and sign != "vote" and not keeps_sent
    encoder, decoder = _coders(device, codecs, tensors, context.world_size)
    numels = [math.prod(tensor.shape) for tensor in tensors]
    there = placed(grads, numels, device)
    old = carried.get("residual", {})
    residuals = _residuals(encoder, tensors, grads, old, device, error_feedback or measure)
    keys = _keys(codecs, tensors, context)
    moving = carried.get("velocity", {})
    velocities = velocities_of(correction, tensors, grads, moving, context)
    encoded = encoder.encode(there, *residuals, measure, keys, velocities, decay, keeps_sent)
    gathered = yield Round("allgather", encoded.message)
    sums = [device.empty(max(1, numel))[:numel] for numel in numels]
    not_finite, arrived = decoder.decode(gathered, sums, sign)
    state = {}
    if error_feedback:
        state["residual"] = state_of(tensors, grads, old, residuals.new)
    if velocities is not None:
        state["velocity"] = state_of(tensors, grads, moving, velocities.new)
    measured, left = None, encoded.left if error_feedback else None
    if measure or left is not None:
        kept = state_of(tensors, grads, old, [None] * len(tensors)) if error_feedback else {}
        measured = functools.partial(_measured, encoded.squares, left, tensors, kept, device)
    later = OnDevice(not_finite, arrived, encoded.restore, measured)
    return Outcome(sums, state, True, on_device=later)


def _keys(
    codecs: Sequence[DeviceCodec], tensors: Sequence[Tensor], context: Context
) -> list[int] | None:
    """Return the random key of each tensor; None if no method here draws random numbers."""
    keys = [
        codec.key_at(RngKey(context.step, tensor.name, context.rank))
        for codec, tensor in zip(codecs, tensors, strict=True)
        if isinstance(codec, AdaptiveCodec)
        or (isinstance(codec, DenseCodec) and codec.method.draws)
    ]
    return keys or None


def _residuals(
    encoder: Encoder,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    carried: Mapping[str, Any],
    device: Device,
    keep: bool,
) -> _Residuals:
    old: list[Any] = []
    new: list[Any] = []
    for tensor, grad, form in zip(tensors, grads, encoder.coeffs_formats, strict=True):
        residual = carried.get(tensor.name) if grad is not None else None
        old.append(None if residual is None else on_device(residual, device))
        if form is None or grad is None or not keep:
            new.append(None)
        else:
            new.append(device.empty(form[1], form[0]))
    return _Residuals(old, new)


def _measured(
    squares: Callable[[], dict[int, tuple[float, float, float]]] | None,
    left: Callable[[], float] | None,
    tensors: Sequence[Tensor],
    kept: Mapping[str, Any],
    device: Device,
) -> dict[str, Any]:
    """Wait for the measurements; return fields of ``Outcome``.

    ``kept``: residuals of frozen tensors.
    """
    by_number = {} if squares is None else squares()
    fields: dict[str, Any] = {
        "energies": {tensors[number].name: Energy(*sums) for number, sums in by_number.items()}
    }
    if left is not None:
        on_hold = [on_host(residual, device) for residual in kept.values()]
        fields["missed"] = left() + sum(float(np.dot(array, array)) for array in on_hold)
    return fields
