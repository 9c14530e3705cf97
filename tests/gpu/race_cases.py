"""Encodes and decodes in an emulator that looks for races; run by test_sanitizers.py.

The sanitizer has to be loaded before Python: ``LD_PRELOAD=libtsan.so``. ``argv[1]``: the number of
a barrier to leave out, in the order of the sources, or -1.
"""

from __future__ import annotations

import re
import sys

import numpy as np

from horovod_fftcomp import get_codec
from horovod_fftcomp.backends import gpu
from horovod_fftcomp.backends.gpu import decoder as decoder_module
from horovod_fftcomp.backends.gpu import encoder as encoder_module
from tests.gpu.emulator import SHUFFLED, Emulator

BARRIER = "__syncthreads();"
CASES = (
    ("topk", {"density": 0.05, "bits": 5}),  # offsets
    ("topk", {"density": 0.4, "bits": 8}),  # bitmaps
    ("fft", {"density": 0.3}),  # the entropy code
    ("dct", {"block": 256}),
)


def without_barrier(number: int) -> str:
    """Return the sources without their ``number``-th barrier."""
    places = [found.start() for found in re.finditer(re.escape(BARRIER), gpu.source())]
    if number < 0:
        return gpu.source()
    begin = places[number]
    return gpu.source()[:begin] + ";" + gpu.source()[begin + len(BARRIER) :]


def main(number: int) -> None:
    """Run all cases; races are the sanitizer's to report."""
    text = without_barrier(number)
    encoder_module.source = decoder_module.source = lambda: text
    device = Emulator(SHUFFLED, 3, "-fsanitize=thread")
    rng = np.random.default_rng(1)
    for recipe, options in CASES:
        codec, shapes = get_codec(recipe, **options), [(13_000,), (700,)]
        grads = [rng.standard_t(3, shape).astype(np.float32) for shape in shapes]
        encoder = encoder_module.Encoder(device, [codec] * 2, shapes)
        coeffs = [device.empty(form[1], form[0]) for form in encoder.coeffs_formats]
        on_device = [device.upload(grad) for grad in grads]
        message = encoder.encode(on_device, [None, None], coeffs, measure=True).message
        decoder = decoder_module.Decoder(device, [codec] * 2, shapes, encoder, 2)
        sums = [device.empty(shape[0]) for shape in shapes]
        decoder.decode(device.upload(np.concatenate([message, message])), sums)


if __name__ == "__main__":
    main(int(sys.argv[1]))
