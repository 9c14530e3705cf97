"""Programs that gpu_first_minutes.py runs by themselves, some under NVIDIA's tools.

python scripts/gpu_programs.py warm PART/OF | checked | profiled
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

import numpy as np
from gpu_processes import say

from horovod_fftcomp.kernels import cuda


def warm(part: str) -> None:
    """Compile the CPU's kernels of a part of the recipes into Numba's cache."""
    from gpu_comparison import recipes

    from horovod_fftcomp.simulation import exchange_once
    from tests.gpu import steps

    number, of = map(int, part.split("/"))
    for recipe, options in recipes(on_gpu=False)[number::of]:
        engines = steps.make_engines(None, recipe, **options)
        rng = np.random.default_rng(0)
        for _ in range(3):
            exchange_once(engines, steps.random_grads(rng), random.Random(0))
            for engine in engines:
                engine.settle()


def checked() -> None:
    """Run the self-test of all recipes for compute-sanitizer, with CuPy's device.

    Each array is an allocation of its own: beyond one begins what memcheck reports.
    """
    import cupy
    from gpu_comparison import recipes

    from horovod_fftcomp import get_scheme
    from horovod_fftcomp.engine.device_selftest import probe
    from horovod_fftcomp.kernels.cuda.cupy_device import CupyDevice

    cupy.cuda.set_allocator(None)
    device = CupyDevice(0)
    device.functions(cuda.source(), cuda.NAMES)
    for recipe, options in recipes():
        began = time.perf_counter()
        found = {"recipe": recipe, "ok": True}
        try:
            probe(device, [get_scheme(recipe, **options)])
        except Exception as error:
            found |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:300]}
        say(found | {"s": round(time.perf_counter() - began, 2)})


def profiled(numel: int = 25_000_000) -> None:
    """Launch what ncu counts: one encoding and one decoding by topk and by fft."""
    import gpu
    import torch

    from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice

    device = TorchDevice(torch.device("cuda", 0))
    device.functions(cuda.source(), cuda.NAMES)
    grads = gpu.random_grads([numel], "cuda")
    for name in ("topk", "fft"):
        encode, decode, _ = gpu.calls_of(device, name, grads)
        for call in (encode, decode, encode, decode):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        encode()
        decode()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


PROGRAMS: dict[str, Callable[..., None]] = {
    "warm": warm, "checked": checked, "profiled": profiled
}  # fmt: skip

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
