"""``horovod-fftcomp bench``: measure time, bytes and error of recipes on this machine."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from horovod_fftcomp.cli import bench_report, plots
from horovod_fftcomp.cli.arguments import (
    COMPRESSIONS,
    count,
    count_from_0,
    numels,
    output_path,
    picture_path,
    recipe_choices,
)
from horovod_fftcomp.cli.bench_report import Result
from horovod_fftcomp.cli.console import make_console, progress_bar, write_json
from horovod_fftcomp.cli.recipes import near_square
from horovod_fftcomp.engine.buckets import MIN_NUMEL, is_compressed
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.tools import bench, environment, gradient_files
from horovod_fftcomp.tools.bench import RecipeSession, Session
from horovod_fftcomp.tools.gradient_files import History

_RECIPES = "fp16,bf16,topk(density=0.01,bits=32),topk,fft,dct"
_BUSY = 0.7  # processes; more than what a previous run of this command adds to the load
_SIZES = "1M,25M"  # a layer, and all of a ResNet-50


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "bench",
        help="measure time, bytes and error of recipes on this machine",
        description="Measure time, bytes and error of recipes; docs/bench.md explains the columns.",
    )
    add_arguments(parser)
    parser.set_defaults(program=["horovod-fftcomp"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``run`` reads."""
    add = parser.add_argument
    told = f"compressions to measure (default: {_RECIPES})"
    add(
        "--compression",
        type=recipe_choices,
        action="extend",
        dest="recipes",
        metavar=COMPRESSIONS,
        help=told,
    )
    add("--all", action="store_true", help="measure every recipe")
    _add_data(parser)
    add("--threads", type=count, metavar="N", help="CPU threads of recipes and memcpy")
    add("--repeat", type=count, default=5, help="timings per median (default: %(default)s)")
    add("--json", type=output_path, metavar="FILE", help="write all numbers to FILE")
    add("--plot", type=picture_path, metavar="FILE.png", help="draw times and errors")
    parser.set_defaults(run=run, fail=parser.error, peers=None)


def _add_data(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    told = f"elements of synthetic gradients, as 25000000, 25M or 1e6 (default: {_SIZES})"
    names = "-n", "--numel"
    either.add_argument(*names, type=numels, action="extend", metavar="N[,N]", help=told)
    told = "recorded gradients: a folder with STEP.npz files, or a .npy or .npz file"
    either.add_argument("--gradients", type=Path, metavar="PATH", help=told)
    add = parser.add_argument
    add("--seed", type=count_from_0, default=0, help="seed of synthetic gradients (default: 0)")
    told = "skip arrays of PATH with fewer elements, as training does (default: %(default)s)"
    add("--min-numel", type=count, default=MIN_NUMEL, metavar="N", help=told)
    add("--per-tensor", action="store_true", help="also print a table for each tensor of PATH")


def run(parsed: argparse.Namespace) -> None:
    """Measure, print the tables and write the files.

    ``parsed.peers``: compressors to measure beside the recipes, as of ``benchmarks/peers.py``.
    """
    if parsed.all and parsed.recipes:
        parsed.fail("--all measures every recipe: leave --compression out, or --all")
    parsed.recipes = parsed.recipes or recipe_choices(",".join(RECIPES) if parsed.all else _RECIPES)
    histories, n_histories, data = _histories(parsed)
    if parsed.threads:
        threads.set_num_threads(parsed.threads)
    facts = environment.describe()  # before the load that this run makes
    results: list[Result] = []
    interrupted = False
    try:
        for result in _measured(parsed, histories, n_histories):
            results.append(result)
    except MemoryError as error:
        parsed.fail(f"{str(error) or 'the memory is full'}; take smaller tensors or fewer recipes")
    except KeyboardInterrupt:
        if not results:
            raise
        interrupted = True
        data = f"Interrupted: {len(results)} of {n_histories} tensors. {data}"
    shown = [bench_report.total(results, data)] if parsed.gradients else results
    _print(parsed, (results if parsed.per_tensor else []) + shown, data, facts)
    if parsed.json:
        content = {
            "command": shlex.join([*parsed.program, *parsed.arguments]),
            "machine": facts,
            "data": data,
            "repeat": parsed.repeat,
            "seed": parsed.seed,
            "tensors": [bench_report.as_json(result, parsed.recipes) for result in results],
        }
        if parsed.gradients:
            content["total"] = bench_report.as_json(shown[0], parsed.recipes)
        write_json(parsed.json, content)
    if parsed.plot:
        largest = max(shown, key=lambda result: result.ours[0].numel)
        title = f"{largest.title}, threads: {facts['threads']}, {facts['cpu']}"
        plots.write_bench(parsed.plot, largest.ours + largest.peers, title)
    if interrupted:
        raise KeyboardInterrupt


def _histories(parsed: argparse.Namespace) -> tuple[Iterable[History], int, str]:
    """Return (the gradients, their number of tensors, a description in words)."""
    if parsed.per_tensor and not parsed.gradients:
        parsed.fail("--per-tensor is for a file or folder of --gradients")
    if not parsed.gradients:
        sizes = parsed.numel or numels(_SIZES)
        made = (gradient_files.synthetic(size, seed=parsed.seed) for size in sizes)
        return made, len(sizes), f"synthetic gradients (Student's t, seed {parsed.seed})"
    try:
        histories = gradient_files.read(parsed.gradients)
    except (OSError, ValueError) as error:
        parsed.fail(str(error))
    kept = _compressed(histories, parsed.min_numel)
    if not kept:
        parsed.fail(
            f"{parsed.gradients}: each of the {len(histories)} arrays has fewer than "
            f"{parsed.min_numel} elements or is a vector, which training does not compress. "
            "Lower --min-numel to measure smaller matrices"
        )
    data = f"{len(kept)} tensors of {parsed.gradients.name}"
    if len(kept) < len(histories):
        data += f" ({len(histories) - len(kept)} vectors and small ones left out, as in training)"
    return kept, len(kept), data


def _compressed(histories: list[History], min_numel: int) -> list[History]:
    """Return the arrays that training would compress; vectors too if all arrays are flat."""
    all_flat = all(history.steps[0].ndim <= 1 for history in histories)
    return [
        history
        for history in histories
        if is_compressed(Tensor(history.name, history.steps[0].shape), min_numel)
        or (all_flat and history.steps[0].size >= min_numel)
    ]


def _measured(
    parsed: argparse.Namespace, histories: Iterable[History], n_histories: int
) -> Iterator[Result]:
    with progress_bar() as progress:
        task = progress.add_task("")
        for number, history in enumerate(histories, 1):
            first = history.steps[0].reshape(-1)
            other = first[::-1].copy()
            shape = history.steps[0].shape if parsed.gradients else near_square(first.size)
            tensor = Tensor(history.name, shape)
            sessions: list[Session] = [
                RecipeSession(choice.label, choice.name, choice.options, tensor, other)
                for choice in parsed.recipes
            ]
            if parsed.peers:
                sessions += parsed.peers.sessions(parsed.recipes, shape, other)
            progress.reset(
                task,
                total=bench.n_ticks(history, len(sessions), parsed.repeat),
                description=f"{history.name} ({number} of {n_histories})",
            )
            tick = functools.partial(progress.advance, task)
            found = bench.measure(history, sessions, parsed.repeat, tick)
            n_ours = len(parsed.recipes)
            yield Result(history.name, found[:n_ours], found[n_ours:])


def _print(
    parsed: argparse.Namespace, tables: Iterable[Result], data: str, facts: Mapping[str, Any]
) -> None:
    console = make_console()
    for result in tables:
        console.print(bench_report.table(result))
        for line in parsed.peers.lines(result, parsed.recipes) if parsed.peers else ():
            console.print(line)
        console.print()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    console.print(
        f"{data}. {facts['threads']} of {facts['cores']} cores of {facts['cpu']}; {versions}.\n"
        f"Medians of at least {parsed.repeat} timings. x: multiples of a memcpy of the "
        "gradient to allocated memory. EF: error feedback."
    )
    if not parsed.gradients:
        console.print(
            "Synthetic elements are independent, so transforms gain nothing on them: "
            "compare errors on your own --gradients."
        )
    if facts["load"] > _BUSY:
        load = f"The load before this run was {facts['load']:.1f} processes: times may be too high."
        console.print(load)
