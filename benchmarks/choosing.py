"""Write docs/choosing.md: which recipe for which network, model and number of ranks.

    python benchmarks/choosing.py            # times all codecs here, then writes the page
    python benchmarks/choosing.py --new      # times those that results/choosing.json lacks
    python benchmarks/choosing.py --report   # writes the page from results/choosing.json
    python benchmarks/choosing.py --example  # runs the worked example, then as --report

Quality is that of results/convergence.json and results/language_model; steps are forecasts of
``horovod_fftcomp.tools.advise.cost_model``, from codecs timed on this machine's CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import convergence
import language_model
import language_model_report
import numpy as np
from rich.progress import track

from horovod_fftcomp.cli.arguments import recipe_choices
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.advise.cost_model import Compute, Message, Transfer, given_network

HERE = Path(__file__).resolve().parent
RESULT, PAGE = HERE / "results" / "choosing.json", HERE.parent / "docs" / "choosing.md"
# A model of 100 M parameters on four nodes; each command and what it printed.
EXAMPLE = HERE / "results" / "choosing_example.json"
COMMAND = "horovod-fftcomp advise --parameters 100M --gbit-per-s {} --ranks 4"
SAME, NEAR = (0.5, 0.02), (1.2, 0.15)  # points of accuracy on resnet, share of charlm's loss
ADAM_SAME, ADAM_NEAR = 0.005, 0.05  # share of the GPT's loss under Adam
SHARDED = "dither(ratio={}, exchange=sharded)"
FIRST_MOMENTS = "{} after 100 dense steps, every 50th step by dither(ratio={})"
# Of the GPT's rows those that are timed here, by what its 4 learners exchanged; the others lose
# more at the same ratio.
ADAM = {
    **{SHARDED.format(ratio): f"dither(ratio={ratio})" for ratio in (20, 30)},
    **{f"dither(ratio={ratio})": f"dither(ratio={ratio})" for ratio in (40, 60, 80)},
    SHARDED.format(40): SHARDED.format(40),
    **{recipe: FIRST_MOMENTS.format(recipe, by) for recipe, by in (
        ("dither(ratio=100, momentum=0.9)", 20),
        ("dither(ratio=160, bucket=1024, momentum=0.9)", 40),
    )},
}  # fmt: skip
LATENCY_S = 50e-6
AS_LONG = 0.05  # of recipes that take at most so much longer than the fastest, the first counts
PASSES = 3
UNTRAINED = None, None
BY_SGD = ("dither(ratio=20)", "dither(ratio=30)", "fft", "fft after 100 dense steps")
OURS = "adamw-ours"  # the package's AdamW, in results/language_model


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
FEWER_BYTES = 1.5  # with so many times fewer bytes than where it was trained, a row is left out
GBIT_PER_S = (0.1, 0.3, 1, 3, 10, 25)
RANKS = (2, 8, 32, 128)
ANSWER_GBIT_PER_S, ANSWER_RANKS = (0.1, 1, 10), 8
# On GPUs: times of the codecs on an H200, or None: as long as its memory takes for their bytes.
GPU_RESULT = HERE / "results" / "gpu_first_minutes.json"
ON_GPUS = {
    "fp16": None,
    SHARDED.format(20): None,
    "fft(exchange=sharded)": "100 M, fft",
    "topk(exchange=sharded)": "100 M, topk",
}
GPU_MODEL = Model("100 M parameters, 100 ms a step", ((1024, 1024),) * 96, 0.1)
N_NODES, PER_NODE, NODE_GBIT_PER_S = 8, 8, (10, 25, 100)


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


def size_of(section: language_model_report.Section) -> str:
    """Return the number of parameters in words."""
    return f"{section.rows[0].mean('parameters') / 1e6:.1f} M parameters"


def under_adam(
    folder: Path,
) -> tuple[
    language_model_report.Section, language_model_report.Section, dict[str, dict[str, float]]
]:
    """Return two GPTs' results, and by optimizer the smaller one's loss over uncompressed training.

    As a share of the strongest baseline's loss, each row at its best learning rate, on the same
    seeds.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    section, larger, *_ = language_model_report.sections(records)
    strongest, found = section.strongest, {}
    for row in section.rows:
        seeds = row.runs[row.best].keys() & strongest.runs[strongest.best].keys()
        share = row.loss(row.best, seeds) / strongest.loss(strongest.best, seeds) - 1
        found.setdefault(row.optimizer, {})[row.recipe] = share
    return section, larger, found


def holds(lost: tuple[float | None, float | None], limits: tuple[float, float]) -> bool:
    """Tell whether a recipe was trained on both tasks and lost no more than ``limits``."""
    return all(
        change is not None and change <= limit for change, limit in zip(lost, limits, strict=True)
    )


def codec_s(part: Transfer) -> float:
    """Return the seconds that a rank of eight computes for a part of an exchange."""
    there = part.on(8)
    return there.encode_s + there.decode_s


def measure(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a step of every recipe and model, each the fastest of those timed here.

    Those in ``known`` are not timed again.
    A machine that others share is slow at times, so all recipes are timed in several passes.
    """
    recipes = [*ROWS[1:], *ADAM, "fp16"]
    sizes = {model.numel: model for model in MODELS}
    jobs = [
        (model, convergence.recipe_of(recipe))
        for model in sizes.values()
        for recipe in recipes
        if convergence.recipe_of(recipe) not in known.get(str(model.numel), {})
    ]
    fastest: dict[tuple[int, str], advice.Option] = {}
    for model, recipe in track(PASSES * jobs, "timing codecs"):
        [choice] = recipe_choices(recipe)
        options = convergence.with_exchange(choice.name, choice.options)
        option = advice.compressed(choice._replace(options=options), model.tensors, {}, 3)
        before = fastest.get((model.numel, recipe), option)
        pairs = zip(before.parts, option.parts, strict=True)
        parts = [min(pair, key=codec_s) for pair in pairs]
        fastest[model.numel, recipe] = option._replace(parts=parts)
    timed = {str(numel): dict(known.get(str(numel), {})) for numel in sizes}
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


def pick(
    model: Model, options: Mapping[str, advice.Option], allowed: set[str], speed: float, ranks: int
) -> str:
    """Return the fastest allowed recipe on a network, with its gains.

    Of those that take as long the first, which loses least of a gradient.
    """
    chosen = [options["none"], *(o for name, o in options.items() if name in allowed)]
    network, compute = given_network(speed, LATENCY_S), Compute(model.compute_s)
    found = advice.forecasts(chosen, compute, network, ranks)
    clear = [forecast for forecast in found[1:] if forecast.speed_up(found[0])[0] > 1]
    if not clear:
        return "`none`"
    fastest_s = min(forecast.time.total_s for forecast in clear)
    best = next(f for f in clear if (1 - AS_LONG) * f.time.total_s <= fastest_s)
    [fp16] = advice.forecasts([options["fp16"]], compute, network, ranks)
    dense, half_s, best_s = (one.time.total_s for one in (found[0], fp16, best))
    share = best.time.compute_s / best_s
    return f"`{best.option.label}` {dense / best_s:.1f}x, {half_s / best_s:.1f}x ({share:.0%})"


def picks(
    model: Model, options: Mapping[str, advice.Option], allowed: set[str]
) -> Iterator[list[str]]:
    """Yield a row for each network: the fastest allowed recipe on each number of ranks."""
    for speed in GBIT_PER_S:
        cells = (pick(model, options, allowed, speed, ranks) for ranks in RANKS)
        yield [f"{speed:g} Gbit/s", *cells]


def as_trained(recipe: str, options: Mapping[str, advice.Option], ratio: float | None) -> bool:
    """Tell whether a recipe sends LIMITED's bytes about as its quality was measured."""
    sent = options[recipe].sent_nbytes
    return ratio is None or 4 * LIMITED.numel / sent < FEWER_BYTES * ratio


def table(head: list[str], rows: Iterator[list[str]]) -> list[str]:
    """Return a Markdown table, its first column on the left."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def limit_rows(
    timed: Mapping[str, Any], lost: Mapping[str, tuple[float | None, float | None]]
) -> Iterator[list[str]]:
    """Yield the parts of a step of the fastest sharded recipe that is as good as dense."""
    options = options_of(LIMITED, timed)
    allowed = [
        option
        for name, option in options.items()
        if "sharded" in name and holds(lost.get(name, UNTRAINED), SAME)
    ]
    network = given_network(1, LATENCY_S)
    for ranks in RANKS if allowed else ():
        found = advice.forecasts(allowed, Compute(LIMITED.compute_s), network, ranks)
        best = min(found, key=lambda forecast: forecast.time.total_s)
        parts = (f"{1e3 * getattr(best.time, f'{part}_s'):.0f}" for part in PARTS)
        yield [str(ranks), f"`{best.option.label}`", *parts]


def on_gpus(option: advice.Option, case: str | None, node_size: int) -> advice.Option:
    """Return the exchange of GPU_MODEL, made of that of LIMITED, with times of a GPU."""
    runs = json.loads(GPU_RESULT.read_text(encoding="utf-8"))["runs"]
    cases = {line["case"]: line for run in runs for line in run["lines"] if "copy_gb_s" in line}
    dense_nbytes, first = 4 * GPU_MODEL.numel, option.parts[2:]
    of_kind = cases[case or "100 M, topk"]
    # Encoding reads the gradients and writes the payload, decoding the other way round.
    passes = dense_nbytes + option.sent_nbytes * GPU_MODEL.numel / LIMITED.numel
    bound_s = passes / of_kind["copy_gb_s"] / 1e9
    encode_s, decode_s = bound_s, bound_s
    if case is not None:
        encode_s, decode_s = of_kind["encode_ms"] / 1e3, of_kind["decode_sum_ms"] / 1e3
    times = GPU_MODEL.numel // LIMITED.numel
    share = 1 / (times * len(first))
    parts = [
        Transfer(
            (turn + part.ready) / times, part.messages, share * encode_s, share * decode_s,
            node_size=node_size, dense_nbytes=round(share * dense_nbytes),
        )
        for turn in range(times) for part in first
    ]  # fmt: skip
    return option._replace(parts=parts)


def node_rows(options: Mapping[str, advice.Option]) -> Iterator[list[str]]:
    """Yield a row for each recipe, without nodes and with them: ms of a step on N_NODES nodes."""
    none = advice.dense(GPU_MODEL.tensors)
    rows = [("`none`", none)]
    for recipe, case in ON_GPUS.items():
        rows.append((f"`{recipe}`", on_gpus(options[recipe], case, 1)))
        if recipe != "fp16":
            by_nodes = on_gpus(options[recipe], case, PER_NODE)
            rows.append((f"`{recipe}`, `ranks_per_node={PER_NODE}`", by_nodes))
    for label, option in rows:
        cells = []
        for speed in NODE_GBIT_PER_S:
            network = given_network(speed, LATENCY_S, 0.0, node_size=PER_NODE)
            compute, ranks = Compute(GPU_MODEL.compute_s), N_NODES * PER_NODE
            base, found = advice.forecasts([none, option], compute, network, ranks)
            total_s = found.time.total_s
            cells.append(f"{1e3 * total_s:.0f} ms ({base.time.total_s / total_s:.1f}x)")
        yield [label, *cells]


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


HOW = (
    "Beside each recipe: how many times faster a step is than uncompressed, and than with `fp16`; "
    "in brackets the first as a share of the speed-up if an exchange took no time. `none`: less "
    "than 5 % faster. Of recipes that take as long, within 5 %, the one that loses least of a "
    "gradient."
)


def names(recipes: Iterable[str]) -> str:
    """Return recipes as words of a sentence."""
    return ", ".join(f"`{recipe}`" for recipe in recipes)


def make_page(result: Mapping[str, Any], store: convergence.Store, folder: Path) -> str:
    """Return docs/choosing.md."""
    lost, ratios, facts = quality(store), ratios_of(store), result["machine"]
    section, larger, losses = under_adam(folder)
    options = {model: options_of(model, result["models"]) for model in MODELS}
    fits = {name for name in lost if as_trained(name, options[LIMITED], ratios.get(name))}
    own = losses[OURS]

    def good(limits: tuple[float, float]) -> set[str]:
        return {name for name in fits if holds(lost[name], limits)}

    def good_under_adam(limit: float) -> set[str]:
        return {recipe for recipe, row in ADAM.items() if own.get(row, limit + 1) <= limit}

    adam = good_under_adam(ADAM_SAME) | {"fp16"}
    trained = {row.recipe: row.loss(row.best) for row in section.rows if row.optimizer == "sgd"}
    by_sgd = {recipe: loss / trained["none"] - 1 for recipe, loss in trained.items()}
    same = (lost["dither(ratio=30)"][0] or 0) <= SAME[0] and by_sgd["dither(ratio=30)"] <= ADAM_SAME
    sgd = {"fp16", *(("dither(ratio=30)", SHARDED.format(30)) if same else ())}
    [at_40] = [
        row for row in larger.rows if (row.recipe, row.optimizer) == ("dither(ratio=40)", OURS)
    ]
    lines = [
        "# Choosing a recipe",
        "",
        f"For a model of {LIMITED.name}, on {ANSWER_RANKS} ranks, at the loss of uncompressed "
        "training:",
        "",
        *table(
            ["link", "Adam, AdamW", "SGD"],
            (
                [
                    f"{speed:g} Gbit/s" + " and above" * (speed == ANSWER_GBIT_PER_S[-1]),
                    *(
                        pick(LIMITED, options[LIMITED], some, speed, ANSWER_RANKS)
                        for some in (adam, sgd)
                    ),
                ]
                for speed in ANSWER_GBIT_PER_S
            ),
        ),
        "",
        HOW,
        "",
        "- Exchange hides behind the backward pass, or takes little of a step: `none`. Compression "
        "only costs then.",
        f"- Adam and AdamW: losses are those of a GPT of {size_of(section)}, each row at its best "
        "learning rate ([table](../benchmarks/results/language_model.md)). `dither` needs no state "
        "and no warm-up; `dither(ratio=20)` and `(ratio=30)` were trained with torch's AdamW too, "
        "all with the [`AdamW` of this package](training.md#adam-and-adamw). Rows with "
        "`momentum` send [first moments](training.md#first-moments), and gradients in every 50th "
        "step, which is not forecast here: 5 to 8 % more bytes. With "
        f"`dither(ratio=40)` the loss of a GPT of {size_of(larger)} changes by "
        f"{at_40.over(larger.strongest)} (one seed). Recipes with error feedback, as `fft` and "
        "`topk`, lose much there.",
        "- SGD: what loses nothing of a small ResNet (`dither(ratio=30)`: "
        f"{-(lost['dither(ratio=30)'][0] or 0):+.2f} "
        f"points of accuracy, `fft`: {-(lost['fft'][0] or 0):+.2f}) and of that GPT (one seed, at "
        "0.3 or the better of 0.1 and 0.3: "
        + ", ".join(f"`{name}` {100 * by_sgd[name]:+.0f} %" for name in BY_SGD)
        + ").",
        '- The network is so slow that more steps are cheap: the tables "good with more steps", '
        "and more steps, or more dense steps first (`warmup_steps`).",
        '- Gathered payloads grow with the ranks. `exchange="auto"`, the default, exchanges shards '
        "where that takes fewer bytes: here such recipes stand by themselves, with "
        "`exchange=sharded`. The others gather. Or exchange less often (`LocalSteps`).",
        "",
        "Written by `python benchmarks/choosing.py` from measurements: steps are forecast by the "
        f"model of `horovod-fftcomp advise` from codecs timed on {facts['cores']} cores of a CPU "
        f"({facts['cpu']}), a network of the given speed with {1e6 * LATENCY_S:.0f} us latency, "
        "and a spare core for encoding. Your model, network and cores differ: "
        "`horovod-fftcomp advise train.py` measures them ([docs/advise.md](advise.md)).",
        "",
    ]
    lines += example(json.loads(EXAMPLE.read_text(encoding="utf-8")))
    for title, limit in (
        ("as good as uncompressed", ADAM_SAME),
        ("up to 5 % more loss", ADAM_NEAR),
    ):
        allowed = good_under_adam(limit)
        lines += [f"## Adam and AdamW: {title}", ""]
        lines += [
            f"The fastest of {names(sorted(allowed))}; at most {100 * limit:g} % more loss of the "
            "GPT than the strongest uncompressed training.",
            "",
            *pages_of(options, allowed),
        ]
    for title, limits in (("as good as uncompressed", SAME), ("good with more steps", NEAR)):
        allowed = good(limits) | ({"fp16"} if limits == SAME else set())
        lines += [f"## Small convolutional nets under SGD: {title}", ""]
        lines += [
            f"The fastest of {names(sorted(allowed - {'none'}))}; at most {limits[0]} points of "
            f"accuracy of the ResNet lost, and {100 * limits[1]:.0f} % of the loss of a toy "
            "language model with 23,136 parameters under AdamW (`charlm`; `fp16` was not trained). "
            f"Left out: {names(sorted(set(lost) - fits))}, which send so much less here than where "
            "they were trained that their quality there says nothing.",
            "",
            *pages_of(options, allowed),
        ]
    lines += [
        "## What limits a sharded exchange",
        "",
        f"Parts of a step of the fastest sharded recipe of the third section, {LIMITED.name}, "
        "on links of 1 Gbit/s, in milliseconds. Encoding and exchange count as far as they delay "
        "the step (exposed: of the exchange).",
        "",
        *table(["ranks", "recipe", *PARTS], limit_rows(result["models"], lost)),
        "",
        f"## {N_NODES} nodes of {PER_NODE} GPUs",
        "",
        f"Forecast of a step under NCCL, {GPU_MODEL.name}, by the link of a node, and in brackets "
        "how many times faster than uncompressed; inside a node each GPU sends 300 GB/s (NVLink). "
        "With [`ranks_per_node`](training.md#several-ranks-on-a-node) a node's bytes pass its link "
        f"once, and each GPU encodes 1/{PER_NODE} of a bucket. Codecs of `fft` and `topk` take "
        "what they took on an H200 (sums of 8 payloads; [docs/gpu.md](gpu.md)). Those of `dither` "
        "and `fp16` were not measured there, and are taken to last as long as its memory takes to "
        "read the gradients and write the payload, the least possible. **No part of this table was "
        "measured on several GPUs.** "
        "`horovod-fftcomp advise --gbit-per-s 25 --ranks 64 --ranks-per-node 8` forecasts nodes of "
        "CPU ranks ([docs/advise.md](advise.md)).",
        "",
        *table(
            ["recipe", *(f"{speed} Gbit/s" for speed in NODE_GBIT_PER_S)],
            node_rows(options[LIMITED]),
        ),
        "",
        "## What each recipe costs in quality",
        "",
        "Under Adam, of a GPT: [language models](../benchmarks/results/language_model.md), with "
        "the time to a loss. Here: ratio of the compressed tensors of `resnet`, as sent; points of "
        "accuracy on `resnet` under SGD (one test image is 0.22), and change of the loss on "
        "`charlm`, a toy, under AdamW, where it was trained; "
        "[each run](../benchmarks/results/convergence.md). The settings are those of the papers "
        "rather than the defaults where they are given, and without dense steps at the start, "
        "which those with error feedback have by default. `dgc`, `sketchsgd`, `signsgd` and "
        "`signum` had no momentum but their own, the last two a hundredth of the learning rate. On "
        "`charlm` the baselines of the papers have one seed.",
        "",
    ]
    head = ["recipe", "ratio", "points on resnet", "loss on charlm"]
    lines += [*table(head, quality_rows(lost, ratios)), ""]
    return "\n".join(lines)


def run_example() -> dict[str, str]:
    """Return the commands of the worked example with their outputs, each the first of 5 tries.

    Of one that measured contradictions, as on a busy machine, five times, what is known before.
    """
    found = json.loads(EXAMPLE.read_text(encoding="utf-8")) if EXAMPLE.exists() else {}
    for command in map(COMMAND.format, (1, 10)):
        arguments = [sys.executable, "-m", "horovod_fftcomp", *shlex.split(command)[1:]]
        environment = os.environ | {"COLUMNS": "120"}
        for _ in range(5):
            done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, text=True)
            if not done.returncode:
                found[command] = "\n".join(line.rstrip() for line in done.stdout.splitlines())
                break
            print(f"{command} ended with status {done.returncode}:\n{done.stdout}")
    return found


def example(found: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the worked example."""
    yield from (
        "## A worked example",
        "",
        "A model of 100 M parameters on four nodes, one rank each: how much faster would a step "
        "be? Nothing of it has to exist: `--parameters` gives matrices of that size, and a step "
        "takes as long in proportion as that of the model above, 318 ms; `--compute-ms` takes "
        "yours, and `advise train.py` measures it. Codecs are timed on the cores of this machine, "
        "here two, in a minute or two.",
        "",
    )
    for command, output in found.items():
        yield from ("```text", f"$ {command}", output, "```", "")
    yield from (
        "Faster recipes may be in the table: of those whose ranges overlap that of the fastest the "
        "one is recommended that cost the least loss. For slower links give `--gbit-per-s 1`.",
        "",
    )


def pages_of(
    options: Mapping[Model, Mapping[str, advice.Option]], allowed: set[str]
) -> Iterator[str]:
    """Yield a table for each model."""
    for model, its in options.items():
        yield from table([model.name, *(f"{ranks} ranks" for ranks in RANKS)],
                         picks(model, its, allowed))  # fmt: skip
        yield ""


def main() -> None:
    """Time codecs unless told otherwise, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--new", action="store_true", help="measure only recipes without a result")
    parser.add_argument("--example", action="store_true", help="run the commands of the example")
    args = parser.parse_args()
    if args.example:
        EXAMPLE.write_text(json.dumps(run_example(), indent=1) + "\n", encoding="utf-8")
    elif not args.report:
        known = json.loads(RESULT.read_text(encoding="utf-8"))["models"] if args.new else {}
        RESULT.write_text(json.dumps(measure(known), indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    store = convergence.Store(convergence.RESULTS / "convergence.json", "table")
    page = make_page(result, store, language_model.RESULTS)
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
