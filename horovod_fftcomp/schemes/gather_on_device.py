"""A gather whose payloads are made and summed by a GPU, without a wait for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod_fftcomp.backends.gpu import Device, on_device
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.positions import Layout
from horovod_fftcomp.schemes import MEASURE_EVERY, Context, Energy, OnDevice, Outcome, Round, Tensor

if TYPE_CHECKING:
    from horovod_fftcomp.backends.gpu.decoder import Decoder
    from horovod_fftcomp.backends.gpu.encoder import Encoder


def serves(codec: Codec, tensors: Sequence[Tensor]) -> bool:
    """Tell whether a GPU can make and sum these tensors' payloads; the same on all ranks.

    It takes payloads of a size that is known before the data, and tensors of fewer than 2^32
    coefficients. A tensor that travels as it is may have a residual of another density's times,
    which travels along: that is left to the host.
    """
    if not codec.has_fixed_size:
        return False
    plans = [codec.plan(tensor.shape) for tensor in tensors]
    return all(
        plan.n_bins < 1 << 32 and (plan.layout is not Layout.RAW or not plan.numel)
        for plan in plans
    )


def _coders(
    device: Device, codec: Codec, tensors: Sequence[Tensor], n_ranks: int
) -> tuple[Encoder, Decoder]:
    """Return a bucket's coders; those of another density or number of ranks are dropped."""
    from horovod_fftcomp.backends.gpu.decoder import Decoder  # not for whoever has no GPU
    from horovod_fftcomp.backends.gpu.encoder import Encoder

    key, made_for = ("coders", tuple(tensors)), (codec, n_ranks)
    if key not in device.cache or device.cache[key][0] != made_for:
        codecs, shapes = [codec] * len(tensors), [tensor.shape for tensor in tensors]
        device.cache.pop(key, None)  # frees its memory first
        encoder = Encoder(device, codecs, shapes)
        decoder = Decoder(device, codecs, shapes, encoder, n_ranks)
        device.cache[key] = (made_for, encoder, decoder)
    _, encoder, decoder = device.cache[key]
    return encoder, decoder


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
    encoder, decoder = _coders(device, codec, tensors, context.world_size)
    numels = [math.prod(tensor.shape) for tensor in tensors]
    placed = [
        device.zeros(max(1, numel)) if grad is None else on_device(grad, device)
        for grad, numel in zip(grads, numels, strict=True)
    ]
    residuals = _residuals(encoder, tensors, grads, carried, device, error_feedback or measure)
    encoded = encoder.encode(placed, *residuals, measure)
    gathered = yield Round("allgather", encoded.message)
    expected = context.world_size * len(encoded.message)
    if len(gathered) != expected:
        raise PayloadError(f"{len(gathered)} bytes arrived, {expected} were expected")
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
