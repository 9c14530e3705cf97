"""200 matrices of 64x64 against one of 12,800x64, of the same elements: one rank, one thread.

    python benchmarks/small_tensors.py

Prints milliseconds of a whole step of ``horovod_fftcomp.mpi.Reducer`` and, for recipes whose codec
``BucketCodec`` has, of encoding with error feedback and decoding alone, beside a memcpy of the
elements. Writes results/small_tensors.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from horovod_fftcomp import get_scheme, mpi, set_num_threads
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.kernels.cpu.bucket import BucketCodec
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.tools import environment

COUNT, SHAPE, ROUNDS = 200, (64, 64), 41
RECIPES = ("topk", "fft", "dct", "qsgd", "terngrad", "natural", "onebit", "efsignsgd", "scalecom")
OUT = Path(__file__).parent / "results" / "small_tensors.json"
Work = Callable[[], object]


def medians(works: dict[str, Work]) -> dict[str, float]:
    """Return the median milliseconds of each; they take turns."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for number in range(ROUNDS + 3):
        for name, work in works.items():
            begin = time.perf_counter()
            work()
            if number >= 3:
                samples[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(found) for name, found in samples.items()}


def codec_works(recipe: str, whole: np.ndarray, parts: list[np.ndarray]) -> dict[str, Work]:
    """Return a step of one tensor and of many: encoding with error feedback and decoding."""
    codec, kernels = get_scheme(recipe).codec, cpu
    table = BucketCodec([codec] * COUNT, [SHAPE] * COUNT)
    message = np.zeros(table.message_nbytes, np.uint8)
    keys = np.arange(COUNT, dtype=np.uint64) if isinstance(codec, DenseCodec) else None
    grads, flat = [part.reshape(-1) for part in parts], whole.reshape(-1)
    carried: dict[str, list] = {"one": [None], "many": [None] * COUNT}

    def one() -> None:
        coeffs = codec.coeffs_of(flat, whole.shape, kernels, carried["one"][0])
        sent = codec.encode_coeffs(coeffs, whole.shape, kernels=kernels)
        carried["one"] = [sent.residual]
        codec.decode_sum([sent.payload])

    def many() -> None:
        message.fill(0)
        carried["many"] = table.encode(grads, carried["many"], message, keys).residuals
        table.sum(message, 1)

    return {"codec_large": one, "codec_small": many}


def measure(recipe: str, whole: np.ndarray, parts: list[np.ndarray]) -> dict[str, float]:
    """Return milliseconds of one tensor and of many, through the reducer and the codec alone."""
    large, small = mpi.Reducer(recipe), mpi.Reducer(recipe)
    named = {f"layer{number}.weight": part for number, part in enumerate(parts)}
    copied = np.empty_like(whole)
    works: dict[str, Work] = {
        "memcpy": lambda: np.copyto(copied, whole),
        "reducer_large": lambda: large.sum({"weight": whole}),
        "reducer_small": lambda: small.sum(named),
    }
    if isinstance(get_scheme(recipe), Allgather):
        works |= codec_works(recipe, whole, parts)
    return medians(works)


def main() -> None:
    """Measure each recipe, print and write the result."""
    facts = environment.describe()  # before the load that this run makes
    set_num_threads(1)
    rows = COUNT * SHAPE[0]
    whole = np.random.default_rng(0).standard_normal((rows, SHAPE[1])).astype(np.float32)
    parts = [part.copy() for part in np.split(whole, COUNT)]
    times = {}
    for recipe in RECIPES:
        found = measure(recipe, whole, parts)
        for what in ("reducer", "codec"):
            if f"{what}_large" in found:
                found[f"{what}_ratio"] = found[f"{what}_small"] / found[f"{what}_large"]
        times[recipe] = {name: round(value, 3) for name, value in found.items()}
        print(recipe, times[recipe], flush=True)
    content = {
        "command": "python benchmarks/small_tensors.py",
        "machine": facts,
        "tensors": COUNT,
        "shape": SHAPE,
        "rounds": ROUNDS,
        "milliseconds": times,
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
