"""Encodes a gradient by fft in the emulator; run by test_ptx.py, as wrong kernels may crash.

``argv``: what PTX is compiled for, "13:sm_90"; whether version 0.2.0's fault is planted, 0 or 1.
"""

from __future__ import annotations

import sys

import numpy as np

from horovod_fftcomp import Codec, get_codec
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels.cuda.encoder import Encoder
from tests.gpu import build
from tests.gpu.emulator import BACKWARD, FORWARD, SHUFFLED
from tests.gpu.race_cases import Edited

_FOUND = "Found* all_found"


def codec_and_grad() -> tuple[Codec, np.ndarray]:
    """Return how a gradient is encoded, and the gradient."""
    values = np.random.default_rng(1).standard_t(3, 20_000).astype(np.float32)
    return get_codec("fft", density=0.05), values


def with_fault() -> str:
    """Return the source with ``__restrict__`` on an array that other threads write."""
    planted = cuda.source().replace(_FOUND, "Found* __restrict__ all_found")
    assert planted != cuda.source()
    return planted


def main(target: str, is_planted: bool) -> None:
    """Print the payload as a hexadecimal number, once for each order of the threads."""
    build.target = build.Target(*target.split(":"))
    codec, grad = codec_and_grad()
    for schedule in (FORWARD, BACKWARD, SHUFFLED):
        device = Edited(schedule)
        device.text = with_fault() if is_planted else cuda.source()
        encoder = Encoder(device, [codec], [grad.shape])
        made = encoder.encode([device.upload(grad)], [None], [None], False, None)
        print(made.message[: codec.plan(grad.shape).payload_nbytes].tobytes().hex())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "1")
