"""Train a GPT of 25 M parameters by several recipes, 8 simulated learners on one GPU.

Prints a line of JSON after each recipe; benchmarks/language_model.py has the model and the text.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from gpu_processes import say
from language_model_device import LearnersOnDevice
from language_model_training import (
    AFTER,
    LIBRARY,
    SIZES,
    Run,
    Size,
    Text,
    Training,
    read_text,
)

from horovod_fftcomp.kernels import cuda

# Recipe and optimizer, in this order; a line more compares another one of ``OPTIMIZERS``.
RUNS = (
    ("none", "adamw"),
    ("fft", "adamw"),
    ("topk(density=0.01)", "adamw"),
    ("fft after 50 dense steps, every 10th step by qsgd", "adamw-ours"),
    ("bf16", "adamw"),
    ("dct(density=0.15)", "adamw"),
    ("powersgd(rank=4)", "adamw"),
    ("auto(ratio=100)", "adamw"),
)
FEW = (("none", "adamw"), ("topk(density=0.01)", "adamw"))  # without a GPU
RATE = 3e-3
MOST_STEPS, TIMED_STEPS = 600, 3
MARGIN_S = 4.0  # to write the last lines
VALIDATED = 24  # batches


class Job(NamedTuple):
    """What all runs share: the device of kernels, the model's size, and the number of learners."""

    device: Any
    size: str
    learners: int


class Trial(Training):
    """A run of the benchmark whose gradients stay on the GPU."""

    def __init__(self, recipe: str, optimizer: str, steps: int, job: Job) -> None:
        self.kernels = job.device
        if steps < 100:  # dense steps are a quarter of them at most
            recipe = AFTER.sub(f" after {max(1, steps // 4)} dense steps", recipe)
        run = Run(job.size, job.learners, steps, recipe, optimizer, RATE, 0)
        super().__init__(run, job.device.place.type)

    def _learners(self, name: str, options: dict[str, Any]) -> LearnersOnDevice:
        return LearnersOnDevice(self.model, self.run.learners, name, self.kernels, **options)

    @torch.no_grad()
    def loss(self, source: torch.Tensor) -> float:
        """Return the mean loss of the same batches each time."""
        generator = torch.Generator().manual_seed(7)
        batches = (self._loss(source, generator).item() for _ in range(VALIDATED))
        return sum(batches) / VALIDATED


def seconds_of_step(trial: Trial, text: Text) -> float:
    """Return the median time of a few steps; the first ones, which compile, do not count."""
    found = []
    for _ in range(2 * TIMED_STEPS):
        began = time.perf_counter()
        trial.advance(text)
        wait(trial)
        found.append(time.perf_counter() - began)
    return statistics.median(found[TIMED_STEPS:])


def wait(trial: Trial) -> None:
    """Wait for all that the GPU has been given to do."""
    if trial.device == "cuda":
        torch.cuda.synchronize()


def train(trial: Trial, text: Text, until: float) -> dict[str, Any]:
    """Train until the last step, or until the time is over; return what is told of a run."""
    run, first, began = trial.run, trial.loss(text.train), time.perf_counter()
    while trial.step < run.steps and time.monotonic() < until:
        trial.advance(text)
        if trial.step % 10 == 0:
            wait(trial)
    wait(trial)
    seconds = time.perf_counter() - began
    last, valid = trial.loss(text.train), trial.loss(text.valid)
    parameters = list(trial.model.parameters())
    sent = statistics.fmean(costs.sent_nbytes for costs in trial.learners.costs)
    whole = 4 * trial.step * sum(parameter.numel() for parameter in parameters)
    return {
        "recipe": run.recipe,
        "optimizer": run.optimizer,
        "ok": last < first,
        "steps": trial.step,
        "of_steps": run.steps,
        "loss_at_start": round(first, 4),
        "loss_at_end": round(last, 4),
        "validation_loss": round(valid, 4),
        "step_ms": round(1e3 * seconds / max(trial.step, 1), 2),
        "ratio": round(whole / (sent + trial.learners.dense_nbytes), 2),
        "finite": all(bool(torch.isfinite(parameter).all()) for parameter in parameters),
    }


def number_of_steps(seconds: list[float], left_s: float, n_runs: int) -> int:
    """Return how many steps all runs can take; ``seconds``: of a step of some of them.

    Runs that were not timed count as the slowest.
    """
    total = sum(seconds) + (n_runs - len(seconds)) * max(seconds)
    return max(2, min(MOST_STEPS, int(left_s / total)))


def gpu_job() -> Job:
    """Return the job on a GPU."""
    from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice

    torch.set_float32_matmul_precision("high")
    return Job(TorchDevice(torch.device("cuda", 0)), "25M", 8)


def emulated_job() -> Job:
    """Return a small job without a GPU."""
    from tests.gpu.torch_emulator import TorchEmulator

    SIZES["tiny"] = Size(48, 1, 4)
    return Job(TorchEmulator(), "tiny", 2)


def main() -> None:
    """Time the recipes, then train by each for the same number of steps."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=200, help="seconds in all (default: 200)")
    parser.add_argument("--emulated", action="store_true", help="no GPU: a tiny model, few steps")
    args = parser.parse_args()
    until = began + args.budget - MARGIN_S
    job, runs = (emulated_job(), FEW) if args.emulated else (gpu_job(), RUNS)
    job.device.functions(cuda.source(), cuda.NAMES)
    text = read_text(LIBRARY, any_text=True)
    # auto's first steps are trials; it comes last, and may be cut.
    timed = [run for run in runs if not run[0].startswith("auto")]
    seconds = []
    for run in timed:
        seconds.append(seconds_of_step(Trial(*run, 2 * TIMED_STEPS, job), text))
        torch.cuda.empty_cache()
    left_s = until - time.monotonic()
    steps = number_of_steps(seconds, 0.95 * left_s, len(runs))
    steps = min(steps, SIZES[job.size].steps) if args.emulated else steps
    said = {recipe: round(1e3 * s, 2) for (recipe, _), s in zip(timed, seconds, strict=True)}
    say({"timed_ms": said, "steps": steps, "left_s": round(left_s), "ok": True})
    for run in runs:
        if time.monotonic() < until:
            say(train(Trial(*run, steps, job), text, until))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
