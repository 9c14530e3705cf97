"""A gather whose payloads are made and summed by a GPU, without a wait for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.backends.gpu import Device
from horovod_fftcomp.backends.gpu.decoder import Decoder
from horovod_fftcomp.backends.gpu.encoder import Encoder
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.positions import Layout
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Energy, OnDevice, Outcome, Round, Tensor

# Buckets, times the densities that a schedule goes through at a time.
_CODERS_CACHED = 256


def serves(codec: Codec, tensors: Sequence[Tensor], carried: Mapping[str, Any]) -> bool:
    """Tell whether a GPU can make and sum these tensors' payloads.

    It takes payloads of a size that is known before the data, and tensors of fewer than 2^32
    coefficients. Where a tensor travels as it is from now on, its residual does too, for once: that
    is left to the host.
    """
    if not codec.has_fixed_size:
        return False
    plans = [codec.plan(tensor.shape) for tensor in tensors]
    return all(
        plan.n_bins < 1 << 32 and not (plan.layout is Layout.RAW and tensor.name in carried)
        for plan, tensor in zip(plans, tensors, strict=True)
    )


@functools.lru_cache(_CODERS_CACHED)
def _coders(
    device: Device, codec: Codec, shapes: tuple[tuple[int, ...], ...], n_ranks: int
) -> tuple[Encoder, Decoder]:
    codecs = [codec] * len(shapes)
    encoder = Encoder(device, codecs, shapes)
    return encoder, Decoder(device, codecs, shapes, encoder, n_ranks)


class _Residuals(NamedTuple):
    old: list[Any]  # those to add; None of a tensor that has none, or is frozen
    new: list[Any]  # what is left, once the encoder has run; None where nothing is kept


def gather_on_device(
    codec: Codec,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    carried: Mapping[str, Any],
    context: Context,
    error_feedback: bool,
) -> Generator[Round, Any, Outcome]:
    """Exchange payloads; see ``gather``. Arrays are the device's, or NumPy's and brought there."""
    device = context.device
    assert device is not None
    measure = context.step % MEASURE_EVERY == 0
    shapes = tuple(tensor.shape for tensor in tensors)
    encoder, decoder = _coders(device, codec, shapes, context.world_size)
    numels = [math.prod(shape) for shape in shapes]
    placed = [
        device.zeros(max(1, numel)) if grad is None else on_device(grad, device)
        for grad, numel in zip(grads, numels, strict=True)
    ]
    residuals = _residuals(encoder, tensors, grads, carried, device, error_feedback or measure)
    encoded = encoder.encode(placed, *residuals, measure)
    gathered = yield Round("allgather", encoded.message)
    sums = [device.empty(max(1, numel))[:numel] for numel in numels]
    not_finite, arrived = decoder.decode(gathered, sums)
    state = {}
    if error_feedback:
        new = zip(tensors, residuals.new, strict=True)
        frozen = {t.name for t, grad in zip(tensors, grads, strict=True) if grad is None}
        kept = {name: array for name, array in carried.items() if name in frozen}
        state["residual"] = kept | {t.name: array for t, array in new if array is not None}
    energies = None
    if encoded.squares is not None:
        energies = functools.partial(_energies, encoded.squares, tensors)
    later = OnDevice(not_finite, arrived, encoded.restore, energies)
    return Outcome(sums, state, True, on_device=later)


def on_device(array: Any, device: Device) -> Any:
    """Return ``array``, brought to the device if it is NumPy's."""
    return device.upload(array) if isinstance(array, np.ndarray) else array


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


def _energies(
    squares: Callable[[], dict[int, tuple[float, float, float]]], tensors: Sequence[Tensor]
) -> dict[str, Energy]:
    return {tensors[number].name: Energy(*sums) for number, sums in squares().items()}
