"""A GPU's answer to a small question, before a training trusts it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from horovod_fftcomp.backends import load_backend
from horovod_fftcomp.backends.gpu import Device
from horovod_fftcomp.backends.gpu.decoder import Decoder
from horovod_fftcomp.backends.gpu.encoder import Encoder
from horovod_fftcomp.codec import Codec
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.positions import Layout
from horovod_fftcomp.transforms import Identity

_NUMEL = 20_000  # a few tiles


def probe(device: Device, codecs: Iterable[Codec]) -> None:
    """Raise UnsupportedError unless the device makes the CPU's bytes and sums by all ``codecs``.

    It also compiles what they need.
    """
    steps = np.arange(_NUMEL, dtype=np.float64)
    grad = (np.sin(0.37 * steps) * np.exp2(steps % 13)).astype(np.float32)
    for codec in codecs:
        if codec.plan(grad.shape).layout is Layout.RAW:
            continue
        payload, total = _exchanged(device, codec, grad)
        if isinstance(codec.transform, Identity):
            expected = codec.encode(grad)
            if payload.tobytes() != expected.tobytes():
                wrong = int((payload != expected).sum())
                raise UnsupportedError(f"{wrong} of {expected.size} bytes of a payload are wrong")
        decoded = codec.decode_sum([payload, payload])
        error, peak = float(np.abs(total - decoded).max()), float(np.abs(decoded).max())
        if not error <= 1e-5 * peak:
            raise UnsupportedError(f"a sum with values up to {peak:.3g} is wrong by {error:.3g}")


def _exchanged(device: Device, codec: Codec, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a payload, and the sum of two ranks that both have sent it."""
    shapes = [grad.shape]
    encoder = Encoder(device, [codec], shapes)
    decoder = Decoder(device, [codec], shapes, encoder, 2)
    encoded = encoder.encode([device.upload(grad)], [None], [None])
    message = device.fetch(encoded.message)()
    total = device.empty(grad.size)
    decoder.decode(device.upload(np.concatenate([message, message])), [total])
    payload = load_backend("cpu").empty(codec.payload_nbytes(grad.shape), np.uint8)
    payload[:] = message[: payload.size]
    return payload, device.fetch(total)()
