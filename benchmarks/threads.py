"""What two threads gain over one, beside what they gain for a memcpy, in turns in one run.

    python benchmarks/threads.py

Writes results/threads.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from horovod_fftcomp import set_num_threads
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools import environment, gradient_files
from horovod_fftcomp.tools.bench import RecipeSession, memcpy

NUMEL, ROUNDS, THREADS = 25_000_000, 15, (1, 2)
RECIPES: dict[str, tuple[str, dict[str, object]]] = {
    "topk(density=0.01, bits=8)": ("topk", {"density": 0.01, "bits": 8}),
    "fft(density=0.15, bits=8, block=256)": ("fft", {"density": 0.15, "bits": 8, "block": 256}),
    "dct(density=0.15, bits=8, block=256)": ("dct", {"density": 0.15, "bits": 8, "block": 256}),
    "topk": ("topk", {}),
    "fft": ("fft", {}),
    "dct": ("dct", {}),
}
OUT = Path(__file__).parent / "results" / "threads.json"


def seconds(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return how long ``work`` takes, and its result."""
    begin = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - begin, result


def once(session: RecipeSession, grad: np.ndarray, copied: np.ndarray) -> dict[str, float]:
    """Return seconds of a memcpy, an encoding with error feedback and a decoding of two."""
    copy_s, _ = seconds(memcpy, copied, grad)
    encode_s, message = seconds(session.encode, grad, True)
    decode_s, _ = seconds(session.decode, session.collect(message))
    return {"memcpy": copy_s, "encode": encode_s, "decode": decode_s}


def measure(session: RecipeSession, grad: np.ndarray, copied: np.ndarray) -> dict[str, Any]:
    """Return median milliseconds by number of threads, and the gains of two over one."""
    samples: dict[int, list[dict[str, float]]] = {count: [] for count in THREADS}
    for number in range(ROUNDS + 1):
        for count in THREADS:
            set_num_threads(count)
            taken = once(session, grad, copied)
            if number:  # the first round of a number of threads begins their pool
                samples[count].append(taken)
    result: dict[str, Any] = {}
    for what in ("memcpy", "encode", "decode"):
        one, two = (statistics.median(s[what] for s in samples[count]) for count in THREADS)
        result[what] = {
            "1_thread_ms": round(1e3 * one, 2),
            "2_threads_ms": round(1e3 * two, 2),
            "gain": round(one / two, 3),
        }
    return result


def main() -> None:
    """Measure each recipe, print and write the result."""
    facts = environment.describe()  # before the load that this run makes
    first, grad = (step.reshape(-1) for step in gradient_files.synthetic(NUMEL).steps[:2])
    copied = np.empty_like(grad)
    times = {}
    for label, (recipe, options) in RECIPES.items():
        session = RecipeSession(label, recipe, options, Tensor("gradient", (NUMEL,)), first)
        session.advance(first)
        times[label] = measure(session, grad, copied)
        gains = ", ".join(f"{what} {found['gain']:.2f}" for what, found in times[label].items())
        print(f"{label}: 2 threads over 1: {gains}", flush=True)
    content = {
        "command": "python benchmarks/threads.py",
        "machine": facts,
        "numel": NUMEL,
        "rounds": ROUNDS,
        "times": times,
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
