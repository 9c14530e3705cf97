"""What a rank sends and receives as ranks are added, and how many elements a step touches.

    python benchmarks/build_up.py    # about a minute

Writes results/build_up.json and results/build_up.png; README.md tells how to read them.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import horovod_fftcomp
from horovod_fftcomp.cli.arguments import recipe_choices

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = (2, 4, 8, 16, 32, 64)
NUMEL = 50_000
STEPS = 3
RECIPES = (
    "none,topk(density=0.01),hard_threshold(density=0.01),fft(density=0.15),random_k,"
    "random_k(exchange=gather),scalecom,scalecom(selector=exact)"
)
# Of a gradient's energy the share that all ranks have in common: alike, as with large batches.
COMMON = 0.5


def gradients_of(ranks: int) -> np.ndarray:
    """Return made-up gradients ``[steps, ranks, n]`` with heavy tails and a common part."""
    rng = np.random.default_rng(0)
    common = rng.standard_t(3, (STEPS, 1, NUMEL))
    own = rng.standard_t(3, (STEPS, ranks, NUMEL))
    return (COMMON**0.5 * common + (1 - COMMON) ** 0.5 * own).astype(np.float32)


def measure(recipe: str, ranks: int) -> dict[str, Any]:
    """Return bytes of the last step, and the share of elements whose mean is not zero."""
    [choice] = recipe_choices(recipe)
    *_, last = horovod_fftcomp.simulate(choice.name, gradients_of(ranks), **choice.options)
    return {
        "recipe": choice.label,
        "ranks": ranks,
        "sent_nbytes": max(last.sent_bytes),
        "received_nbytes": max(last.received_bytes),
        "share_of_elements": np.count_nonzero(last.average) / NUMEL,
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot received bytes and the share of elements against the number of ranks."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    received: dict[str, float] = {}
    changed: dict[str, float] = {}
    colours: dict[str, str] = {}
    for number, recipe in enumerate(dict.fromkeys(row["recipe"] for row in rows)):
        mine = [row for row in rows if row["recipe"] == recipe]
        colours[recipe] = f"C{number}"
        look = {"marker": "os^vDPX*"[number % 8], "color": colours[recipe]}
        for axes, last, values in (
            (left, received, [row["received_nbytes"] / 1e3 for row in mine]),
            (right, changed, [100 * row["share_of_elements"] for row in mine]),
        ):
            axes.semilogx(RANKS, values, **look)
            last[recipe] = values[-1]
    left.set(title="received by each rank in a step (kB)", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    right.set(title="elements that a step changes (%)")
    for axes in (left, right):
        axes.set_xlabel("ranks")
        axes.set_xticks(RANKS, RANKS, minor=False)
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    figure.draw_without_rendering()  # lays out the axes
    name_lines(left, received, colours)
    name_lines(right, changed, colours)
    figure.savefig(path, dpi=120)


def name_lines(axes: Axes, last: dict[str, float], colours: dict[str, str]) -> None:
    """Write each line's name beside its end, moved up where another name would cover it."""
    to_points = 72 / axes.figure.dpi
    least = -np.inf
    for name in sorted(last, key=last.__getitem__):
        end = to_points * axes.transData.transform((RANKS[-1], last[name]))[1]
        least = max(end, least + 10)
        shift = (20, least - end)
        look = {"color": colours[name], "fontsize": 9, "va": "center", "annotation_clip": False}
        axes.annotate(name, (RANKS[-1], last[name]), shift, textcoords="offset points", **look)


def main() -> None:
    """Measure all recipes on all numbers of ranks; write and plot."""
    rows = [measure(c.label, ranks) for c in recipe_choices(RECIPES) for ranks in RANKS]
    result = {
        "command": " ".join(["python benchmarks/build_up.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "versions": {
            "horovod_fftcomp": horovod_fftcomp.__version__,
            "python": platform.python_version(),
            "numpy": version("numpy"),
        },
        "numel": NUMEL,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "build_up"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(rows, path.with_suffix(".png"))
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
