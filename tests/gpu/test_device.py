"""On a GPU: the emulator's bytes. Run by ``make test-gpu``."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import get_codec
from horovod_fftcomp.backends.gpu.decoder import Decoder
from horovod_fftcomp.backends.gpu.encoder import Encoder
from tests.gpu.emulator import Emulator
from tests.gpu.test_kernels import FIXED, GRADS, make_codec

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    """The GPU; the test is skipped where there is none."""
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("no GPU is available")
    from horovod_fftcomp.backends.gpu.cupy_device import CupyDevice

    return CupyDevice()


def exchanged(device, codec, grads, n_ranks=2):
    """Return (message, coefficients that are left, sums) as NumPy arrays."""
    shapes = [grad.shape for grad in grads]
    encoder = Encoder(device, [codec] * len(grads), shapes)
    coeffs = [None if f is None else device.empty(f[1], f[0]) for f in encoder.coeffs_formats]
    message, _ = encoder.encode([device.upload(g) for g in grads], [None] * len(grads), coeffs)
    host = [getattr(message, "get", lambda: message)()[: encoder.message_nbytes]]
    decoder = Decoder(device, [codec] * len(grads), shapes, encoder, n_ranks)
    sums = [device.empty(max(1, int(np.prod(shape)))) for shape in shapes]
    decoder.decode(device.upload(np.concatenate(host * n_ranks)), sums)
    left = [c for c in coeffs if c is not None]
    return host[0], *[[getattr(a, "get", lambda a=a: a)() for a in arrays]
                      for arrays in (left, sums)]  # fmt: skip


@pytest.mark.parametrize("key", FIXED)
def test_all_bytes_are_the_emulators(device, key):
    codec = make_codec(key)
    grads = [grad for grad in GRADS.values() if grad.size and np.isfinite(grad).all()]
    on_gpu, emulated = exchanged(device, codec, grads), exchanged(Emulator(), codec, grads)
    assert on_gpu[0].tobytes() == emulated[0].tobytes()
    for ours, theirs in zip(on_gpu[1] + on_gpu[2], emulated[1] + emulated[2], strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("block", [64, 256, 4096])
def test_all_bytes_are_the_emulators_for_every_block(device, block):
    for recipe in ("fft", "dct"):
        codec = get_codec(recipe, block=block)
        grads = [GRADS["several-tiles"]]
        on_gpu, emulated = exchanged(device, codec, grads), exchanged(Emulator(), codec, grads)
        assert on_gpu[0].tobytes() == emulated[0].tobytes()
