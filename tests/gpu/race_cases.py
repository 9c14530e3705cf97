"""Exchanges of two ranks in an emulator that looks for races; run by test_sanitizers.py.

The sanitizer has to be loaded before Python: ``LD_PRELOAD=libtsan.so``. ``argv[1]``: the number of
a barrier to leave out, in the order of the sources, or -1.
"""

from __future__ import annotations

import math
import random
import re
import sys

import numpy as np

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels.cuda.hashes import hashes_on_device
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once
from tests import reference
from tests.gpu.emulator import SHUFFLED, Emulator

BARRIER = "__syncthreads();"
# Of other kernels each, or of other parts of them.
RACES = (
    ("topk", {"density": 0.05, "bits": 5}),  # offsets
    ("fft", {"density": 0.3}),  # bitmaps
    ("dct", {"block": 256}),
    ("hard_threshold", {"threshold": 2.0}),
    ("adacomp", {}),
    ("wangni", {"density": 0.1}),
    ("scalecom", {"density": 0.03}),
    ("onebit", {"group": "column"}),
    ("qsgd", {"levels": 63, "norm": "l2", "error_feedback": True}),
    ("dither", {"ratio": 20}),
    ("terngrad", {}),
    ("dgc", {"density": 0.05, "max_norm": 1.0}),
    ("dgc", {"warmup_steps": 9}),
    ("natural", {}),
    ("signum", {}),
    ("powersgd", {"rank": 3}),
)
CASES = (
    *RACES,
    ("topk", {"density": 0.4, "bits": 8}),
    ("random_k", {"exchange": "gather"}),
    ("dorefa", {"bits": 12}),
    ("demo", {"sign": True}),
    ("fp16", {}),
)
TENSORS = (Tensor("a", (50, 100)), Tensor("b", (300,)))


def run_steps(device: cuda.Device, recipe: str, options: dict, n_steps: int = 2) -> None:
    """Run steps of two ranks, with residuals, the first of them measured."""
    bucket, rng = Bucket(TENSORS, make_policy(recipe, **options)), np.random.default_rng(2)
    engines = [Engine([bucket], rank, 2, device) for rank in range(2)]
    for _ in range(n_steps):
        grads = [
            [[rng.standard_t(3, math.prod(t.shape)).astype(np.float32) for t in TENSORS]]
            for _ in "ab"
        ]
        exchange_once(engines, grads, random.Random(0))
        for engine in engines:
            assert engine.computes_on_device(0)
            assert all(np.isfinite(total).all() for total in engine.sums(0))
            engine.settle()
            engine.read_device()


def without_barrier(number: int) -> str:
    """Return the sources without their ``number``-th barrier."""
    text = cuda.source()
    places = [found.start() for found in re.finditer(re.escape(BARRIER), text)]
    if number < 0:
        return text
    begin = places[number]
    return text[:begin] + ";" + text[begin + len(BARRIER) :]


class Edited(Emulator):
    """Builds other sources than the package's."""

    text = cuda.source()

    def functions(self, source: str, names: list[str]) -> dict:
        del source
        return super().functions(self.text, names)


def main(number: int) -> None:
    """Run ``RACES``, or one without a barrier; races are the sanitizer's to report."""
    # Numba's code is not the sanitizer's; what the host computes the reference can do as well.
    sys.modules["horovod_fftcomp.kernels.cpu"] = reference
    device = Edited(SHUFFLED, 3, "-fsanitize=thread")
    device.text = without_barrier(number)
    for recipe, options in RACES if number < 0 else RACES[:1]:
        run_steps(device, recipe, options, 1)
    hashes_on_device(device, [device.upload(np.ones(1030, np.uint8))])


if __name__ == "__main__":
    main(int(sys.argv[1]))
