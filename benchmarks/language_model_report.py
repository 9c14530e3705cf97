"""Tables and plots of the runs of language_model.py."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from language_model_training import AFTER, FALLING, SHA256, options_of
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.progress import track

from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.engine.recipe_text import RecipeChoice, parse_recipe
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.advise.cost_model import Compute, Message, Transfer, given_network
from horovod_fftcomp.types import Array

# Steps are forecast for this model, as in choosing.py: 25 M parameters, 80 ms of computation.
TENSORS = [Tensor(f"layer{i}", (1024, 1024)) for i in range(24)]
COMPUTE = Compute(0.08)
GBIT_PER_S, LATENCY_S = (0.1, 1.0, 10.0), 50e-6
PASSES, REPEAT = 3, 3  # timings of a codec, of which the fastest counts
REACHED = 0.8  # of its steps the strongest baseline has made when it has the loss to reach
LOOKS = [f"{style}C{colour}" for style in ("-", "--", ":") for colour in range(1, 10)]

Record = dict[str, Any]


class Row(NamedTuple):
    """Runs of a recipe with an optimizer: results by learning rate and seed."""

    recipe: str
    optimizer: str
    runs: dict[float, dict[int, Record]]

    @property
    def best(self) -> float:
        """Learning rate of the lowest mean loss, of those with the most seeds."""
        most = max(map(len, self.runs.values()))
        return min((lr for lr in self.runs if len(self.runs[lr]) == most), key=self.loss)

    def loss(self, lr: float, seeds: Iterable[int] | None = None) -> float:
        """Return the mean of the final losses, of all seeds or of these."""
        runs = self.runs[lr]
        return float(np.mean([runs[seed]["validation_loss"] for seed in seeds or runs]))

    def mean(self, key: str) -> Array:
        """Return the mean over the seeds of a list or number in the results at the best rate."""
        return np.mean([run[key] for run in self.runs[self.best].values()], axis=0)

    def over(self, other: Row) -> str:
        """Return how much higher the loss is than another row's, each at its best rate.

        Means of the seeds that both have; "" if there is none.
        """
        seeds = self.runs[self.best].keys() & other.runs[other.best].keys()
        if not seeds or other is self:
            return ""
        change = self.loss(self.best, seeds) / other.loss(other.best, seeds) - 1
        return f"{100 * change:+.1f} %"


class Section(NamedTuple):
    """All rows of one size, number of learners, number of steps and text."""

    size: str
    learners: int
    steps: int
    sha256: str
    rows: list[Row]

    @property
    def name(self) -> str:
        """A word for files."""
        text = "" if self.sha256 == SHA256 else f"-{self.sha256[:8]}"
        return f"{self.size}-{self.learners}x{self.steps}{text}"

    @property
    def strongest(self) -> Row:
        """The uncompressed row of the lowest loss."""
        none = [row for row in self.rows if row.recipe == "none"]
        if not none:
            raise ValueError(f"{self.name} has no runs of none to compare with; make them first")
        most = max(len(row.runs[row.best]) for row in none)
        return min(
            (row for row in none if len(row.runs[row.best]) == most),
            key=lambda row: row.loss(row.best),
        )


def sections(records: Iterable[Record]) -> list[Section]:
    """Return the results in sections, the smallest models first."""
    found: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = {}
    ordered = sorted(records, key=lambda r: (r["parameters"], r["recipe"] != "none", r["lr"]))
    for record in ordered:
        key = tuple(record[name] for name in ("size", "learners", "steps", "text_sha256"))
        rows = found.setdefault(key, {})
        row = record["recipe"], record["optimizer"]
        runs = rows.setdefault(row, Row(*row, {})).runs
        runs.setdefault(record["lr"], {})[record["seed"]] = record
    return [Section(*key, list(rows.values())) for key, rows in found.items()]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table; the first two columns are words."""
    marks = ["---", "---", *["---:"] * (len(head) - 2)]
    return [f"| {' | '.join(line)} |" for line in (head, marks, *rows)]


def loss_rows(section: Section) -> Iterator[list[str]]:
    """Yield the losses of each row by learning rate, uncompressed ones first, then the best."""
    rates = sorted({lr for row in section.rows for lr in row.runs})
    yield ["recipe", "optimizer", "ratio", *(f"{lr:g}" for lr in rates),
           "over `none`", "over the strongest"]  # fmt: skip
    none = {row.optimizer: row for row in section.rows if row.recipe == "none"}
    for row in sorted(section.rows, key=lambda r: (r.recipe != "none", r.loss(r.best))):
        cells = [cell(row, lr) if lr in row.runs else "" for lr in rates]
        own = row.over(none[row.optimizer]) if row.optimizer in none else ""
        compared = [own, row.over(section.strongest)]
        yield [f"`{row.recipe}`", row.optimizer, f"{row.mean('ratio'):.1f}", *cells, *compared]


def cell(row: Row, lr: float) -> str:
    """Return mean, standard error and number of seeds of the loss; bold at the best rate."""
    losses = [run["validation_loss"] for run in row.runs[lr].values()]
    text = f"{np.mean(losses):.3f}"
    if len(losses) > 1:
        text += f" ± {np.std(losses, ddof=1) / math.sqrt(len(losses)):.3f} ({len(losses)})"
    return f"**{text}**" if lr == row.best else text


def timed_codecs(path: Path, recipes: Iterable[str]) -> dict[str, advice.Option]:
    """Return the exchange of each recipe for TENSORS; those not stored in ``path`` are timed."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"recipes": {}}
    missing = [recipe for recipe in recipes if recipe not in stored["recipes"]]
    for recipe in track(missing, "timing codecs", transient=True):
        name, options = options_of(AFTER.sub("", recipe).replace(FALLING, ""), steps=1)
        passes = [
            advice.compressed(RecipeChoice(recipe, name, options), TENSORS, {}, REPEAT).parts
            for _ in range(PASSES)
        ]
        fastest = [min(parts, key=computed_s) for parts in zip(*passes, strict=True)]
        stored["recipes"][recipe] = [asdict(part) for part in fastest]
    if missing:
        stored = {"machine": environment.describe(), "recipes": stored["recipes"]}
        path.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return {recipe: as_option(recipe, parts) for recipe, parts in stored["recipes"].items()}


def computed_s(part: Transfer) -> float:
    """Return the seconds that a rank of four computes for a part of an exchange."""
    there = part.on(4)
    return there.encode_s + there.decode_s


def as_option(recipe: str, parts: Iterable[Mapping[str, Any]]) -> advice.Option:
    """Return the option of a recipe from JSON values."""

    def transfer(part: Mapping[str, Any]) -> Transfer:
        messages = tuple(Message(*message) for message in part["messages"])
        sharded = part["sharded"] and transfer(part["sharded"])
        return Transfer(**{**part, "messages": messages, "sharded": sharded})

    return advice.Option(recipe, recipe, {}, [transfer(part) for part in parts], 0, 0.0)


def times_of(
    row: Row, section: Section, options: Mapping[str, advice.Option], gbit_per_s: float
) -> Array:
    """Return the forecast seconds at each evaluation.

    Where a step sent more or less than usual, as dense ones do, its time lies as far from the usual
    one towards a dense step's.
    """
    dense = advice.dense(TENSORS)
    pair = [dense, options.get(row.recipe, dense)]
    network = given_network(gbit_per_s, LATENCY_S)
    forecasts = advice.forecasts(pair, COMPUTE, network, section.learners)
    dense_s, usual_s = (forecast.time.total_s for forecast in forecasts)
    usual, whole = row.mean("usual_nbytes"), 4 * row.mean("parameters")
    towards = (row.mean("sent_nbytes_between") - usual) / (whole - usual) if whole > usual else 0.0
    steps = np.diff(row.mean("evaluated_at"), prepend=0)
    return np.cumsum(steps * (usual_s + towards * (dense_s - usual_s)))


def race_rows(section: Section, options: Mapping[str, advice.Option]) -> Iterator[list[str]]:
    """Yield steps and forecast seconds until each row has the loss to reach."""
    speeds = [f"{speed:g} Gbit/s" for speed in GBIT_PER_S]
    yield ["recipe", "optimizer", "steps", *speeds]
    target = loss_to_reach(section)
    found = []
    for row in section.rows:
        least = np.minimum.accumulate(row.mean("validation_losses"))
        if least[-1] > target:
            continue
        curves = [row.mean("evaluated_at")]
        curves += [times_of(row, section, options, speed) for speed in GBIT_PER_S]
        found.append((row, [float(np.interp(-target, -least, curve)) for curve in curves]))
    for row, (steps, *times) in sorted(found, key=lambda pair: pair[1][1]):
        yield [f"`{row.recipe}`", row.optimizer, f"{steps:.0f}", *(f"{t:.0f} s" for t in times)]


def loss_to_reach(section: Section) -> float:
    """Return the loss of the strongest baseline after REACHED of its steps."""
    row = section.strongest
    at, losses = row.mean("evaluated_at"), row.mean("validation_losses")
    return float(np.interp(REACHED * section.steps, at, losses))


def drawn(section: Section) -> list[Row]:
    """Return the strongest baseline and the rows that no other exceeds in ratio and in loss."""
    points = [(row, float(row.mean("ratio")), row.loss(row.best)) for row in section.rows]
    front = [
        row
        for row, ratio, loss in points
        if row is not section.strongest
        and not any(r >= ratio and x <= loss and (r, x) != (ratio, loss) for _, r, x in points)
    ]
    return [section.strongest, *sorted(front, key=lambda row: row.loss(row.best))]


def plot(section: Section, options: Mapping[str, advice.Option], path: Path) -> None:
    """Plot losses over steps, and over the forecast time on links of each speed."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    axes = figure.subplots(1, 1 + len(GBIT_PER_S), sharey=True)
    rows = drawn(section)
    for row, look in zip(rows, itertools.chain(["-k"], itertools.cycle(LOOKS)), strict=False):
        curves = [row.mean("evaluated_at")]
        curves += [times_of(row, section, options, speed) for speed in GBIT_PER_S]
        label = f"{row.recipe}, {row.optimizer} ({row.mean('ratio'):.0f}x)"
        for one, curve in zip(axes, curves, strict=True):
            one.plot(curve, row.mean("validation_losses"), look, label=label)
    strongest = section.strongest.loss(section.strongest.best)
    axes[0].set(xlabel="steps", ylabel="validation loss", title=section.name)
    axes[0].set_ylim(0.97 * strongest, 1.6 * strongest)
    for one, speed in zip(axes[1:], GBIT_PER_S, strict=True):
        one.set(xlabel="seconds, forecast", xscale="log", title=f"{speed:g} Gbit/s")
        one.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        one.xaxis.set_major_formatter("{x:g}")
        one.xaxis.set_minor_formatter(NullFormatter())
    for one in axes:
        one.axhline(loss_to_reach(section), color="grey", linewidth=0.8)
        one.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=110)


def section_lines(section: Section, options: Mapping[str, advice.Option], image: str) -> list[str]:
    """Return a section of the page."""
    strongest, [record, *_] = section.strongest, section.rows[0].runs[section.rows[0].best].values()
    text = "" if section.sha256 == SHA256 else f", other text ({section.sha256[:8]})"
    return [
        f"## {section.size}: {section.learners} learners, {section.steps} steps{text}",
        "",
        f"{record['parameters']:,} parameters. The strongest baseline is `none` with "
        f"{strongest.optimizer} at {strongest.best:g}.",
        "",
        *table(*split(loss_rows(section))),
        "",
        f"![Loss over steps and over time]({image})",
        "",
        f"Until the loss is {loss_to_reach(section):.3f}, which the strongest baseline has after "
        f"{REACHED:.0%} of its steps; rows that do not get there are left out:",
        "",
        *table(*split(race_rows(section, options))),
        "",
    ]


def losses(found: Iterable[Section]) -> dict[str, float]:
    """Return, by recipe, the change of the loss over ``none`` with the same optimizer.

    Of several rows, sections and optimizers the largest change, as a share rounded to a thousandth.
    """
    changes: dict[str, float] = {}
    for section in found:
        none = {row.optimizer: row for row in section.rows if row.recipe == "none"}
        for row in section.rows:
            base, recipe = none.get(row.optimizer), usual(row.recipe)
            if row is base or base is None or recipe is None:
                continue
            seeds = row.runs[row.best].keys() & base.runs[base.best].keys()
            if not seeds:
                continue
            change = round(row.loss(row.best, seeds) / base.loss(base.best, seeds) - 1, 3)
            changes[recipe] = max(change, changes.get(recipe, change))
    return dict(sorted(changes.items()))


def usual(recipe: str) -> str | None:
    """Return the recipe that does, with the package's own dense steps, what a row's does.

    None if there is none, as when an option is gone.
    """
    try:
        name, options = options_of(recipe, sys.maxsize)
        own = AFTER.sub("", recipe)
        warmup_steps = make_policy(name, **parse_recipe(own).options).warmup_steps
    except (TypeError, ValueError):
        return None
    return own if options["warmup_steps"] == warmup_steps else None


def losses_file(found: Iterable[Section]) -> str:
    """Return the text of ``horovod_fftcomp/tools/advise/losses.json``."""
    return json.dumps(losses(found), indent=1) + "\n"


def split(rows: Iterator[list[str]]) -> tuple[list[str], Iterator[list[str]]]:
    """Return head and rows of a table."""
    return next(rows), rows


def write(folder: Path, table_of_losses: Path | None = None) -> None:
    """Write page and plots of the results in ``folder`` beside it, and print the page.

    ``table_of_losses``: the file to write as well, see ``losses_file``.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    recipes = sorted({record["recipe"] for record in records} - {"none"})
    options = timed_codecs(folder.with_name(f"{folder.name}_codecs.json"), recipes)
    lines = [
        "# Language models",
        "",
        "Written by `python benchmarks/language_model.py --report`; "
        "[benchmarks/README.md](../README.md) tells how they are trained. Validation loss at the "
        "end, in nats a byte, by highest learning rate: mean ± standard error (seeds); bold: a "
        "row's best learning rate, of those with the most seeds. Ratio: of what is compressed, "
        "after the warm-up, with later dense steps. Over `none`: with the same optimizer; over the "
        "strongest: uncompressed baseline. Both compare each row at its best learning rate, on the "
        "seeds that both have. Times are forecasts for 25 M parameters and 80 ms of computation a "
        'step on as many ranks, with codecs timed on a CPU. Rows without "after 100 dense '
        'steps", the default of recipes with error feedback, compress from the first step on.',
        "",
    ]
    if table_of_losses:
        table_of_losses.write_text(losses_file(sections(records)), encoding="utf-8")
    for section in sections(records):
        image = folder.with_name(f"{folder.name}_{section.name}.png")
        plot(section, options, image)
        lines += section_lines(section, options, image.name)
    page = "\n".join(lines)
    folder.with_name(f"{folder.name}.md").write_text(page, encoding="utf-8")
    print(page)
