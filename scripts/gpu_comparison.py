"""Steps of two ranks on a device beside the same steps on the CPU: messages, sums and state."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_fftcomp import RECIPES
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.kernels.cuda import on_host
from horovod_fftcomp.schemes import Round, Tensor
from horovod_fftcomp.simulation import InProcessWorld
from tests.contracts import HOST_ONLY

# Options without which a recipe sends nothing, or all, of what is drawn here.
OPTIONS = {"hard_threshold": {"threshold": 2.5}, "strom": {"threshold": 2.5}}
RANKS = 2
SHIFT = 977  # each step and rank takes its gradients from another place of the same numbers


def recipes(on_gpu: bool = True) -> list[tuple[str, dict[str, Any]]]:
    """Return all recipes with their options, ``on_gpu``: those of which a GPU computes a step."""
    names = [name for name in RECIPES if name != "none" and not (on_gpu and name in HOST_ONLY)]
    return [(name, OPTIONS.get(name, {})) for name in names]


class Comparison:
    """Differences between arrays of a device and of the CPU.

    ``tolerance``: the norm of a difference over that of the CPU's array; 0: equal to the byte.
    """

    def __init__(self, tolerance: float) -> None:
        self.tolerance, self.worst = tolerance, 0.0
        self.differences: list[str] = []

    def note(self, text: str) -> None:
        """Keep one of the first differences."""
        if len(self.differences) < 3:
            self.differences.append(text[:200])

    def compare(self, what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Note whether an array of the device differs from the CPU's."""
        if ours.nbytes != theirs.nbytes:
            self.note(f"{what}: {ours.nbytes} bytes, the CPU's {theirs.nbytes}")
        elif self.tolerance:
            relative = relative_difference(ours.view(np.float32), theirs.view(np.float32))
            self.worst = max(self.worst, relative)
            if not relative <= self.tolerance:
                self.note(f"{what}: relative difference {relative:.2e} > {self.tolerance:.0e}")
        else:
            self._compare_bytes(what, ours.view(np.uint8), theirs.view(np.uint8))

    def _compare_bytes(self, what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        wrong = ours != theirs
        if wrong.any():
            first = int(wrong.argmax())
            self.note(
                f"{what}: {int(wrong.sum())} of {wrong.size} bytes differ, the first at {first}: "
                f"{ours[first]}, the CPU's {theirs[first]}"
            )


def relative_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the norm of the difference over the norm of ``theirs``; nan if one is not finite."""
    wanted = theirs.astype(np.float64)
    difference, norm = np.linalg.norm(ours - wanted), np.linalg.norm(wanted)
    return float(difference / norm) if norm else float(difference)


@functools.lru_cache(maxsize=1)
def noise(numel: int) -> np.ndarray:
    """Return normal numbers of several magnitudes, the same in every process."""
    numbers = np.random.default_rng(numel).standard_normal(numel, np.float32)
    return numbers * np.exp2(np.arange(numel) % 5).astype(np.float32)


def compare_steps(
    device: Any,
    recipe: str,
    options: dict[str, Any],
    shapes: Sequence[Sequence[int]],
    steps: int = 3,
    tolerance: float = 0.0,
    nan_step: int = -1,
    exponent: int = 0,
) -> dict[str, Any]:
    """Return whether steps of two ranks on ``device`` are the CPU's, and what differs.

    ``nan_step``: the step in which a gradient of rank 1 has a NaN. ``exponent``: gradients are
    multiplied by 2**exponent.
    """
    tensors = tuple(Tensor(f"t{i}", tuple(shape)) for i, shape in enumerate(shapes))
    bucket = Bucket(tensors, make_policy(recipe, **{"warmup_steps": 0, **options}))
    cpu, gpu = (
        [Engine([bucket], rank, RANKS, on) for rank in range(RANKS)] for on in (None, device)
    )
    found, seconds, on_device = Comparison(tolerance), [0.0, 0.0], set()
    for step in range(steps):
        grads = gradients(tensors, step, steps, exponent)
        if step == nan_step:
            grads[1][0][5] = np.nan
        began = time.perf_counter()
        theirs = exchanged(cpu, grads, None)
        middle = time.perf_counter()
        ours = exchanged(gpu, grads, device)
        seconds[0] += middle - began
        seconds[1] += time.perf_counter() - middle
        on_device.add(gpu[0].computes_on_device(0))
        compare_exchanges(found, step, ours, theirs, step == nan_step)
        for engine in (*cpu, *gpu):
            engine.settle()
    compare_states(found, gpu, cpu, tensors)
    return {
        "ok": not found.differences,
        "differences": found.differences,
        "relative": float(f"{found.worst:.3g}"),
        "on_device": sorted(on_device),
        "cpu_s": round(seconds[0], 3),
        "gpu_s": round(seconds[1], 3),
    }


def gradients(
    tensors: Sequence[Tensor], step: int, steps: int, exponent: int
) -> list[list[np.ndarray]]:
    """Return the flat gradients of each rank."""
    sizes = [math.prod(tensor.shape) for tensor in tensors]
    whole = noise(sum(sizes) + SHIFT * steps * RANKS)
    found = []
    for rank in range(RANKS):
        begin = SHIFT * (step * RANKS + rank)
        own = whole[begin : begin + sum(sizes)] * np.float32(2.0**exponent)
        found.append(np.split(own, np.cumsum(sizes)[:-1]))
    return found


def exchanged(
    engines: Sequence[Engine], grads: Sequence[Sequence[np.ndarray]], device: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run a step; return all messages, and the sums of rank 0. ``device``: None: of the CPU."""
    world, messages = InProcessWorld(len(engines)), []
    here = grads if device is None else [[placed(device, g) for g in own] for own in grads]
    made = [engine.resume(0, own) for engine, own in zip(engines, here, strict=True)]
    while isinstance(made[0], Round):
        for rank, round_ in enumerate(made):
            data = np.array(on_host(round_.data, device))
            messages.append(data)
            world.submit(rank, "round", round_._replace(data=data))
        outputs = [
            output if type(round_.data) is np.ndarray else device.upload(output)
            for round_, output in zip(made, world.complete("round"), strict=True)
        ]
        made = [engine.resume(0, output) for engine, output in zip(engines, outputs, strict=True)]
    return messages, [np.array(on_host(total, device)) for total in engines[0].sums(0)]


def placed(device: Any, grad: np.ndarray) -> Any:
    """Return a gradient on the device as DDP has it: at a multiple of four bytes alone."""
    return device.upload(np.concatenate([np.zeros(1, np.float32), grad]))[1:]


def compare_exchanges(
    found: Comparison,
    step: int,
    ours: tuple[list[np.ndarray], list[np.ndarray]],
    theirs: tuple[list[np.ndarray], list[np.ndarray]],
    has_nan: bool,
) -> None:
    """Compare messages and sums of a step; of one with NaN only where the sums are finite."""
    if not found.tolerance and not has_nan:
        for number, pair in enumerate(zip(ours[0], theirs[0], strict=True)):
            found.compare(f"step {step}, message {number}", *pair)
    for number, (own, other) in enumerate(zip(ours[1], theirs[1], strict=True)):
        if not has_nan:
            found.compare(f"step {step}, sum of tensor {number}", own, other)
        elif np.isfinite(own).all() != np.isfinite(other).all():
            found.note(f"step {step}, sum of tensor {number}: NaN on one of them alone")


def compare_states(
    found: Comparison, gpu: Sequence[Engine], cpu: Sequence[Engine], tensors: Sequence[Tensor]
) -> None:
    """Compare what the ranks keep, and how many steps they have skipped."""
    for engine in gpu:
        engine.read_device()
    for rank, pair in enumerate(zip(gpu, cpu, strict=True)):
        one, other = (engine.state_dict()["state"] for engine in pair)
        for kind in sorted({*one, *other}):
            for tensor in tensors:
                kept = [state.get(kind, {}).get(tensor.name) for state in (one, other)]
                what = f"rank {rank}, {kind} of {tensor.name}"
                if kept[0] is None or kept[1] is None:  # an array that is not there is zeros
                    if any(array is not None and array.any() for array in kept):
                        found.note(f"{what}: on one of them alone")
                elif kept[1].dtype.kind in "fc" or not found.tolerance:
                    found.compare(what, *kept)
    skipped = [engines[0].costs.skipped_steps for engines in (gpu, cpu)]
    if skipped[0] != skipped[1]:
        found.note(f"{skipped[0]} steps skipped, on the CPU {skipped[1]}")
