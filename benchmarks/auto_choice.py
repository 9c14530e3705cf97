"""Compare ``auto`` with the best single domain, on gradients of five stages of two trainings.

    python benchmarks/auto_choice.py    # about ten minutes

Also measured: what its trials cost, and what blocks of two dimensions would gain. README.md tells
how to read results/auto_choice.json.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import record_gradients
import scipy.fft
import torch
from torch import nn

import horovod_fftcomp
from horovod_fftcomp import get_scheme
from horovod_fftcomp.codec.quantizers import RangeFloat, decode_range, encode_range, pattern_of
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.engine.buckets import Bucket, is_compressed
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.schemes import Scheme, Tensor
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.auto import (
    CANDIDATES,
    EVEN,
    SHARES,
    TRANSFORMS,
    TRIAL_STEPS,
    TRIED,
    Auto,
)
from horovod_fftcomp.simulation import exchange_once
from horovod_fftcomp.torch_distributed import SimulatedLearners
from horovod_fftcomp.wire.positions import cheapest

RESULTS = Path(__file__).resolve().parent / "results"
WINDOW = 16
STAGES = {"first": 10, "early": 80, "middle": 150, "later": 270, "last": 384}
RATIOS = (20.0, 50.0, 100.0)
TILES = (8, 16)
ALIKE = "auto, bytes alike"
BITS = sorted({bits for _, bits in CANDIDATES})
ORDER = [choice for choices in TRIED for choice in choices]


def read(path: Path) -> list[dict[str, np.ndarray]]:
    """Return the compressed tensors' gradients of each step of a recording."""
    steps: dict[int, dict[str, np.ndarray]] = {}
    with np.load(path) as arrays:
        for key in arrays.files:
            number, name = key.split("/", 1)
            if is_compressed(Tensor(name, arrays[key].shape)):
                steps.setdefault(int(number), {})[name] = arrays[key]
    return [steps[number] for number in sorted(steps)]


def errors_of(steps: list[dict[str, np.ndarray]], ratio: float) -> dict[str, dict[str, float]]:
    """Return the errors of auto, and of every domain alone at its best bits.

    Also of auto's choices if each tensor has the same share of its bytes. Two ranks, which take the
    recorded steps in turns, try for ``TRIAL_STEPS`` steps. Then counts what is left over the energy
    of the gradients, in the mean of the remaining steps.
    """
    ranks = [steps[0::2], steps[1::2]]
    auto, names = Auto(ratio), list(steps[0])
    left, engines = left_by_ranks(ranks, dict.fromkeys(names, auto))
    state, tensors = (
        engines[0].state_dict()["state"],
        {n: Tensor(n, steps[0][n].shape) for n in names},
    )
    codecs = {name: auto.codec_of(tensors[name], state) for name in names}
    found = {
        "with_feedback": {"auto": left},
        "without_feedback": {"auto": left_alone(ranks, codecs)},
    }
    for name in names:
        errors = state["errors"][name][:-2].reshape(len(ORDER), len(SHARES))[:, EVEN]
        codecs[name] = auto.codec(tensors[name].shape, ORDER[int(np.argmin(errors))])
    alike = {name: Allgather(codec) for name, codec in codecs.items()}
    found["with_feedback"][ALIKE] = left_by_ranks(ranks, alike)[0]
    found["without_feedback"][ALIKE] = left_alone(ranks, codecs)
    for transform in TRANSFORMS:
        tried: dict[str, list[float]] = {kind: [] for kind in found}
        for bits in BITS:
            choice = 1 + CANDIDATES.index((transform, bits))
            codecs = {name: auto.codec(steps[0][name].shape, choice) for name in names}
            schemes = {name: Allgather(codec) for name, codec in codecs.items()}
            tried["with_feedback"].append(left_by_ranks(ranks, schemes)[0])
            tried["without_feedback"].append(left_alone(ranks, codecs))
        for kind, errors in tried.items():
            found[kind][repr(transform)] = min(errors)
    return found


def left_by_ranks(ranks: list, schemes: Mapping[str, Scheme]) -> tuple[float, list[Engine]]:
    """Return what error feedback carries on, over the gradients' energy; and the engines."""
    shapes = {name: grad.shape for name, grad in ranks[0][0].items()}
    buckets = [Bucket((Tensor(n, shapes[n]),), always(scheme)) for n, scheme in schemes.items()]
    engines = [Engine(buckets, rank, len(ranks)) for rank in range(len(ranks))]
    shares = []
    for number, grads in enumerate(zip(*ranks, strict=True)):
        flat = [[[grad[name].reshape(-1)] for name in schemes] for grad in grads]
        exchange_once(engines, flat, random.Random(0))
        for engine in engines:
            engine.settle()
        if number >= TRIAL_STEPS:
            left = sum(_energy(engine.residual(name)) for engine in engines for name in schemes)
            shares.append(left / sum(_energy(grad[name]) for grad in grads for name in schemes))
    return float(np.mean(shares)), engines


def left_alone(ranks: list, codecs: Mapping[str, Codec]) -> float:
    """Return what each gradient loses by itself, over its energy."""
    counted = [grads for steps in ranks for grads in steps[TRIAL_STEPS:]]
    left = energy = 0.0
    for grads in counted:
        for name, codec in codecs.items():
            left += _energy(grads[name] - codec.decode(codec.encode(grads[name])))
            energy += _energy(grads[name])
    return left / energy


def _energy(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def best_of_shapes(grads: dict[str, np.ndarray], ratio: float) -> dict[str, float]:
    """Return the error of a step without feedback, each tensor by its best of some domains.

    4 bits; positions and values count, headers do not. "1d": as they are or DCT of 64. "2d": those,
    and DCTs of square tiles of the tensor as a matrix, and of its columns.
    """
    left = dict.fromkeys(("1d", "2d"), 0.0)
    total = 0.0
    for grad in grads.values():
        matrix = grad.reshape(len(grad), -1)
        columns = np.ascontiguousarray(matrix.T)
        one = [matrix, _dct(matrix)]
        two = [*one, _dct(columns), *(_tiles(matrix, size) for size in TILES)]
        for name, domains in (("1d", one), ("2d", two)):
            left[name] += min(_left_of(coeffs, 32 * grad.size / ratio) for coeffs in domains)
        total += float(np.square(grad, dtype=np.float64).sum())
    return {name: value / total for name, value in left.items()}


def _dct(matrix: np.ndarray) -> np.ndarray:
    return cpu.forward_blocks(matrix.reshape(-1), 64, None, 0, True).array * np.float32(8)


def _tiles(matrix: np.ndarray, size: int) -> np.ndarray:
    rows, columns = (-(-n // size) for n in matrix.shape)
    padded = np.zeros((rows * size, columns * size), np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    tiles = padded.reshape(rows, size, columns, size).transpose(0, 2, 1, 3)
    return scipy.fft.dctn(tiles, axes=(2, 3), norm="ortho")


def _left_of(coeffs: np.ndarray, bits: float) -> float:
    """Return the energy that Top-k with values of 4 bits leaves within so many bits."""
    flat = coeffs.reshape(-1).astype(np.float32)
    low, high = 1, flat.size
    while low < high:
        k = (low + high + 1) // 2
        fits = 8 * cheapest(flat.size, k).nbytes + 4 * k <= bits
        low, high = (k, high) if fits else (low, k - 1)
    chosen = np.argsort(-np.abs(flat), kind="stable")[:low]
    quantizer, sizes = RangeFloat(4), np.abs(flat[chosen])
    grid = quantizer.grid(pattern_of(sizes.min()), pattern_of(sizes.max()), False)
    coding = quantizer.coding(float(sizes.max()), grid)
    sent = np.zeros_like(flat)
    sent[chosen] = decode_range(encode_range(flat[chosen], coding), coding)
    return float(np.square(flat - sent, dtype=np.float64).sum())


def cost_of_trials(make) -> dict[str, float]:
    """Return what trials take of a step at the default interval; one learner without network."""
    torch.manual_seed(0)
    model, optimizer, batches = make()
    every = get_scheme("auto").every
    learners = SimulatedLearners(model, 1, "auto", every=2 * TRIAL_STEPS)
    times: dict[bool, list[float]] = {False: [], True: []}
    for step in range(41):
        begin = time.perf_counter()
        optimizer.zero_grad()
        inputs, targets = next(batches)
        with learners.turn_of(0):
            nn.functional.cross_entropy(model(inputs), targets).backward()
        learners.reduce()
        optimizer.step()
        if step:  # the first compiles
            trying = step % (2 * TRIAL_STEPS) < TRIAL_STEPS
            times[trying].append(time.perf_counter() - begin)
    usual, trying_s = (float(np.median(taken)) for taken in (times[False], times[True]))
    return {
        "usual_step_s": round(usual, 4),
        "trying_step_s": round(trying_s, 4),
        "every": every,
        "share_of_a_step": round(TRIAL_STEPS * (trying_s - usual) / every / usual, 5),
    }


def summary(rows: list[dict], over: str) -> dict[str, dict[str, float]]:
    """Return the worst and the mean of a ratio, without and with error feedback."""
    ratios = {
        kind: [row[kind][over] for row in rows] for kind in ("without_feedback", "with_feedback")
    }
    return {
        kind: {
            "worst": max(values),
            "geometric_mean": round(float(np.exp(np.mean(np.log(values)))), 4),
        }
        for kind, values in ratios.items()
    }


def main() -> None:
    """Record, compare, write."""
    torch.set_num_threads(1)
    record_gradients.WINDOWS, record_gradients.WINDOW = STAGES, WINDOW
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for make in record_gradients.MODELS:
            record_gradients.record(make, Path(folder))
            for stage in STAGES:
                steps = read(Path(folder) / f"{make.__name__}-{stage}.npz")
                for ratio in RATIOS:
                    found = best_of_shapes(steps[0], ratio)
                    row = {
                        "model": make.__name__,
                        "stage": stage,
                        "ratio": ratio,
                        "gain_of_two_dimensions": round(1 - found["2d"] / found["1d"], 4),
                    }
                    for kind, errors in errors_of(steps, ratio).items():
                        best = min(e for name, e in errors.items() if name not in ("auto", ALIKE))
                        row[kind] = {
                            "auto_over_best_single": round(errors["auto"] / best, 4),
                            "auto_over_alike": round(errors["auto"] / errors[ALIKE], 4),
                            **{name: round(error, 5) for name, error in errors.items()},
                        }
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    result = {
        "command": " ".join(["python benchmarks/auto_choice.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "versions": {
            "horovod_fftcomp": horovod_fftcomp.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "scikit-learn")},
        },
        **{over: summary(rows, over) for over in ("auto_over_best_single", "auto_over_alike")},
        "largest_gain_of_two_dimensions": max(row["gain_of_two_dimensions"] for row in rows),
        "cost_of_trials": {m.__name__: cost_of_trials(m) for m in record_gradients.MODELS},
        "rows": rows,
    }
    path = RESULTS / "auto_choice.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if not isinstance(value, list)}))


if __name__ == "__main__":
    main()
