"""Shared by the examples: train a task once with each recipe, and compare.

A task is trained by the ranks of a Horovod job or, with --simulate N, by N learners in one process.
Both give the same weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from digits import BUSY, STYLES, Monitor
from matplotlib.figure import Figure
from rich.text import Text

from horovod_fftcomp import RECIPES
from horovod_fftcomp.cli.arguments import COMPRESSIONS, RecipeChoice, recipe_choices
from horovod_fftcomp.cli.console import Table
from horovod_fftcomp.torch import Compression, SimulatedLearners

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # waiting ranks leave the core to others

# The default, 100 dense steps first, is for trainings of thousands of steps.
SHORT = {"warmup_steps": 0}
CAPTION = f"s: seconds of the whole training, with evaluation and compiling. {BUSY}"

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Task(NamedTuple):
    """A training task: ``batches(rank, size)`` yields a rank's share of the data, endlessly.

    ``quality`` evaluates the present model; ``measure``: the name of that figure.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Callable[[int, int], Batches]
    quality: Callable[[], float]
    measure: str


class Run(NamedTuple):
    """Result of one training.

    ``steps``, ``qualities``, ``residual_norms``: of each evaluation; ``losses``: of each step, the
    mean over the learners; ``sent_nbytes``: mean bytes of one learner in a step.
    """

    recipe: str
    learners: int
    sent_nbytes: float
    ratio: float
    total_error: float
    steps: list[int]
    qualities: list[float]
    residual_norms: list[float]
    losses: list[float]
    seconds: float


def warm_up_of(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule: a linear rise in the first twentieth, then down to a tenth by a cosine."""
    rise = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.55 + 0.45 * float(np.cos(np.pi * (step - rise) / max(1, steps - rise)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_simulated(
    task: Task,
    choice: RecipeChoice,
    n_learners: int,
    n_steps: int,
    evaluations: int = 10,
    report: Callable[[int, float], None] = lambda step, loss: None,
    steer: Callable[[int, float], float | None] = lambda step, quality: None,
    **settings: object,
) -> Run:
    """Train ``task`` with learners in this process; ``report`` is called after every step.

    ``steer`` is called after every evaluation and may return a new density. ``settings``: those of
    ``SimulatedLearners``.
    """
    options = SHORT | choice.options | settings
    learners = SimulatedLearners(task.model, n_learners, choice.name, **options)
    streams = [task.batches(rank, n_learners) for rank in range(n_learners)]
    schedule = warm_up_of(task.optimizer, n_steps)
    record = _Record(task, n_steps, evaluations)
    for step in range(n_steps):
        losses = []
        for rank, stream in enumerate(streams):
            inputs, targets = next(stream)
            with learners.turn_of(rank):
                loss = torch.nn.functional.cross_entropy(task.model(inputs), targets)
                loss.backward()
                losses.append(loss.item())
        learners.reduce()
        task.optimizer.step()
        schedule.step()
        report(step + 1, losses[0])
        if record.add(float(np.mean(losses))):
            with learners.turn_of(0):  # a job's first rank evaluates too, with its own buffers
                record.evaluate(float(np.mean(learners.residual_norms())))
            density = steer(step + 1, record.qualities[-1])
            if density is not None:
                learners.set_density(density)
    costs = learners.costs[0]
    sent = costs.sent_nbytes + learners.dense_nbytes
    error = float(np.mean([costs.total_error for costs in learners.costs]))
    return record.run(choice.label, n_learners, sent, error)


def train_distributed(
    task: Task,
    choice: RecipeChoice,
    n_steps: int,
    evaluations: int = 10,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Run:
    """Train ``task`` in a Horovod job; returns the same on every rank."""
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    compression = getattr(Compression, choice.name)(task.model, **SHORT | choice.options)
    optimizer = hvd.DistributedOptimizer(
        task.optimizer, named_parameters=task.model.named_parameters(), compression=compression
    )
    stream = task.batches(hvd.rank(), hvd.size())
    schedule = warm_up_of(optimizer, n_steps)
    record = _Record(task, n_steps, evaluations)
    for step in range(n_steps):
        inputs, targets = next(stream)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(task.model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        report(step + 1, loss.item())
        if record.add(loss.item()):
            record.evaluate(_mean(compression.residual_norm()))
    stats = compression.stats()
    record.losses = hvd.allreduce(torch.tensor(record.losses), name="losses").tolist()
    error = _mean(stats["total_error"])
    return record.run(choice.label, hvd.size(), stats["sent_nbytes"], error)


def _mean(value: float) -> float:
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), name="mean").item()


class _Record:
    """Losses and evaluations of a training."""

    def __init__(self, task: Task, n_steps: int, evaluations: int) -> None:
        self._task, self._began = task, time.perf_counter()
        self._at = {n_steps * (i + 1) // evaluations for i in range(evaluations)}
        self.steps: list[int] = []
        self.qualities: list[float] = []
        self.norms: list[float] = []
        self.losses: list[float] = []

    def add(self, loss: float) -> bool:
        """Record a step; return whether to evaluate after it."""
        self.losses.append(loss)
        return len(self.losses) in self._at

    def evaluate(self, residual_norm: float) -> None:
        """Record the quality of the present model."""
        self.steps.append(len(self.losses))
        self.qualities.append(self._task.quality())
        self.norms.append(residual_norm)

    def run(self, label: str, learners: int, sent_nbytes: float, total_error: float) -> Run:
        """Return the result; ``sent_nbytes`` and ``total_error`` are those of the whole run."""
        dense = 4 * sum(p.numel() for p in self._task.model.parameters() if p.requires_grad)
        sent = sent_nbytes / len(self.losses)
        return Run(
            label, learners, sent, dense / sent, total_error, self.steps, self.qualities,
            self.norms, self.losses, time.perf_counter() - self._began,
        )  # fmt: skip


def make_table(runs: list[Run], measure: str) -> Table:
    """Return a row for each run."""
    names = (measure, "training loss", "kB/step sent", "ratio", "residual norm", "s")
    table = Table("compression", names)
    for run in runs:
        last = float(np.mean(run.losses[-max(1, len(run.losses) // 20) :]))
        table.add_row(
            run.recipe, f"{run.qualities[-1]:.4f}", f"{last:.4f}", f"{run.sent_nbytes / 1e3:.1f}",
            f"{run.ratio:.1f}", f"{run.residual_norms[-1]:.3g}", f"{run.seconds:.0f}",
        )  # fmt: skip
    return table


def save(runs: list[Run], measure: str, path: Path) -> None:
    """Write numbers and a plot of quality against bytes; ``path``: without suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = {"measure": measure, "runs": [run._asdict() for run in runs]}
    path.with_suffix(".json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).subplots()
    for run, style in zip(runs, itertools.cycle(STYLES), strict=False):
        sent_mb = run.sent_nbytes * np.array(run.steps) / 1e6
        axes.semilogx(sent_mb, run.qualities, f"{style[-1]}-", color=style[:7], label=run.recipe)
    axes.set(xlabel="sent by each learner (MB)", ylabel=measure)
    axes.legend(title="recipe")
    axes.grid(alpha=0.3)
    figure.savefig(path.with_suffix(".png"), dpi=150)


def parse_args(
    description: str, argv: list[str] | None = None, **defaults: object
) -> argparse.Namespace:
    """Return the flags; ``defaults``: of steps, batch_size, lr and compression."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    # fmt: off
    add("--compression", type=recipe_choices, metavar=COMPRESSIONS,
        help=f"as topk(density=0.01),fft; of: {', '.join(RECIPES)} (default: %(default)s)")
    add("--simulate", type=int, metavar="N", help="simulate N learners instead of ranks")
    add("--steps", type=int, help="optimizer steps (default: %(default)s)")
    add("--batch-size", type=int, help="samples per learner (default: %(default)s)")
    add("--lr", type=float, help="highest learning rate (default: %(default)s)")
    add("--skew", type=float, default=0.0,
        help="share of a learner's data that is of its own kind, 0 to 1 (default: %(default)s)")
    add("--seed", type=int, default=0, help="weights and order of the data (default: %(default)s)")
    add("--out", type=Path, default=Path("out"), help="output folder (default: %(default)s)")
    # fmt: on
    parser.set_defaults(**defaults)
    args = parser.parse_args(argv)
    if min(args.steps, args.batch_size, args.lr, args.simulate or 1) <= 0:
        parser.error("--steps, --batch-size, --lr and --simulate must be positive")
    if not 0 <= args.skew <= 1:
        parser.error("--skew must lie in [0, 1]")
    if isinstance(args.compression, str):
        args.compression = recipe_choices(args.compression)
    return args


def main(
    name: str, make_task: Callable[[argparse.Namespace], Task], args: argparse.Namespace
) -> None:
    """Train once for each recipe; the first rank reports."""
    if not args.simulate:
        hvd.init()
    alone = args.simulate is not None
    is_first = alone or hvd.rank() == 0
    torch.set_num_threads(1)  # ranks share the cores
    monitor = Monitor(len(args.compression) * args.steps, quiet=not is_first)
    if not alone and hvd.size() == 1:
        monitor.console.print(
            "One process: nothing is exchanged; horovodrun -np 2, or --simulate 2"
        )
    runs = []
    with monitor.bar:
        for choice in args.compression:

            def report(step: int, loss: float, label: str = choice.label) -> None:
                monitor.advance(f"{label}  step {step}/{args.steps}  loss {loss:.3f}", 1)

            task = make_task(args)
            if alone:
                run = train_simulated(task, choice, args.simulate, args.steps, report=report)
            else:
                run = train_distributed(task, choice, args.steps, report=report)
            runs.append(run)
    monitor.console.print(make_table(runs, task.measure))
    monitor.console.print(Text(CAPTION))
    if is_first:
        path = args.out.resolve() / name
        save(runs, task.measure, path)
        monitor.tell_of(f"{path}.png and .json")
