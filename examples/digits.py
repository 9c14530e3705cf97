"""Shared by the digits examples of all frameworks: data, flags, progress and report."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from horovod_fftcomp import RECIPES, get_scheme

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # waiting ranks leave the core to others
LR_WARM_UP_EPOCHS = 2
UNTIMED_STEPS = 10  # the first one compiles the kernels
PARTS = ("compute", "encode", "exchange", "decode", "step")
CAPTION = f"""\
sent: bytes that a rank passes to collectives. ms: medians of all steps but the first \
{UNTIMED_STEPS}, mean of the ranks. encode, decode: from compression.stats(). compute: the \
rest of the step. exchange: """
# Okabe and Ito's colours, which the colour-blind can distinguish.
STYLES = ("#000000 o", "#E69F00 s", "#56B4E9 D", "#009E73 ^", "#D55E00 v", "#CC79A7 P")


class Run(NamedTuple):
    """Result of one training; losses (of each step) and ms are means over ranks."""

    recipe: str
    options: dict[str, object]
    accuracy: float
    sent_nbytes_per_step: float
    ratio: float
    ms_per_step: dict[str, float]
    losses: list[float]


class Seconds(NamedTuple):
    """Times of one step on this rank in seconds; ``step``: the whole step."""

    encode: float
    exchange: float
    decode: float
    step: float


class Clock:
    """Times steps, with their parts from the compressor's ``stats``."""

    def __init__(self, stats: Callable[[], dict]) -> None:
        self._stats = stats
        self._began, self._before = 0.0, stats()
        self.seconds: list[Seconds] = []

    def begin(self) -> None:
        """Begin a step."""
        self._before, self._began = self._stats(), time.perf_counter()

    def end(self) -> None:
        """End the step."""
        step, after = time.perf_counter() - self._began, self._stats()
        parts = (after[key] - self._before[key] for key in ("encode_s", "wait_s", "decode_s"))
        self.seconds.append(Seconds(*parts, step))


class Monitor:
    """Shows progress unless ``quiet``: a live bar in a terminal, else a line every two seconds."""

    def __init__(self, epochs: float, quiet: bool) -> None:
        # Open MPI gives ranks a pseudo-terminal without a size, and control codes would garble it.
        live = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
        plain = {} if live else {"force_terminal": False, "width": 100}
        self.console = Console(quiet=quiet, highlight=False, **plain)
        self.bar = Progress(console=self.console, disable=quiet or not live)
        self.bar.add_task("", total=epochs)
        self._task, self._printed = self.bar.tasks[0], time.monotonic()

    def advance(self, text: str, epochs: float) -> None:
        """Add ``epochs``, a number that may be fractional."""
        self.bar.update(self._task.id, advance=epochs, description=text)
        if self.bar.disable and time.monotonic() - self._printed >= 2:
            self._printed = time.monotonic()
            share, left = self._task.percentage, self._task.time_remaining or 0
            self.console.print(f"{text}  {share:3.0f} % of all, ETA {left:.0f} s")


def load_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return images to train and to test on, then their labels; the split never changes.

    Images: (n, 8, 8), float32 from 0 to 1.
    """
    data = load_digits()
    images, labels = (data.images / 16).astype(np.float32), data.target
    return train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)


def make_run(
    recipe: str,
    options: dict,
    *,
    accuracy: float,
    stats: dict,
    losses: list[float],
    seconds: list[Seconds],
    weights: Iterable[np.ndarray],
    gather: Callable[[object], list],
) -> Run:
    """Return the result: medians over steps, means over ranks.

    ``gather``: Horovod's ``allgather_object``. Raises RuntimeError on all ranks unless
    their ``weights`` are the same to the last bit.
    """
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
    encode, exchange, decode, step = 1e3 * np.transpose(seconds[UNTIMED_STEPS:] or seconds)
    parts = (step - encode - exchange - decode, encode, exchange, decode, step)
    own = digest, [np.median(part) for part in parts], losses
    digests, ms, losses_of_all = zip(*gather(own), strict=True)
    differing = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if differing:
        raise RuntimeError(f"{recipe}: weights of ranks {differing} differ from those of rank 0")
    timed = dict(zip(PARTS, np.mean(ms, axis=0).tolist(), strict=True))
    sent, options = stats["sent_nbytes"] / len(losses), {**RECIPES[recipe].options, **options}
    mean_losses = np.mean(losses_of_all, axis=0).tolist()
    return Run(recipe, options, accuracy, sent, stats["ratio"], timed, mean_losses)


def make_table(runs: list[Run], exchange: str) -> Table:
    """Return the table of all runs; ``exchange``: the caption of that column."""
    names = ("test accuracy", "kB/step sent", "ratio", *(f"{part} ms" for part in PARTS))
    columns = [Column(name, justify="right") for name in names]
    table = Table("recipe", *columns, caption=CAPTION + exchange, caption_justify="left")
    for run in runs:
        cells = (
            f"{run.accuracy:.2%}",
            f"{run.sent_nbytes_per_step / 1e3:.1f}",
            f"{run.ratio:.1f}",
        )
        table.add_row(run.recipe, *cells, *(f"{ms:.2f}" for ms in run.ms_per_step.values()))
    return table


def save(runs: list[Run], args: argparse.Namespace, name: str, ranks: int) -> Path:
    """Write numbers and plot; return their path without suffix."""
    path = args.out.resolve() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {**vars(args), "out": str(args.out), "ranks": ranks}
    numbers = json.dumps({**settings, "runs": [run._asdict() for run in runs]}, indent=1)
    path.with_suffix(".json").write_text(numbers, encoding="utf-8")
    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).subplots()
    for run, style in zip(runs, itertools.cycle(STYLES), strict=False):
        losses = np.reshape(run.losses, (args.epochs, -1)).mean(1)
        steps = np.linspace(0, len(run.losses), args.epochs + 1)[1:]
        sent_mb, label = run.sent_nbytes_per_step * steps / 1e6, f"{run.recipe}, {run.accuracy:.1%}"
        axes.loglog(sent_mb, losses, f"{style[-1]}-", color=style[:7], label=label)
    axes.set(xlabel="sent by each rank (MB)", ylabel="training loss (cross-entropy, epoch mean)")
    axes.legend(title="recipe, test accuracy")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    figure.savefig(path.with_suffix(".png"), dpi=150)
    return path


def parse_args(description: str, argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, with the options of each recipe in ``options``."""
    parser = argparse.ArgumentParser(description=description)
    add, five = parser.add_argument, ["none", "fp16", "topk", "fft", "dct"]
    add("--compressor", nargs="+", default=five, metavar="NAME", help=f"of: {', '.join(RECIPES)}")
    add("--density", type=float, help="share of coefficients to send (default: the recipe's)")
    add("--bits", type=int, help="bits of each value sent (default: the recipe's)")
    add("--epochs", type=int, default=12, help="passes over the images (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="images per rank (default: %(default)s)")
    add("--lr", type=float, default=0.03, help="learning rate (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of weights and order of images (default: %(default)s)",
    )
    add("--out", type=Path, default=Path("out"), help="output folder (default: %(default)s)")
    args = parser.parse_args(argv)
    if min(args.epochs, args.batch_size, args.lr) <= 0:
        parser.error("--epochs, --batch-size and --lr must be positive")
    given = {k: v for k in ("density", "bits") if (v := getattr(args, k)) is not None}
    args.options = {}
    try:
        for name in args.compressor:
            get_scheme(name)  # raises for an unknown name
            args.options[name] = {k: v for k, v in given.items() if k in RECIPES[name].options}
            get_scheme(name, **args.options[name])
    except ValueError as error:
        parser.error(str(error))
    return args


def main(
    script: str,
    description: str,
    hvd: ModuleType,
    train: Callable[[str, dict, argparse.Namespace, Callable[[str, float], None]], Run],
    exchange: str,
) -> None:
    """Train once for each recipe; rank 0 reports. ``exchange``: as for ``make_table``."""
    args = parse_args(description)
    hvd.init()
    monitor = Monitor(len(args.options) * args.epochs, quiet=hvd.rank() != 0)
    if hvd.size() == 1:
        monitor.console.print("One process: nothing is exchanged; start two, as make demo does.")
    with monitor.bar:
        runs = [train(*pair, args, monitor.advance) for pair in args.options.items()]
    monitor.console.print(make_table(runs, exchange))
    if hvd.rank() == 0 and hvd.size() > 1:
        path = save(runs, args, script, hvd.size())
        monitor.console.print(f"wrote {path}.png and .json", soft_wrap=True)
