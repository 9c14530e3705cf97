"""Which density, bits and block lose least of recorded gradients at a given number of bytes.

    python benchmarks/record_gradients.py
    python benchmarks/defaults.py

Writes results/defaults.json and results/defaults.png; README.md tells how to read them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from record_gradients import MODELS, WINDOWS

from horovod_fftcomp import get_codec
from horovod_fftcomp.engine.buckets import is_compressed
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools import environment, gradient_files
from horovod_fftcomp.tools.bench import RecipeSession
from horovod_fftcomp.tools.gradient_files import History

RESULTS = Path(__file__).resolve().parent / "results"
# What the papers send, in blocks of a middle length: a budget of bytes to do better with.
PAPERS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.01, "bits": 32},
    "fft": {"density": 0.15, "bits": 10, "block": 256},
    "dct": {"density": 0.15, "bits": 10, "block": 256},
}
BUDGETS = (0.2, 0.5, 1.0, 2.0)  # bits of an element; ratios of 160, 64, 32 and 16
BITS = (3, 4, 5, 6, 8, 10)
BLOCKS = (64, 128, 256, 1024, 4096)
LEAST_DENSITY = 1e-4  # of 100,000 elements ten
# By Okabe and Ito; the colour-blind can tell these apart.
COLOURS = "#000000 #E69F00 #56B4E9 #009E73 #D55E00 #CC79A7 #0072B2".split()


class Recording(NamedTuple):
    """The tensors of one model in one window that a training compresses."""

    name: str
    histories: list[History]

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(history.steps[0].size for history in self.histories)


def read(folder: Path, model: str, window: str) -> Recording:
    """Return what ``record_gradients.py`` wrote; exits where it did not."""
    path = folder / f"{model}-{window}.npz"
    if not path.exists():
        sys.exit(f"{path} is missing; run: python benchmarks/record_gradients.py")
    histories = [
        history
        for history in gradient_files.read(path)
        if is_compressed(Tensor(history.name, history.steps[0].shape))
    ]
    return Recording(path.stem, histories)


def payload_nbytes(recording: Recording, recipe: str, options: dict[str, Any]) -> int:
    """Return what one rank sends in a step, headers included."""
    codec = get_codec(recipe, **options)
    return sum(codec.payload_nbytes(history.steps[0].shape) for history in recording.histories)


def affordable(
    recording: Recording, recipe: str, options: dict[str, Any], nbytes: float
) -> float | None:
    """Return the largest density, to 1 %, whose payloads take ``nbytes`` at most; None: none."""
    densities = np.geomspace(LEAST_DENSITY, 1, 1 + round(np.log(1 / LEAST_DENSITY) / 0.01))
    low, high = -1, len(densities)
    while high - low > 1:
        middle = (low + high) // 2
        given = {**options, "density": float(densities[middle])}
        if payload_nbytes(recording, recipe, given) <= nbytes:
            low = middle
        else:
            high = middle
    return None if low < 0 else float(densities[low])


def relative_errors(recording: Recording, recipe: str, options: dict[str, Any]) -> list[float]:
    """Return, for each step but the first, what is left over what was to be sent.

    Sums of squares over all tensors, of the new residual and of gradient plus old residual.
    """
    left, wanted = 0.0, 0.0
    for history in recording.histories:
        first = history.steps[0]
        session = RecipeSession(
            recipe, recipe, options, Tensor(history.name, first.shape), first.reshape(-1)
        )
        pairs = []
        for grad in history.steps:
            compensated = grad.reshape(-1) + session.residual()
            session.advance(grad.reshape(-1))
            residual = session.residual()
            pairs.append((np.vdot(residual, residual), np.vdot(compensated, compensated)))
        residuals, energies = np.array(pairs[1:], float).T
        left, wanted = left + residuals, wanted + energies
    return (left / wanted).tolist()


def settings(recipe: str) -> Iterator[dict[str, int]]:
    """Yield the options besides the density that are compared."""
    if "block" not in RECIPES[recipe].options:
        yield from ({"bits": bits} for bits in (*BITS, 32))
        return
    for bits, block in itertools.product(BITS, BLOCKS):
        yield {"bits": bits, "block": block}


def measure(
    recordings: list[Recording], recipe: str, options: dict[str, Any], budget: float | str
) -> dict[str, Any] | None:
    """Return one cell of the result; None where not even the least density meets the budget.

    ``budget``: bits of an element; or "paper": as many bytes as the paper's settings take.
    """
    cell = {"recipe": recipe, "budget": budget, **options, "density": {}, "bits_per_element": {}}
    errors = {}
    for recording in recordings:
        if budget == "paper":
            limit = payload_nbytes(recording, recipe, PAPERS[recipe])
        else:
            limit = float(budget) * recording.numel / 8
        density = affordable(recording, recipe, options, limit)
        if density is None:
            return None
        given = {**options, "density": density}
        sent = 8 * payload_nbytes(recording, recipe, given) / recording.numel
        cell["density"][recording.name] = round(density, 5)
        cell["bits_per_element"][recording.name] = round(sent, 4)
        errors[recording.name] = geometric_mean(relative_errors(recording, recipe, given))
    error = round(geometric_mean(list(errors.values())), 5)
    return {**cell, "errors": {name: round(e, 5) for name, e in errors.items()}, "error": error}


def geometric_mean(values: list[float]) -> float:
    """Return it: a factor weighs the same wherever it is gained."""
    return float(np.exp(np.log(values).mean()))


def measure_all(recordings: list[Recording]) -> list[dict[str, Any]]:
    """Return all cells; tell each, for there are some hundred of about two seconds."""
    cells = []
    for budget in ("paper", *BUDGETS):
        for recipe in PAPERS:
            for options in settings(recipe):
                cell = measure(recordings, recipe, options, budget)
                if cell is None:
                    continue
                cells.append(cell)
                print(f"{recipe} {options} at {budget}: {cell['error']:.4f}", flush=True)
    return cells


def best(cells: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """Return the cell of least error among those with the ``wanted`` settings."""
    found = [cell for cell in cells if all(cell[key] == wanted[key] for key in wanted)]
    return min(found, key=lambda cell: cell["error"], default=None)


def plot(cells: list[dict[str, Any]], path: Path) -> None:
    """Plot errors against bits sent: above for each ``bits``, below for each ``block``."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    rows = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, recipe in zip(rows[0], PAPERS, strict=True):
        own = [cell for cell in cells if cell["recipe"] == recipe]
        axes.set_title(recipe + (", best block" if "block" in own[0] else ""))
        draw(axes, own, "bits", (*BITS, 32))
    for axes, recipe in zip(rows[1][1:], ("fft", "dct"), strict=True):
        axes.set_title(f"{recipe}, best bits")
        draw(axes, [cell for cell in cells if cell["recipe"] == recipe], "block", BLOCKS)
    rows[1][0].set_axis_off()
    for axes, title, left in ((rows[0][0], "bits", 0.05), (rows[1][1], "block", 0.5)):
        found = axes.get_legend_handles_labels()
        legend = rows[1][0].legend(*found, title=title, loc="upper left", bbox_to_anchor=(left, 1))
        rows[1][0].add_artist(legend)
    for axes in (rows[0][0], rows[1][1]):
        axes.tick_params(labelbottom=True, labelleft=True)
    figure.suptitle("Error of recorded gradients by what is sent")
    figure.supxlabel("bits sent for each element")
    figure.supylabel("relative squared error, with error feedback")
    figure.savefig(path, dpi=120)


def draw(axes: Any, cells: list[dict[str, Any]], option: str, values: tuple[int, ...]) -> None:
    """Draw one line for each of ``values``."""
    budgets = sorted({cell["budget"] for cell in cells}, key=str)
    for value, colour in zip(values, COLOURS, strict=False):
        found = [best(cells, **{option: value, "budget": budget}) for budget in budgets]
        points = sorted(
            (np.mean(list(cell["bits_per_element"].values())), cell["error"])
            for cell in found
            if cell is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=value)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(BUDGETS)
    axes.set_yticks([0.15, 0.2, 0.3, 0.4, 0.6, 0.8])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)


def main() -> None:
    """Measure, tell the best at each budget and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--gradients", type=Path, default=Path("out"), help="folder (default: %(default)s)"
    )
    folder = parser.parse_args().gradients
    names = itertools.product((make.__name__ for make in MODELS), WINDOWS)
    recordings = [read(folder, model, window) for model, window in names]
    cells = measure_all(recordings)
    for budget, recipe in itertools.product(("paper", *BUDGETS), PAPERS):
        cell = best(cells, recipe=recipe, budget=budget)
        if cell is not None:
            options = {key: cell[key] for key in ("bits", "block") if key in cell}
            print(f"best of {recipe} at {budget}: {options}, error {cell['error']:.4f}")
    result = {
        "command": " ".join(["python benchmarks/defaults.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": environment.describe(),
        "papers": PAPERS,
        "recordings": {recording.name: recording.numel for recording in recordings},
        "cells": cells,
    }
    path = RESULTS / "defaults"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(cells, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
