"""Write docs/choosing.md: which recipe for which network, model and number of ranks.

    python benchmarks/choosing.py            # times all codecs here, then writes the page
    python benchmarks/choosing.py --report   # writes the page from results/choosing.json

Quality is that of results/convergence.json; steps are forecasts of
``horovod_fftcomp.tools.advise.cost_model``, from codecs timed on this machine's CPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import convergence
import numpy as np
from matplotlib.figure import Figure
from rich.progress import track

from horovod_fftcomp.cli.arguments import recipe_choices
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.advise.cost_model import Compute, Message, Transfer, given_network
from horovod_fftcomp.types import Array

HERE = Path(__file__).resolve().parent
RESULT, PAGE = HERE / "results" / "choosing.json", HERE.parent / "docs" / "choosing.md"
PLOT = RESULT.with_name("time_to_loss.png")
SAME, NEAR = (0.5, 0.02), (1.2, 0.15)  # points of accuracy on resnet, share of charlm's loss
LATENCY_S = 50e-6
PASSES = 3


class Model(NamedTuple):
    """What a user trains: matrices of so many elements; seconds of a step without exchange."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    compute_s: float

    @property
    def numel(self) -> int:
        """All elements."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def tensors(self) -> list[Tensor]:
        """Names and shapes."""
        return [Tensor(f"layer{i}", shape) for i, shape in enumerate(self.shapes)]


MODELS = (
    Model("1 M parameters, 20 ms a step", ((256, 512),) * 8, 0.02),
    Model("25 M parameters, 80 ms a step", ((1024, 1024),) * 24, 0.08),
    Model("25 M parameters, 400 ms a step", ((1024, 1024),) * 24, 0.4),
)
ROWS = tuple(
    dict.fromkeys((*convergence.RECIPES, *convergence.SHARDED, *convergence.BASELINES_OF["resnet"]))
)
LIMITED, PARTS = MODELS[1], ("compute", "encode", "exposed", "decode", "total")
GBIT_PER_S = (0.1, 0.3, 1, 3, 10, 25)
RANKS = (2, 8, 32, 128)
# Time to a loss of charlm, which none ends 4 % below, on links of these speeds.
LOSS, RACE_GBIT_PER_S = 1.75, (0.1, 1, 10)
DRAWN = ("none", "fp16", "qsgd", "fft(exchange=sharded)", "topk(exchange=sharded)",
         "powersgd(rank=4)", "auto(ratio=100)")  # fmt: skip


def quality(store: convergence.Store) -> dict[str, tuple[float | None, float | None]]:
    """Return, by recipe, points lost on resnet and the share of the loss gained on charlm."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for recipe in ROWS:
        changes = []
        for kind, sign in (("resnet", -100.0), ("charlm", 1.0)):
            runs, none = store.seeds(kind, recipe), store.seeds(kind, "none")
            if not runs:
                changes.append(None)
                continue
            ends, base = (
                np.array([convergence.final(run) for run in some])
                for some in (runs, none[: len(runs)])  # the same seeds
            )
            change = float(ends.mean() - base.mean())
            whole = 1.0 if kind == "resnet" else float(np.mean([*map(convergence.final, none)]))
            changes.append(sign * change / whole)
        found[convergence.recipe_of(recipe)] = (changes[0], changes[1])
    return found


def ratios_of(store: convergence.Store) -> dict[str, float]:
    """Return float32 bytes over bytes sent, of what is compressed on resnet."""
    runs = {recipe: store.seeds("resnet", recipe) for recipe in ROWS}
    return {
        convergence.recipe_of(recipe): float(np.mean([run["ratio_of_compressed"] for run in some]))
        for recipe, some in runs.items()
        if some
    }


def holds(lost: tuple[float | None, float | None], limits: tuple[float, float]) -> bool:
    """Tell whether a recipe was trained on both tasks and lost no more than ``limits``."""
    return all(
        change is not None and change <= limit for change, limit in zip(lost, limits, strict=True)
    )


def codec_s(part: Transfer) -> float:
    """Return the seconds that a rank of eight computes for a part of an exchange."""
    there = part.on(8)
    return there.encode_s + there.decode_s + 8 * there.decode_each_s


def measure() -> dict[str, Any]:
    """Return the parts of a step of every recipe and model, each the fastest of those timed here.

    A machine that others share is slow at times, so all recipes are timed in several passes.
    """
    recipes = [*ROWS[1:], "fp16"]
    sizes = {model.numel: model for model in MODELS}
    jobs = [
        (model, convergence.recipe_of(recipe)) for model in sizes.values() for recipe in recipes
    ]
    fastest: dict[tuple[int, str], advice.Option] = {}
    for model, recipe in track(PASSES * jobs, "timing codecs"):
        [choice] = recipe_choices(recipe)
        options = convergence.with_exchange(choice.name, choice.options)
        option = advice.compressed(choice.label, choice.name, options, model.tensors, {}, 3)
        known = fastest.get((model.numel, recipe), option)
        pairs = zip(known.parts, option.parts, strict=True)
        parts = [min(pair, key=codec_s) for pair in pairs]
        fastest[model.numel, recipe] = option._replace(parts=parts)
    timed: dict[str, dict[str, Any]] = {str(numel): {} for numel in sizes}
    for (numel, recipe), option in fastest.items():
        timed[str(numel)][recipe] = {
            "sent_nbytes": option.sent_nbytes,
            "parts": [asdict(part) for part in option.parts],
        }
    return {
        "command": "python benchmarks/choosing.py",
        "machine": environment.describe(),
        "models": timed,
    }


def options_of(model: Model, timed: Mapping[str, Any]) -> dict[str, advice.Option]:
    """Return every recipe's exchange of ``model``."""
    found = {"none": advice.dense(model.tensors)}
    for recipe, one in timed[str(model.numel)].items():
        parts = [
            Transfer(**part | {"messages": tuple(Message(*m) for m in part["messages"])})
            for part in one["parts"]
        ]
        found[recipe] = advice.Option(recipe, recipe, {}, parts, one["sent_nbytes"], 0.0)
    return found


def picks(
    model: Model, options: Mapping[str, advice.Option], allowed: set[str]
) -> Iterator[list[str]]:
    """Yield a row for each network: the fastest allowed recipe on each number of ranks."""
    chosen = [options["none"], *(o for name, o in options.items() if name in allowed)]
    half = [options["fp16"]]
    for speed in GBIT_PER_S:
        cells = []
        for ranks in RANKS:
            network = given_network(speed, LATENCY_S)
            found = advice.forecasts(chosen, Compute(model.compute_s), network, ranks)
            best = advice.advise(found).best
            if best is None:
                cells.append("`none`")
            else:
                [fp16] = advice.forecasts(half, Compute(model.compute_s), network, ranks)
                dense, half_s, best_s = (one.time.total_s for one in (found[0], fp16, best))
                share = best.time.compute_s / best_s
                gains = f"{dense / best_s:.1f}x, {half_s / best_s:.1f}x ({share:.0%})"
                cells.append(f"`{best.option.label}` {gains}")
        yield [f"{speed:g} Gbit/s", *cells]


def table(head: list[str], rows: Iterator[list[str]]) -> list[str]:
    """Return a Markdown table, its first column on the left."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


class Race(NamedTuple):
    """Losses on charlm, means of the seeds, after so many steps; seconds of a step on each link."""

    steps: Array
    losses: Array
    step_s: list[float]


def race(timed: Mapping[str, Any], store: convergence.Store) -> dict[str, Race]:
    """Return the race of each recipe that was trained on charlm, and of ``fp16``.

    ``fp16`` has the losses of ``none``. Steps are forecasts for LIMITED on as many ranks as there
    were learners.
    """
    options, found = options_of(LIMITED, timed), {}
    trained = {convergence.recipe_of(recipe): store.seeds("charlm", recipe) for recipe in ROWS}
    for recipe, option in options.items():
        runs = trained["none" if recipe == "fp16" else recipe]
        if not runs:
            continue
        times = []
        for speed in RACE_GBIT_PER_S:
            network, compute = given_network(speed, LATENCY_S), Compute(LIMITED.compute_s)
            [forecast] = advice.forecasts([option], compute, network, convergence.LEARNERS)
            times.append(forecast.time.total_s)
        losses = np.mean([run["qualities"] for run in runs], axis=0)
        found[recipe] = Race(np.array(runs[0]["steps"]), losses, times)
    return found


def race_rows(found: Mapping[str, Race]) -> Iterator[list[str]]:
    """Yield, for each recipe, how many times sooner than ``fp16`` it has the loss LOSS."""
    steps_to = {}
    for recipe, (steps, losses, _) in found.items():
        least = np.minimum.accumulate(losses)
        if least[-1] <= LOSS:
            steps_to[recipe] = float(np.interp(-LOSS, -least, steps))
    base = [steps_to["fp16"] * time_s for time_s in found["fp16"].step_s]
    gains = {
        recipe: [b / (steps * time_s) for b, time_s in zip(base, found[recipe].step_s, strict=True)]
        for recipe, steps in steps_to.items()
    }
    for recipe in sorted(gains, key=lambda recipe: -gains[recipe][0]):
        yield [f"`{recipe}`", f"{steps_to[recipe]:.0f}", *(f"{x:.2f}" for x in gains[recipe])]


def plot_race(found: Mapping[str, Race]) -> None:
    """Plot the losses on charlm against the time, on links of each speed."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    for link, axes in enumerate(figure.subplots(1, len(RACE_GBIT_PER_S), sharey=True)):
        for recipe in DRAWN:
            steps, losses, times = found[recipe]
            look = "k--" if recipe == "none" else "k-" if recipe == "fp16" else "-"
            axes.plot(steps * times[link], losses, look, label=recipe)
        axes.axhline(LOSS, color="grey", linewidth=0.8)
        axes.set(title=f"{RACE_GBIT_PER_S[link]:g} Gbit/s", xlabel="seconds", xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("validation loss on charlm")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(DRAWN))
    figure.savefig(PLOT, dpi=110)


def limit_rows(
    timed: Mapping[str, Any], lost: Mapping[str, tuple[float | None, float | None]]
) -> Iterator[list[str]]:
    """Yield the parts of a step of the fastest sharded recipe that is as good as dense."""
    options = options_of(LIMITED, timed)
    allowed = [
        option for name, option in options.items() if "sharded" in name and holds(lost[name], SAME)
    ]
    network = given_network(1, LATENCY_S)
    for ranks in RANKS if allowed else ():
        found = advice.forecasts(allowed, Compute(LIMITED.compute_s), network, ranks)
        best = min(found, key=lambda forecast: forecast.time.total_s)
        parts = (f"{1e3 * getattr(best.time, f'{part}_s'):.0f}" for part in PARTS)
        yield [str(ranks), f"`{best.option.label}`", *parts]


def quality_rows(
    lost: Mapping[str, tuple[float | None, float | None]], ratios: Mapping[str, float]
) -> Iterator[list[str]]:
    """Yield a row for each recipe, those that lose least first."""

    def order(recipe: str) -> tuple[bool, float]:
        points, share = lost[recipe]
        return share is None, (points or 0.0) if share is None else 100 * share

    for recipe in sorted(lost, key=order):
        points, share = lost[recipe]
        yield [
            f"`{recipe}`",
            f"{ratios[recipe]:.0f}" if recipe in ratios else "",
            "" if points is None else f"{-points:+.2f}",
            "" if share is None else f"{100 * share:+.1f} %",
        ]


def make_page(
    result: Mapping[str, Any], store: convergence.Store, raced: Mapping[str, Race]
) -> str:
    """Return docs/choosing.md."""
    lost, facts = quality(store), result["machine"]
    lines = [
        "# Choosing a recipe",
        "",
        "Written by `python benchmarks/choosing.py` from measurements: quality as in "
        "[the convergence tables](../benchmarks/results/convergence.md), steps as forecast by the "
        f"model of `horovod-fftcomp advise` from codecs timed on {facts['cores']} cores of a CPU "
        f"({facts['cpu']}), a network of the given speed with {1e6 * LATENCY_S:.0f} us latency, "
        "and a spare core for encoding. Your model, network and cores differ: "
        "`horovod-fftcomp advise train.py` measures them (docs/advise.md).",
        "",
        "## In short",
        "",
        "- Exchange hides behind the backward pass, or takes little of a step: `none`. Compression "
        "only costs then.",
        "- Quality must not change: a recipe of the first table below. They lose no more than "
        f"{SAME[0]} points of accuracy of a ResNet under SGD (`resnet`) and {100 * SAME[1]:.0f} % "
        "of the loss of a toy language model with 23,136 parameters under AdamW (`charlm`); `fp16` "
        "stands there too, untrained.",
        "- **The optimizer is Adam or AdamW**, and the model no toy: these tables promise too "
        "much. A GPT loses several percent or more by `fft` and `topk` and nothing by "
        "`dither(ratio=40)`, at 39 times fewer bytes (two seeds, one learning rate): "
        "[Adam and AdamW](training.md#adam-and-adamw).",
        "- The network is so slow that more steps are cheap: a recipe of the second table, and "
        "more steps, or some dense steps first (`warmup_steps`).",
        '- Gathered payloads grow with the ranks. `exchange="auto"`, the default, exchanges shards '
        "where that takes fewer bytes: here such recipes stand by themselves, with "
        "`exchange=sharded`. The others gather. Or exchange less often (`LocalSteps`).",
        "",
    ]
    for title, limits in (("As good as dense", SAME), ("Good with more steps", NEAR)):
        allowed = {name for name, change in lost.items() if holds(change, limits)}
        if limits == SAME:
            allowed |= {"fp16"}
        lines += [f"## {title}", ""]
        lines += [
            f"The fastest of {', '.join(f'`{name}`' for name in sorted(allowed - {'none'}))}; "
            f"at most {limits[0]} points lost on `resnet`, {100 * limits[1]:.0f} % on `charlm`. "
            "Of those that take as long, within 5 %, the one that loses least of a gradient. How "
            "many times faster a step is than dense, and than with `fp16`, stands beside it; in "
            "brackets the first as a share of the speed-up if an exchange took no time; "
            "`none`: less than 5 %.",
            "",
        ]
        for model in MODELS:
            head = [model.name, *(f"{ranks} ranks" for ranks in RANKS)]
            options = options_of(model, result["models"])
            lines += [*table(head, picks(model, options, allowed)), ""]
    lines += [
        "## Time to a loss",
        "",
        f"Steps until the validation loss of `charlm` is {LOSS}, and how many times sooner than "
        "with 16-bit gradients (`fp16`) that is: losses as trained with "
        f"{convergence.LEARNERS} learners, times of as many ranks as forecast for {LIMITED.name}. "
        f"Recipes that do not get there in {convergence.KINDS['charlm'].steps} steps are left out; "
        "`fp16`, untrained, has the losses of `none`.",
        "",
        *table(
            ["recipe", "steps", *(f"{speed:g} Gbit/s" for speed in RACE_GBIT_PER_S)],
            race_rows(raced),
        ),
        "",
        f"![Loss against time](../benchmarks/results/{PLOT.name})",
        "",
        "## What limits a sharded exchange",
        "",
        f"Parts of a step of the fastest sharded recipe that is as good as dense, {LIMITED.name}, "
        "on links of 1 Gbit/s, in milliseconds. Encoding and exchange count as far as they delay "
        "the step.",
        "",
        *table(["ranks", "recipe", *PARTS], limit_rows(result["models"], lost)),
        "",
        "## What each recipe costs in quality",
        "",
    ]
    lines += [
        "Ratio: of the compressed tensors of `resnet`, as sent. Points of accuracy on `resnet` "
        "(one test image is 0.22) and change of the loss on `charlm`, where it was trained; the "
        "settings are those of the papers rather than the defaults where they are given. `dgc`, "
        "`sketchsgd`, `signsgd` and `signum` had no momentum but their own, the last two a "
        "hundredth of the learning rate. On `charlm` the baselines of the papers have one seed.",
        "",
    ]
    head = ["recipe", "ratio", "points on resnet", "loss on charlm"]
    lines += [*table(head, quality_rows(lost, ratios_of(store))), ""]
    return "\n".join(lines)


def main() -> None:
    """Time codecs unless told otherwise, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.report:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    store = convergence.Store(convergence.RESULTS / "convergence.json", "table")
    raced = race(result["models"], store)
    plot_race(raced)
    PAGE.write_text(make_page(result, store, raced), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
