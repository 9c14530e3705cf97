"""Compare test accuracy with and without compression over ten seeds, seed by seed.

    horovodrun -np 2 python benchmarks/digits_accuracy.py

Trains as ``examples/torch_digits.py`` does, with its default settings; README.md tells how to
read the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import scipy.stats
import torch
from matplotlib.figure import Figure
from rich.table import Table

import horovod_fftcomp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import digits
import torch_digits

RESULTS = Path(__file__).resolve().parent / "results"
TOLERANCE = 1.0  # percentage points of accuracy that compression may cost
OPTIONS: dict[str, dict] = {"none": {}, "fft": {}, "dct": {}, "topk": {}}  # the defaults
COLOURS = {"fft": "#009E73", "dct": "#D55E00", "topk": "#0072B2"}  # by Okabe and Ito


class Difference(NamedTuple):
    """Accuracy less that of ``none`` with the same seed, in percentage points."""

    per_seed: list[float]
    mean: float
    low: float
    high: float

    @property
    def is_within_tolerance(self) -> bool:
        """Tell whether the whole interval lies above -``TOLERANCE``."""
        return self.low > -TOLERANCE


def paired_difference(accuracies: list[float], baseline: list[float]) -> Difference:
    """Return the differences and the 95 % interval of their mean (Student's t)."""
    points = 100 * (np.array(accuracies) - np.array(baseline))
    mean, error = points.mean(), scipy.stats.sem(points)
    low, high = mean, mean
    if error > 0:
        low, high = scipy.stats.t.interval(0.95, len(points) - 1, mean, error)
    return Difference(points.round(4).tolist(), float(mean), float(low), float(high))


def train_all(seeds: range, args: argparse.Namespace) -> dict[str, list[digits.Run]]:
    """Train every recipe with every seed; rank 0 shows the progress."""
    runs: dict[str, list[digits.Run]] = {recipe: [] for recipe in OPTIONS}
    monitor = digits.Monitor(len(seeds) * len(OPTIONS) * args.epochs, hvd.rank() != 0)
    with monitor.bar:
        for seed in seeds:
            args.seed = seed

            def report(text: str, epochs: float, seed: int = seed) -> None:
                monitor.advance(f"seed {seed}  {text}", epochs)

            for recipe, options in OPTIONS.items():
                runs[recipe].append(torch_digits.train(recipe, options, args, report))
    return runs


def make_table(accuracies: dict[str, list[float]], differences: dict[str, Difference]) -> Table:
    """Return one row for each seed and, below, the means and what follows from them."""
    table = Table(title="Test accuracy in % (difference to none in percentage points)")
    for recipe in ("", *accuracies):
        table.add_column(recipe, justify="right")
    for seed, values in enumerate(zip(*accuracies.values(), strict=True)):
        changes = [f" ({difference.per_seed[seed]:+.2f})" for difference in differences.values()]
        cells = [f"{100 * a:.2f}{c}" for a, c in zip(values, ["", *changes], strict=True)]
        table.add_row(f"seed {seed}", *cells, end_section=seed + 1 == len(accuracies["none"]))
    means = [f"{100 * np.mean(values):.2f}" for values in accuracies.values()]
    table.add_row("mean", *means)
    found = differences.values()
    table.add_row("mean difference", "", *(f"{d.mean:+.2f}" for d in found))
    table.add_row("95 % interval", "", *(f"{d.low:+.2f} to {d.high:+.2f}" for d in found))
    verdicts = ("yes" if d.is_within_tolerance else "NO" for d in found)
    table.add_row(f"above -{TOLERANCE:g}?", "", *verdicts)
    return table


def plot(differences: dict[str, Difference], path: Path) -> None:
    """Plot each seed's difference as a dot, and the interval of the mean below."""
    axes = (figure := Figure(figsize=(7, 3.2), layout="constrained")).subplots()
    for row, (recipe, difference) in enumerate(differences.items()):
        dots, mean, low, high = difference
        colour = COLOURS[recipe]
        heights = row - np.linspace(0.12, 0.3, len(dots))  # apart, for many are equal
        axes.plot(dots, heights, "o", color=colour, alpha=0.6, markersize=5)
        axes.errorbar(
            mean, row + 0.1, xerr=[[mean - low], [high - mean]], fmt="D", color=colour, capsize=5
        )
    axes.axvline(0, color="black", linewidth=1)
    axes.axvline(-TOLERANCE, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(differences)), list(differences))
    axes.invert_yaxis()
    axes.set_title("Handwritten digits: test accuracy with the default options")
    axes.set_xlabel(
        "test accuracy less that of none, same seed (percentage points)\n"
        "dots: seeds; diamond and bar: mean and its 95 % interval; dashed: tolerance"
    )
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)


def describe(args: argparse.Namespace) -> dict[str, object]:
    """Return what one needs to know to repeat the run."""
    script = f"horovodrun -np {hvd.size()} python benchmarks/digits_accuracy.py"
    versions = {name: version(name) for name in ("horovod", "torch", "numpy", "scikit-learn")}
    settings = {name: getattr(args, name) for name in ("epochs", "batch_size", "lr")}
    return {
        "command": " ".join([script, *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "versions": {
            "horovod_fftcomp": horovod_fftcomp.__version__,
            "python": platform.python_version(),
            **versions,
        },
        "settings": {**settings, "lr_warm_up_epochs": digits.LR_WARM_UP_EPOCHS},
        "tolerance_points": TOLERANCE,
    }


def describe_recipe(runs: list[digits.Run], difference: Difference | None) -> dict:
    """Return what came out for one recipe."""
    described = {
        "options": runs[0].options,
        "ratio": runs[0].ratio,
        "sent_nbytes_per_step": runs[0].sent_nbytes_per_step,
        "accuracy": [run.accuracy for run in runs],
    }
    if difference is not None:
        verdict = {"is_within_tolerance": difference.is_within_tolerance}
        described["difference_points"] = {**difference._asdict(), **verdict}
    return described


def parse_args() -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="how many (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder (default: %(default)s)")
    flags = parser.parse_args()
    if flags.seeds < 2:
        parser.error("--seeds must be at least 2: one difference has no interval")
    return flags


def main() -> None:
    """Run the benchmark; rank 0 reports."""
    flags = parse_args()
    args = digits.parse_args(__doc__, [])
    hvd.init()
    if hvd.size() == 1:
        sys.exit("one process exchanges nothing; start it with horovodrun -np 2")
    torch.set_num_threads(1)  # the ranks share the cores
    runs = train_all(range(flags.seeds), args)
    if hvd.rank() != 0:
        return
    accuracies = {recipe: [run.accuracy for run in some] for recipe, some in runs.items()}
    differences = {
        recipe: paired_difference(values, accuracies["none"])
        for recipe, values in accuracies.items()
        if recipe != "none"
    }
    console = digits.Monitor(0).console
    console.print(make_table(accuracies, differences))
    found = {recipe: describe_recipe(runs[recipe], differences.get(recipe)) for recipe in runs}
    result = {**describe(args), "seeds": list(range(flags.seeds)), "recipes": found}
    flags.out.mkdir(parents=True, exist_ok=True)
    path = flags.out / "digits_accuracy"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(differences, path.with_suffix(".png"))
    console.print(f"wrote {path}.json and .png", soft_wrap=True)


if __name__ == "__main__":
    main()
