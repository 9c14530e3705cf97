"""Worker of gpu_first_minutes.py: answers cases, one line of JSON each, on the GPU or the emulator.

A case: {"kind": a function of ``KINDS``, "with": its arguments}.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gpu
import torch
from gpu_comparison import OPTIONS, compare_steps
from gpu_processes import MARK

from horovod_fftcomp import get_scheme
from horovod_fftcomp.engine.device_selftest import probe
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.kernels import threads as kernel_threads

# Tensors whose encoding and decoding is timed.
LISTS: dict[str, Callable[[], list[int]]] = {
    "1 M": lambda: [1_000_000],
    "25 M": lambda: [25_000_000],
    "100 M": lambda: [100_000_000],
    "20 x 600 x 600": lambda: [360_000] * 20,
    "ResNet-50": gpu.resnet50,
    "small": lambda: [20_000],
}
WAITING = re.compile(r"(Stream|Device|Event|Ctx)Synchronize|^cu(da)?Memcpy([DH]to[DH](_v2)?)?$")


class Place(NamedTuple):
    """Where cases are computed: the device of kernels, PyTorch's name of it."""

    device: Any
    name: str

    @property
    def is_emulated(self) -> bool:
        """Whether there is no GPU."""
        return self.name == "cpu"


def open_place(emulated: bool) -> Place:
    """Return the GPU or the emulator, with all kernels compiled in one module."""
    if emulated:
        from tests.gpu.torch_emulator import TorchEmulator

        place = Place(TorchEmulator(), "cpu")
    else:
        from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice

        place = Place(TorchDevice(torch.device("cuda", 0)), "cuda")
    place.device.functions(cuda.source(), cuda.NAMES)
    return place


def describe_kernels(place: Place) -> dict[str, Any]:
    """Return registers, local memory and architecture of all kernels; not ok if any spills."""
    if place.is_emulated:
        return {"n_kernels": len(cuda.NAMES)}
    from horovod_fftcomp.kernels.cuda.cupy_device import compiled

    launches = compiled(cuda.source(), cuda.NAMES)
    attributes = {name: launch.args[0].attributes for name, launch in launches.items()}
    local = {n: a["local_size_bytes"] for n, a in attributes.items() if a["local_size_bytes"]}
    most = max(attributes, key=lambda name: attributes[name]["num_regs"])
    return {
        "ok": not local,
        "n_kernels": len(cuda.NAMES),
        "most_registers": [most, attributes[most]["num_regs"]],
        "local_memory": local,
        "binary_versions": sorted({a["binary_version"] for a in attributes.values()}),
    }


def check_device(place: Place, recipe: str) -> dict[str, Any]:
    """Run the self-test that precedes every training on a GPU."""
    probe(place.device, [get_scheme(recipe, **OPTIONS.get(recipe, {}))])
    return {}


def run_steps(place: Place, **about: Any) -> dict[str, Any]:
    """Compare steps with the CPU's; see ``compare_steps``."""
    return compare_steps(place.device, **about)


def time_codec(place: Place, codec: str, tensors: str, repeat: int) -> dict[str, Any]:
    """Time encode and decode_sum beside a copy of memory and PyTorch's own functions."""
    sizes = LISTS[tensors]()
    row = gpu.described(gpu.measure(place.device, place.name, tensors, sizes, codec, repeat))
    return {
        "copy_gb_s": round(row["copy_gb_s"]),
        "encode_ms": round(1e3 * row["encode"], 4),
        "decode_sum_ms": round(1e3 * row["decode_sum"], 4),
        "torch_ms": round(1e3 * row["standard"], 4),
        "encode_share_of_copy": round(row["encode_share_of_copy"], 3),
        "decode_share_of_copy": round(row["decode_share_of_copy"], 3),
    }


def time_step(place: Place, recipe: str, tensors: str, repeat: int) -> dict[str, Any]:
    """Time all that one rank computes in a step, also in copies of the gradient."""
    gpu.STEP_OPTIONS = OPTIONS
    sizes = LISTS[tensors]()
    found = gpu.measure_step(place.device, place.name, tensors, sizes, recipe, repeat)
    return {"step_ms": round(1e3 * found["step"], 4), "copies": round(found["copies"], 2)}


def count_waits(place: Place, recipe: str) -> dict[str, Any]:
    """Count the calls in a step of 20 matrices for which the host waits for the GPU."""
    if place.is_emulated:
        return {"waits": {}, "note": "an emulator has no calls to count"}
    gpu.STEP_OPTIONS = OPTIONS
    grads = gpu.random_grads(LISTS["20 x 600 x 600"](), place.name)
    _, step = gpu.step_of(place.device, grads, recipe)
    return {"waits": waits_of(step)}


def waits_of(step: Callable[[], object]) -> dict[str, float]:
    """Return how often a step calls each function that lets the host wait for the GPU.

    By the difference of two profiles, since the profiler waits too.
    """
    counts = []
    for steps in (2, 6):
        with torch.profiler.profile() as profile:
            for _ in range(steps):
                step()
        counts.append(Counter({event.key: event.count for event in profile.key_averages()}))
    counts[1].subtract(counts[0])
    return {name: n / 4 for name, n in counts[1].items() if n and WAITING.search(name)}


KINDS = {
    function.__name__: function
    for function in (
        describe_kernels, check_device, run_steps, time_codec, time_step, count_waits
    )
}  # fmt: skip


def answer(place: Place, case: dict[str, Any]) -> dict[str, Any]:
    """Return what a case has found; "sticky": a GPU's error, after which it computes no more."""
    began = time.perf_counter()
    try:
        found = KINDS[case["kind"]](place, **case.get("with", {}))
        if not place.is_emulated:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except BaseException as error:
        text, trace = f"{type(error).__name__}: {error}", traceback.format_exc()[-2500:]
        sticky = not place.is_emulated and re.search("cuda|cudnn|cublas", text, re.I) is not None
        return {"ok": False, "error": text[:600], "trace": trace, "sticky": sticky}
    return {"ok": True} | found | {"s": round(time.perf_counter() - began, 3)}


def main(argv: Sequence[str] | None = None) -> None:
    """Answer cases until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--threads", type=int, default=4)
    args = parser.parse_args(argv)
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    kernel_threads.set_num_threads(args.threads)
    began, place = time.perf_counter(), None
    for line in sys.stdin:
        try:
            if place is None:
                place = open_place(args.emulated)
                print(f"kernels: {time.perf_counter() - began:.1f} s", file=sys.stderr)
        except BaseException as error:
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600],
                     "trace": traceback.format_exc()[-2500:], "sticky": True}  # fmt: skip
        else:
            found = answer(place, json.loads(line))
        print(MARK + json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
