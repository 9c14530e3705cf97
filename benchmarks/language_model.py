"""Train byte-level GPTs as people train them: loss by recipe, optimizer and learning rate.

    python benchmarks/language_model.py --set baseline --set defaults   # hours of one core
    python benchmarks/language_model.py --recipe fft --lr 0.003 --seed 0  # one run: minutes
    python benchmarks/language_model.py --report                        # tables and plots

Each run is a file in results/language_model, written when it ends. Runs that are there are not made
again; one that was cut goes on where it was last saved, to the bit. Several processes may share the
work. With --device cuda a GPU computes the exchanges too, and a run that was cut begins anew.
"""

from __future__ import annotations

import argparse
import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from language_model_training import (
    EVALUATE_EVERY,
    FALLING,
    FIRST,
    LIBRARY,
    OPTIMIZERS,
    SHA256,
    SIZES,
    Run,
    Text,
    options_of,
    read_text,
    set_threads,
    train,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from horovod_fftcomp.cli.arguments import count, count_from_0, positive

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "language_model"
LOSSES = HERE.parent / "horovod_fftcomp" / "tools" / "advise" / "losses.json"
SCRATCH = HERE.parent / "out" / "language_model"


class Row(NamedTuple):
    """Runs of a recipe with an optimizer, at several learning rates and seeds."""

    recipe: str
    optimizer: str = "adamw"
    rates: Sequence[float] = (0.008, 0.005, 0.012, 0.003)  # in the order of runs
    seeds: Sequence[int] = (0, 1, 2)


FEW = {"rates": (0.003, 0.008), "seeds": (0,)}
# The package's AdamW, whose second moments come from uncompressed gradients alone.
SHARED = " after 100 dense steps, every {}th step by qsgd"
SETS = {
    "baseline": (
        Row("none", "adamw-ours"),
        Row("none", "adamw-unclipped"),
        Row("none"),
    ),
    # The best of all, at all rates and seeds.
    "finalists": (
        Row("none", "adamw-ours"),
        *(Row(f"dither(ratio={ratio})", "adamw-ours") for ratio in (20, 30, 40, 60)),
        Row("dither(ratio=20)"),
        Row("dither(ratio=30)"),
        Row("dct(density=0.15)" + SHARED.format(10), "adamw-ours"),
        Row("qsgd", "adamw-ours"),
        Row("fft(error_feedback=False)"),
    ),
    "shared": tuple(
        Row(recipe + SHARED.format(every), "adamw-ours", rates=(0.005, 0.008), seeds=(0,))
        for recipe, every in (
            ("dct(density=0.05)", 10),
            ("topk", 10),
            ("topk(density=0.01)", 50),
            ("fft", 10),
            ("powersgd(rank=4)", 10),
            ("dct(density=0.15, error_feedback=False)", 10),
        )
    )
    + tuple(
        Row(recipe, "adamw-ours", rates=(0.005, 0.008), seeds=(0,))
        for recipe in ("dither(ratio=16)", "dither(ratio=80)", "dither(ratio=100)")
    ),
    "defaults": (
        Row("qsgd", **FEW),
        Row("fft", **FEW),
        Row("topk(density=0.01)", **FEW),
        Row("dct(density=0.15)", **FEW),
        Row("bf16", **FEW),
        Row("powersgd(rank=4)", **FEW),
        Row("scalecom", **FEW),
        Row("random_block", **FEW),
        Row("topk", **FEW),
        Row("fp16", **FEW),
    ),
    # What README.md and docs/training.md name for AdamW, and what lost least in first trials.
    "recommended": (
        Row("dct(density=0.15, error_feedback=False)", **FEW),
        Row("fft after 100 dense steps", **FEW),
        Row("dither(ratio=60)", **FEW),
        Row("auto(ratio=100)", **FEW),
        Row("topk(density=0.01) after 100 dense steps", **FEW),
        Row("powersgd(rank=4) after 100 dense steps", **FEW),
        Row("auto(ratio=100)" + FIRST, **FEW),
        Row("dct(density=0.0125, bits=3)" + FIRST + FALLING, **FEW),
    ),
    "sgd": tuple(
        Row(recipe, "sgd", rates=(0.1, 0.3, 1.0), seeds=(0,))
        for recipe in ("none", "qsgd", "fft", "topk(density=0.01)")
    ),
    # Of a larger model, on a GPU.
    "large": tuple(
        Row(recipe, optimizer, rates=(rate,), seeds=(0,))
        for rate in (0.003, 0.0015)
        for recipe, optimizer in (
            ("none", "adamw"),
            ("none", "adamw-ours"),
            ("fft", "adamw"),
            ("topk(density=0.01)", "adamw"),
            ("fft after 50 dense steps, every 10th step by qsgd", "adamw-ours"),
            ("bf16", "adamw"),
            ("dct(density=0.15)", "adamw"),
            ("powersgd(rank=4)", "adamw"),
            ("auto(ratio=100)", "adamw"),
            ("dither(ratio=30)", "adamw"),
            ("dither(ratio=30)", "adamw-ours"),
            ("fft(error_feedback=False)", "adamw"),
        )
    ),
}


def runs_of(args: argparse.Namespace) -> list[Run]:
    """Return the runs that are asked for, the first seed of each row's learning rates first."""
    rows = [row for name in args.sets for row in SETS[name]]
    rows += [Row(recipe, how) for recipe in args.recipes for how in args.optimizers or ["adamw"]]
    runs = [
        Run(args.size, args.learners, args.steps, row.recipe, row.optimizer, lr, number)
        for row in rows
        for number in args.seeds or row.seeds
        for lr in args.rates or row.rates
    ]
    return list(dict.fromkeys(runs))


@contextmanager
def only_here(run: Run, scratch: Path) -> Iterator[bool]:
    """Return a context that tells whether no other process makes this run meanwhile."""
    with (scratch / f"{run.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError:
            yield False
        else:
            yield True


def make_runs(runs: Sequence[Run], text: Text, args: argparse.Namespace) -> None:
    """Make the runs that have no result, and write it after each."""
    args.out.mkdir(parents=True, exist_ok=True)
    args.scratch.mkdir(parents=True, exist_ok=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console()
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    with bar:
        whole = bar.add_task("all runs", total=len(runs))
        for number, run in enumerate(runs):
            path = args.out / f"{run.name}.json"
            with only_here(run, args.scratch) as is_free:
                if is_free and not path.exists():
                    say(bar, f"run {number + 1} of {len(runs)}: {run.name}")
                    make_run(run, text, path, args, bar)
            bar.advance(whole)


def make_run(run: Run, text: Text, path: Path, args: argparse.Namespace, bar: Progress) -> None:
    """Make a run and write its result to ``path``."""
    shown = bar.add_task(run.name, total=run.steps)
    for training in train(run, text, args.scratch, args.device):
        bar.update(shown, completed=training.step)
        if training.step % EVALUATE_EVERY == 0 or training.step == run.steps:
            loss, seconds = training.losses[-1], training.seconds
            say(bar, f"  step {training.step}: loss {loss:.4f}, {seconds:.0f} s")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(training.found(text), indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    (args.scratch / f"{run.name}.pt").unlink(missing_ok=True)
    bar.remove_task(shown)


def say(bar: Progress, line: str) -> None:
    """Print a line above the bar; where there is no terminal, there are only such lines."""
    bar.console.print(line, soft_wrap=True, highlight=False, markup=False)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    # fmt: off
    add("--set", dest="sets", action="append", choices=SETS, default=[],
        help="make the runs of these rows; may be given several times")
    add("--recipe", dest="recipes", action="append", default=[], metavar="RECIPE",
        help="make runs of this recipe, as 'topk(density=0.01) after 100 dense steps'")
    add("--optimizer", dest="optimizers", action="append", choices=OPTIMIZERS, default=[],
        help="with --recipe (default: adamw)")
    add("--lr", dest="rates", nargs="+", type=positive, help="in place of the rows' rates")
    add("--seed", dest="seeds", nargs="+", type=count_from_0, help="in place of the rows' seeds")
    add("--size", choices=SIZES, default="0.4M", help="parameters (default: %(default)s)")
    add("--learners", type=count, default=4, help="simulated ranks (default: %(default)s)")
    add("--steps", type=count, help="optimizer steps (default: the size's)")
    add("--device", default="cpu",
        help="where model and exchanges are computed, as cuda; runs on a GPU are not saved while "
        "under way (default: %(default)s)")
    add("--threads", type=count, default=1, help="CPU threads (default: %(default)s)")
    add("--library", type=Path, default=LIBRARY,
        help="folder of Python's library, the text (default: this Python's)")
    add("--any-text", action="store_true",
        help="accept another text than the pinned one; its results get a folder of their own")
    add("--out", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    add("--scratch", type=Path, default=SCRATCH,
        help="folder for runs under way (default: %(default)s)")
    add("--report", action="store_true", help="write tables and plots of the results")
    # fmt: on
    args = parser.parse_args(argv)
    args.steps = args.steps or SIZES[args.size].steps
    if not (args.report or args.sets or args.recipes):
        parser.error(f"give --set, of {', '.join(SETS)}; or --recipe; or --report")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Make what is left of the runs asked for, and the report."""
    args = parse_args(argv)
    set_threads(args.threads)
    runs = runs_of(args)
    for run in runs:
        options_of(run.recipe, run.steps)  # a mistake in the last row is told at once
    if runs:
        text = read_text(args.library, args.any_text)
        if text.sha256 != SHA256:
            args.out, args.scratch = (at / text.sha256[:8] for at in (args.out, args.scratch))
        make_runs(runs, text, args)
    if args.report:
        import language_model_report  # needs Matplotlib

        language_model_report.write(args.out, LOSSES if args.out == RESULTS else None)


if __name__ == "__main__":
    main()
