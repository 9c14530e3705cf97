"""Train three tasks with every recipe by simulated learners: quality against bytes.

    python benchmarks/convergence.py              # the committed table: nine hours of one core
    python benchmarks/convergence.py --form short # minutes
    python benchmarks/convergence.py --form long  # a night

Writes results/convergence.json after every training, and goes on where a cut run has ended. Then
results/convergence.md and two plots; README.md tells how to read them.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import horovod_fftcomp
from horovod_fftcomp import Recover, get_scheme, wire
from horovod_fftcomp.cli.arguments import recipe_choices
from horovod_fftcomp.engine.buckets import is_compressed, make_buckets
from horovod_fftcomp.engine.policy import Scheduled, make_policy
from horovod_fftcomp.monitor.density_recovery import Recovery
from horovod_fftcomp.recipes import RECIPES as RECIPES_OF_PACKAGE
from horovod_fftcomp.schedules import Exponential
from horovod_fftcomp.schemes import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import comparison
import torch_charlm
import torch_resnet_digits
from torch_digits import load_data

RESULTS = Path(__file__).resolve().parent / "results"
LEARNERS = 8
OLD = "†"  # beside rows that are to be trained anew
RANGE_FLOATS = 3  # the version of the wire format that has those of today
RECIPES = (
    "none",
    "fft(density=0.15)",
    "dct(density=0.15)",
    "topk(density=0.01)",
    "topk(density=0.001)",
    "scalecom(density=0.008)",
    "scalecom(density=0.0017)",
    "random_block(density=0.01)",
    "hard_threshold(density=0.001)",
    "demo",
    "auto(ratio=100)",
)
# Beyond the table: what shows why, or what recovers.
WARM = " after a dense warm-up"  # of a tenth of the steps
LONGER = " in twice the steps"  # of the first seed alone, but in the long form
ALONE = " without other momentum"  # than the recipe's own
FIRST = " with momentum first"  # momentum=0.9, and the optimizer's own off
FALLING = " of falling density"  # from 4 times to a tenth, by an exponential; about as many bytes
SHORT = " with Adam's second beta 0.99"  # as FIRST has it with Adam, so its baseline
SLOW = " at a hundredth of the rate"  # what signs need: each weight takes whole steps
AS_MANY_BYTES = "topk(bits=32) with the bytes of hard_threshold"
# What the papers compare with. The language model, of which it trains the first seed, has AdamW.
BASELINES = (
    "dither(ratio=30)",
    "bf16",
    "qsgd",
    "terngrad",
    "natural",
    "dorefa",
    "onebit",
    "efsignsgd",
    "powersgd(rank=4)",
    "arctopk",
    "gtopk(density=0.01)",
    "strom(threshold=0.01)",
    "adacomp",
    "wangni(density=0.1)",
)
BASELINES_OF = {
    "resnet": (
        *BASELINES,
        "random_k(density=0.01)",
        "sparcml(density=0.01)",
        "dgc(density=0.01)" + ALONE,
        "sketchsgd(density=0.01)" + ALONE,
        "signsgd" + ALONE + SLOW,
        "signum" + ALONE + SLOW,
    ),
    "charlm": BASELINES,
    "logistic": (),
}
# What loses least at a ratio of 100 under Adam, and of one seed what each part of it gains.
BEST = "dct(density=0.0125, bits=3)" + FIRST + FALLING
BEST_SHARDED = (
    "dct(density=0.01, bits=3, exchange=sharded, second_density=0.1, second_bits=3)"
    + FIRST
    + FALLING
)
PARTS_OF_BEST = (
    "topk(density=1.0, bits=32)" + FIRST,  # the same optimizer without compression
    "topk(density=0.01)" + FALLING,
    "topk(density=0.01)" + FIRST,
    "topk(density=0.01)" + FIRST + FALLING,
    "topk(density=0.01)" + FIRST + WARM,
    "dct(density=0.01)" + FIRST + FALLING,
    "auto(ratio=100)" + FIRST,
    "dct(density=0.0125, bits=3, exchange=sharded)" + FIRST + FALLING,
)
# Each recipe gathers, as a few ranks do, unless it says otherwise; these do both.
SHARDED = (
    *("fft", "fft(exchange=sharded)", "dct", "dct(exchange=sharded)"),
    *("topk", "topk(exchange=sharded)", "topk(density=0.01, exchange=sharded)"),
    *("fft(density=0.15, exchange=sharded)", "dct(density=0.15, exchange=sharded)"),
    *("fft(density=0.2, exchange=sharded)", "dct(density=0.2, exchange=sharded)"),
)
# Gathered and sharded exchanges differ by less than seeds do, so these have more of them.
PAIRED = ("fft", "dct", "topk")
PAIRED_KINDS, PAIRED_SEEDS = ("resnet", "charlm"), 6
MORE = {
    "resnet": (
        *SHARDED,
        "topk(density=0.01)" + WARM,
        "topk(density=0.001)" + WARM,
        "topk(density=0.003)",
        BEST,
        BEST_SHARDED,
        "scalecom(density=0.008)" + WARM,
        "scalecom(density=0.0017)" + WARM,
        "scalecom(density=0.008, beta=1.0)",
        "random_block(density=0.01)" + WARM,
        "random_block(density=0.01, beta=1.0)",
        AS_MANY_BYTES,
    ),
    "charlm": (
        *SHARDED,
        "none" + LONGER,
        "none" + SHORT,
        "topk(exchange=sharded, second_density=0.3, second_bits=6)",
        "topk(density=0.01)" + LONGER,
        *PARTS_OF_BEST,
        BEST,
        BEST_SHARDED,
        "topk(density=0.1)",
        "scalecom(density=0.008)" + LONGER,
        "scalecom(density=0.008, beta=1.0)",
        "scalecom(density=0.1, beta=0.5)",
        "scalecom(density=0.1, beta=0.5)" + LONGER,
        "random_block(density=0.01, beta=1.0)",
        "random_block(density=0.1)",
        "random_block(density=0.1, beta=1.0)",
        "random_block(density=0.5)" + LONGER,
        "hard_threshold(density=0.01)" + LONGER,
        "auto(ratio=100)" + LONGER,
        "demo" + LONGER,
    ),
    "logistic": (
        "none" + LONGER,
        "scalecom(density=0.008, beta=1.0)",
        "random_block(density=0.01, beta=1.0)",
        "random_block(density=0.1)",
        "random_block(density=0.1, beta=1.0)",
        AS_MANY_BYTES,
    ),
}
# Of the larger language model, of which one seed is trained.
LARGE = (
    "fft(exchange=sharded)",
    "topk(exchange=sharded)",
    "topk(density=0.01, exchange=sharded)",
    "auto(ratio=100)",
    BEST_SHARDED,
)
PLOTTED = dict.fromkeys((*RECIPES, *SHARDED, *BASELINES_OF["resnet"]))
RESIDUALS = (*RECIPES[1:4], "scalecom(density=0.008)", "random_block(density=0.01)",
             "hard_threshold(density=0.001)", "demo", "auto(ratio=100)")  # fmt: skip
COLOURS = {"gathered or reduced": "C0", "sharded": "C1"}
THETA_99 = "fft(density=0.01, error_feedback=False)"
# Where a run fails at it, it needs steps in which to recover.
FAILING = {
    "resnet": THETA_99,
    "charlm": THETA_99 + LONGER,
    "logistic": THETA_99 + LONGER,
}
# In the results by the drop ratio, 1 - density; in the figure by the density.
RECOVERIES = {
    "never lowered": "density 0.01",
    "lowered by hand": "raised by hand in mid-run",
    "lowered by recover": "raised by recover",
}
FORMS = {"short": (1, 0.25), "table": (3, 1.0), "long": (5, 5.0)}  # seeds, share of the steps


class Kind(NamedTuple):
    """A task, how it is trained, and when ``recover`` finds that it stands still."""

    make_task: Callable[[argparse.Namespace], comparison.Task]
    steps: int
    lr: float
    recover: Recover

    @property
    def higher_is_better(self) -> bool:
        """Tell whether more of its quality is better."""
        return self.recover.better == "higher"


def logistic(args: argparse.Namespace) -> comparison.Task:
    """Return multinomial logistic regression on products of pixels: convex, 20,810 weights."""
    torch.manual_seed(args.seed)
    (images, labels), _ = (data.tensors for data in load_data())
    flat = images.reshape(len(images), 64)
    first, second = torch.triu_indices(64, 64)
    features = flat[:, first] * flat[:, second]
    model = torch.nn.Linear(features.shape[1], 10)
    torch.nn.init.zeros_(model.weight)

    def batches(rank: int, size: int) -> comparison.Batches:
        generator = torch.Generator().manual_seed(1000 * args.seed + rank)
        own = torch.arange(rank, len(labels), size)
        while True:
            chosen = own[torch.randint(len(own), (args.batch_size,), generator=generator)]
            yield features[chosen], labels[chosen]

    def quality() -> float:
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(model(features), labels).item()

    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    return comparison.Task(model, optimizer, batches, quality, "training loss")


def language(args: argparse.Namespace, sgd: bool = False, **size: int) -> comparison.Task:
    """Return a character model of this size, with AdamW or with SGD and momentum."""
    task = torch_charlm.make_task(args, **size)
    if not sgd:
        return task
    return task._replace(optimizer=torch.optim.SGD(task.model.parameters(), args.lr, momentum=0.9))


FALLS = Recover(factor=10.0, tolerance=-0.1, max_density=0.7)
KINDS = {
    "resnet": Kind(torch_resnet_digits.make_task, 400, 0.1, Recover(factor=3.0, better="higher")),
    "charlm": Kind(partial(language, width=32, layers=1), 1200, 1e-2, FALLS),
    "logistic": Kind(logistic, 600, 0.3, Recover(factor=10.0, tolerance=-0.02, max_density=0.7)),
    "charlm-large": Kind(partial(language, width=64, layers=2), 1200, 5e-3, FALLS),
    "charlm-large-sgd": Kind(partial(language, sgd=True, width=64, layers=2), 1200, 0.3, FALLS),
}


class Job(NamedTuple):
    """One training; ``recovery``: how its density grows in its course, "" if it does not."""

    kind: str
    recipe: str
    seed: int
    steps: int
    recovery: str = ""
    sent_nbytes: float = 0.0  # that AS_MANY_BYTES has to send

    @property
    def key(self) -> str:
        """What the result is stored under."""
        return " | ".join([self.kind, self.recipe, self.recovery or "-", f"seed {self.seed}"])


def train(job: Job) -> dict[str, Any]:
    """Run a job in this process; return what is stored of it."""
    torch.set_num_threads(1)
    horovod_fftcomp.set_num_threads(1)
    kind = KINDS[job.kind]
    lr = kind.lr / 100 if SLOW in job.recipe else kind.lr
    task = kind.make_task(argparse.Namespace(seed=job.seed, lr=lr, batch_size=8, skew=0.0))
    n_steps = 2 * job.steps if LONGER in job.recipe else job.steps
    recipe, settings = recipe_of(job.recipe), settings_of(job.recipe, n_steps)
    if recipe == AS_MANY_BYTES:
        recipe = f"topk(bits=32,density={density_of(job.sent_nbytes, task.model)})"
    set_momentum(task.optimizer, job.recipe)
    [choice] = recipe_choices(recipe)
    options = with_exchange(choice.name, choice.options)
    if FALLING in job.recipe:
        start = 4 * options.pop("density")
        settings["density_schedule"] = Exponential(start, start / 40, n_steps)
    choice = choice._replace(options=options)
    run = comparison.train_simulated(
        task, choice, LEARNERS, n_steps, 20, steer=steering(job, kind, n_steps), **settings
    )
    dense, compressed = nbytes_of(task.model, make_policy(choice.name, **choice.options))
    losses = np.array_split(np.array(run.losses), min(50, len(run.losses)))
    return run._asdict() | {
        "recipe": choice.label,
        "ratio_of_compressed": compressed / (run.sent_nbytes - dense) if compressed else 1.0,
        "losses": [round(float(part.mean()), 5) for part in losses],
        "measure": task.measure,
        "wire": wire.VERSION,
    }


def recipe_of(recipe: str) -> str:
    """Return a row's recipe without what is changed around it."""
    for suffix in (WARM, LONGER, SLOW, ALONE, FIRST, FALLING, SHORT):
        recipe = recipe.replace(suffix, "")
    return recipe


def settings_of(recipe: str, n_steps: int) -> dict[str, Any]:
    """Return what a row adds to its recipe's options."""
    settings: dict[str, Any] = {"momentum": 0.9} if FIRST in recipe else {}
    return settings | ({"warmup_steps": n_steps // 10} if WARM in recipe else {})


def set_momentum(optimizer: torch.optim.Optimizer, recipe: str) -> None:
    """Leave the momentum of a row's optimizer to its recipe, or shorten Adam's memory."""
    [group] = optimizer.param_groups
    if "betas" in group and (FIRST in recipe or SHORT in recipe):
        group["betas"] = (0.0 if FIRST in recipe else group["betas"][0], 0.99)
    elif ALONE in recipe or FIRST in recipe:
        group["momentum"] = 0.0


def with_exchange(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's options, with exchange "gather" if they leave it open."""
    is_open = RECIPES_OF_PACKAGE[name].options.get("exchange") == "auto"
    return ({"exchange": "gather"} if is_open else {}) | dict(options)


def steering(job: Job, kind: Kind, n_steps: int) -> Callable[[int, float], float | None]:
    """Return what changes the density of a job at its evaluations: by hand at a quarter."""
    if job.recovery == "lowered by hand":
        return lambda step, quality: 0.7 if step == n_steps // 4 else None
    if job.recovery != "lowered by recover":
        return lambda step, quality: None
    recovery, density = Recovery(kind.recover), 0.01

    def steer(step: int, quality: float) -> float | None:
        nonlocal density
        if not recovery.observe(quality):
            return None
        density = recovery.raised(density)
        return density

    return steer


def specs_of(model: torch.nn.Module) -> list[Tensor]:
    """Return names and shapes of the parameters."""
    return [Tensor(name, tuple(p.shape)) for name, p in model.named_parameters()]


def nbytes_of(model: torch.nn.Module, policy: Scheduled) -> tuple[int, int]:
    """Return the float32 bytes of the parameters that travel dense, and of the compressed ones."""
    buckets = make_buckets(specs_of(model), policy)
    compressed = sum(4 * math.prod(t.shape) for bucket in buckets for t in bucket.tensors)
    return sum(4 * p.numel() for p in model.parameters()) - compressed, compressed


def density_of(sent_nbytes: float, model: torch.nn.Module) -> float:
    """Return the density at which Top-k in float32 sends so much of a model in a step."""
    specs = [tensor for tensor in specs_of(model) if is_compressed(tensor)]
    dense, _ = nbytes_of(model, make_policy("topk"))

    def sent(density: float) -> int:
        scheme = get_scheme("topk", bits=32, density=density)
        return dense + sum(scheme.sent_nbytes(tensor) for tensor in specs)

    densities = np.geomspace(1e-5, 1, 2000)
    return float(densities[max(0, bisect.bisect(densities, sent_nbytes, key=sent) - 1)])


class Store:
    """The results so far, in a file that is whole at every moment."""

    def __init__(self, path: Path, form: str) -> None:
        self.path, self.form = path, form
        self.runs: dict[str, dict[str, Any]] = {}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["form"] == form:
                self.runs = before["runs"]

    def add(self, job: Job, run: dict[str, Any]) -> None:
        """Keep the result of ``job``."""
        self.runs[job.key] = run
        described = {
            "command": " ".join(["python benchmarks/convergence.py", *sys.argv[1:]]),
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
            "versions": {
                "horovod_fftcomp": horovod_fftcomp.__version__,
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "numpy", "scikit-learn")},
            },
            "form": self.form,
            "learners": LEARNERS,
            "steps": {name: int(kind.steps * FORMS[self.form][1]) for name, kind in KINDS.items()},
            "runs": dict(sorted(self.runs.items())),
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)

    def has(self, job: Job) -> bool:
        """Return whether the result of ``job`` is there, and of the present range floats."""
        return job.key in self.runs and not is_old(self.runs[job.key])

    def all_seeds(self, kind: str, recipe: str, recovery: str = "-") -> list[dict[str, Any]]:
        """Return the runs of a recipe, in the order of their seeds."""
        begin = " | ".join([kind, recipe, recovery, "seed "])
        return [run for key, run in sorted(self.runs.items()) if key.startswith(begin)]

    def seeds(self, kind: str, recipe: str, recovery: str = "-") -> list[dict[str, Any]]:
        """Return the runs of the seeds that all recipes have, in their order."""
        return self.all_seeds(kind, recipe, recovery)[: FORMS[self.form][0]]


def recipes_of(kind: str) -> tuple[str, ...]:
    """Return the rows of a task's table."""
    if kind not in MORE:
        return ("none", *LARGE) if kind.endswith("sgd") else ("none", "none" + SHORT, *LARGE)
    return (*RECIPES, *MORE[kind], *BASELINES_OF[kind])


def jobs_of(form: str) -> list[Job]:
    """Return all trainings, seed after seed, so that a cut run has whole tables of some seeds."""
    seeds, share = FORMS[form]
    jobs = []
    for seed in range(seeds):
        for name, kind in KINDS.items():
            steps = int(kind.steps * share)
            of_seed = [Job(name, recipe, seed, steps) for recipe in recipes_of(name)]
            if name in FAILING:
                of_seed += [Job(name, FAILING[name], seed, steps, how) for how in RECOVERIES]
            jobs += [job for job in of_seed if _is_trained(job, form)]
    for seed in range(seeds, PAIRED_SEEDS if form == "table" else seeds):
        for name in PAIRED_KINDS:
            recipes = [recipe + how for recipe in PAIRED for how in ("", "(exchange=sharded)")]
            jobs += [Job(name, recipe, seed, KINDS[name].steps) for recipe in recipes]
    return jobs


def _is_trained(job: Job, form: str) -> bool:
    is_long = LONGER in job.recipe or (job.kind == "charlm" and job.recipe in BASELINES)
    is_long |= job.kind not in MORE or job.recipe in PARTS_OF_BEST
    return job.seed == 0 or form == "long" or not is_long


def run_all(jobs: list[Job], store: Store, workers: int) -> None:
    """Train what is not stored or old, ``workers`` at a time; AS_MANY_BYTES after its example."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with (
        Progress(*columns, TimeRemainingColumn()) as bar,
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool,
    ):
        shown = bar.add_task("", total=len(jobs))
        for follows in (False, True):
            part = [job for job in jobs if (job.recipe == AS_MANY_BYTES) == follows]
            todo = [job for job in part if not store.has(job)]
            bar.advance(shown, len(part) - len(todo))
            if follows:
                todo = [job._replace(sent_nbytes=_bytes_of_threshold(job, store)) for job in todo]
            running = {pool.submit(train, job): job for job in todo}
            for done in as_completed(running):
                store.add(running[done], done.result())
                bar.update(shown, advance=1, description=running[done].key)


def _bytes_of_threshold(job: Job, store: Store) -> float:
    threshold = next(recipe for recipe in RECIPES if recipe.startswith("hard_threshold"))
    return store.runs[job._replace(recipe=threshold).key]["sent_nbytes"]


def make_page(store: Store) -> str:
    """Return a table for each task, in Markdown."""
    lines = []
    if any(map(is_old, store.runs.values())):
        lines = [
            f"{OLD} Trained with range floats of version 2 of the wire format, which round two to "
            "four times more coarsely in as many bytes.\n"
        ]
    for name, kind in KINDS.items():
        none = store.seeds(name, "none")
        if not none:
            continue
        of = f"mean and standard deviation of {len(none)} seeds" if len(none) > 1 else "one seed"
        lines += [
            f"## {name}",
            f"\n{none[0]['measure']} at the end (mean of the last fifth of the evaluations): "
            f"{of}.\n",
            "| recipe | quality | difference to none | ratio | of what is compressed | "
            "residual norm | total error |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for recipe in recipes_of(name):
            runs = store.seeds(name, recipe)
            if runs:
                lines.append(_row(recipe, runs, none, kind.higher_is_better))
        for how in RECOVERIES if name in FAILING else ():
            runs = store.seeds(name, FAILING[name], how)
            if runs:
                lines.append(_row(f"{FAILING[name]}, {how}", runs, none, kind.higher_is_better))
        lines.append("")
    return "\n".join([*lines, *paired_table(store)])


def paired_table(store: Store) -> list[str]:
    """Return what sharded exchanges change against gathered ones of the same seeds, in Markdown."""
    lines = [
        "## Sharded against gathered\n",
        "Mean difference of the same seeds and its standard error, of what a table above calls "
        "quality: points of accuracy on `resnet`, part of the loss on `charlm`.\n",
        "| recipe | task | seeds | sharded - gathered |",
        "|---|---|---:|---:|",
    ]
    for recipe in PAIRED:
        for name in PAIRED_KINDS:
            runs = [store.all_seeds(name, recipe + how) for how in ("", "(exchange=sharded)")]
            pairs = [pair for pair in zip(*runs, strict=False) if len(set(map(is_old, pair))) == 1]
            n_seeds = len(pairs)
            if n_seeds < 2:
                continue
            before, after = np.array([[final(run) for run in pair] for pair in pairs]).T
            change, unit = 100 * (after - before), "points"
            if not KINDS[name].higher_is_better:
                change, unit = change / before.mean(), "%"
            error = change.std(ddof=1) / math.sqrt(n_seeds)
            found = f"{change.mean():+.2f} ± {error:.2f} {unit}"
            lines.append(f"| `{recipe}` | {name} | {n_seeds} | {found} |")
    return lines if len(lines) > 4 else []


def final(run: dict[str, Any]) -> float:
    """Return the quality at the end: the mean of the last fifth of the evaluations."""
    return float(np.mean(run["qualities"][-(len(run["qualities"]) // 5) :]))


def is_old(run: dict[str, Any]) -> bool:
    """Return whether a stored run was trained with range floats of an earlier wire format."""
    [choice] = recipe_choices(run["recipe"])
    scheme = get_scheme(choice.name, **choice.options)
    has_range_floats = choice.name == "auto" or "RangeFloat" in scheme.spec()
    return has_range_floats and run.get("wire", 2) < RANGE_FLOATS


def _row(recipe: str, runs: list[dict], none: list[dict], in_percent: bool) -> str:
    found, baseline = np.array([final(run) for run in runs]), np.array([final(run) for run in none])
    change = found.mean() - baseline[: len(found)].mean()
    if in_percent:
        quality, difference = f"{100 * found.mean():.2f} %", f"{100 * change:+.2f} points"
        spread = f" ± {100 * found.std():.2f}"
    else:
        quality = f"{found.mean():.4f}"
        difference, spread = f"{100 * change / baseline.mean():+.1f} %", f" ± {found.std():.4f}"
    ratio = np.mean([run["ratio"] for run in runs])
    alone = np.mean([run["ratio_of_compressed"] for run in runs])
    spread = spread if len(runs) > 1 else ""
    fewer = f" ({len(runs)} of the seeds)" if len(runs) < len(none) else ""
    if any(map(is_old, runs)):
        fewer += f" {OLD}"
    norm = np.mean([run["residual_norms"][-1] for run in runs])
    error = np.mean([run["total_error"] for run in runs])
    return (
        f"| `{recipe}`{fewer} | {quality}{spread} | {difference} | {ratio:.1f} | {alone:.0f} | "
        f"{norm:.3g} | {error:.3g} |"
    )


def plot(store: Store, path: Path) -> None:
    """Plot the quality of every recipe on the two networks, sorted by what it saves."""
    kinds = ("resnet", "charlm")
    found = {recipe: store.seeds("resnet", recipe) for recipe in PLOTTED}
    ratios = {
        recipe: float(np.mean([run["ratio_of_compressed"] for run in runs]))
        for recipe, runs in found.items()
        if runs
    }
    rows = sorted(ratios, key=lambda recipe: -ratios[recipe])
    figure = Figure(figsize=(12, 1 + 0.24 * len(rows)), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), kinds, strict=True):
        for y, recipe in enumerate(rows):
            ends = np.array([final(run) for run in store.seeds(kind, recipe)])
            if len(ends):
                scale = 100 if KINDS[kind].higher_is_better else 1
                group = "sharded" if "sharded" in recipe else "gathered or reduced"
                filled = COLOURS[group] if len(ends) > 1 else "white"
                look = {"fmt": "o", "color": COLOURS[group], "mfc": filled, "capsize": 3}
                spread = scale * ends.std() if len(ends) > 1 else None
                axes.errorbar(scale * ends.mean(), y, xerr=spread, **look)
        axes.grid(alpha=0.3)
    accuracy, loss = figure.axes
    labels = [f"{recipe_of(name)}  {ratios[name]:.0f}x" for name in rows]
    accuracy.set_yticks(range(len(rows)), labels)
    accuracy.set_xlabel("test accuracy on resnet (%)")
    loss.set_xlabel("validation loss on charlm")
    figure.suptitle("Quality by compression ratio: mean and standard deviation of the seeds")
    for group, colour in COLOURS.items():
        loss.plot([], [], "o", color=colour, label=group)
    loss.plot([], [], "o", color="black", mfc="white", label="one seed")
    loss.legend()
    figure.savefig(path, dpi=110)


def plot_residuals(store: Store, path: Path) -> None:
    """Plot the residual's norm over the steps of a few recipes, for each task."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(FAILING)), FAILING, strict=True):
        for recipe in RESIDUALS:
            runs = store.seeds(name, recipe)
            if runs:
                norms = np.mean([run["residual_norms"] for run in runs], axis=0)
                axes.plot(runs[0]["steps"], norms, label=recipe)
        axes.set(title=name, yscale="log", xlabel="step")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.suptitle("Norm of the residual")
    figure.axes[0].set_ylabel("mean over the seeds")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def plot_recovery(store: Store, path: Path) -> None:
    """Plot how runs at density 0.01 without error feedback recover when it is raised."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    shown = {}
    for axes, name in zip(figure.subplots(1, len(FAILING)), FAILING, strict=True):
        kind = KINDS[name]
        rows = [(recipe, "-", recipe) for recipe in ("none", "none" + LONGER)]
        rows += [(FAILING[name], how, told) for how, told in RECOVERIES.items()]
        for number, (recipe, how, label) in enumerate(rows):
            runs = store.seeds(name, recipe, how)
            if runs:
                qualities = np.mean([run["qualities"] for run in runs], axis=0)
                look = {"marker": ".", "color": f"C{number}"}
                [shown[label]] = axes.plot(runs[0]["steps"], qualities, **look)
                axes.set_ylabel(runs[0]["measure"])
        axes.set(title=name, xlabel="step", yscale="linear" if kind.higher_is_better else "log")
        for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.grid(alpha=0.3, which="both")
    figure.suptitle("Recovery of fft without error feedback, when its density is raised from 0.01")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train what is left to train, then write tables and plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--form", choices=FORMS, default="table", help="seeds and steps (default: %(default)s)")
    add("--workers", type=int, default=os.cpu_count(), help="trainings at a time (default: cores)")
    add("--out", type=Path, default=RESULTS, help="folder of the results (default: results)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name = "convergence" if args.form == "table" else f"convergence-{args.form}"
    store = Store(args.out / f"{name}.json", args.form)
    run_all(jobs_of(args.form), store, args.workers)
    page = make_page(store)
    (args.out / f"{name}.md").write_text(f"# Convergence\n\n{page}", encoding="utf-8")
    plot(store, args.out / f"{name}.png")
    plot_residuals(store, args.out / f"{name}-residuals.png")
    plot_recovery(store, args.out / f"{name}-recovery.png")
    print(page)


if __name__ == "__main__":
    main()
