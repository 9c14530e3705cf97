"""Shared by the digits examples of all frameworks: data, flags, progress and report."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress
from rich.text import Text
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from horovod_fftcomp import RECIPES
from horovod_fftcomp.cli.arguments import COMPRESSIONS, recipe_choices
from horovod_fftcomp.cli.console import Table, in_lines, make_console
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.tools.advise import cost_model

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # waiting ranks leave the core to others
# The default, 100 dense steps first, is for trainings of thousands of steps.
SHORT = {"warmup_steps": 0}
LR_WARM_UP_EPOCHS = 2
UNTIMED_STEPS = 10  # the first one compiles the kernels
LINKS = (0.1, 1.0, 10.0)  # Gbit/s, of the forecast
LATENCY_S = 50e-6
PARTS = ("compute", "encode", "exchange", "decode", "step")
BUSY = "On a machine with other work, or with fewer cores than ranks, times tell more of that."
CAPTION = f"""\
sent: bytes that a rank passes to collectives. ms: medians of all steps but the first \
{UNTIMED_STEPS}, mean of the ranks. encode, decode: from compression.stats(). compute: the \
rest of the step. {BUSY} exchange: """
FORECAST = """\
A forecast, not a measurement, by the cost model of `horovod-fftcomp advise`: computing (the least \
of all rows), encoding and decoding as measured above, and the bytes above over links of this \
bandwidth and 50 us latency, after the backward pass{cycle}. In brackets: speed-up over the first \
row."""
CYCLE = ", with 1 ms for a round of small messages as Horovod's cycle takes it"
CLUSTER = """\
To measure instead: make cluster-netns RATE=100mbit (four hosts as network namespaces of this \
machine; two minutes)"""
# Without horovodrun, beside which this has been started.
CLUSTER_TOOLS = "ip tc unshare setpriv nsenter ssh ssh-keygen /usr/sbin/sshd".split()
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
        self.console = make_console(quiet)
        self.bar = Progress(console=self.console, disable=not self.console.is_terminal)
        self.bar.add_task("", total=epochs)
        self._task, self._began = self.bar.tasks[0], time.monotonic()
        self._printed = self._began

    def tell_of(self, files: str) -> None:
        """Print what has been written, without a break in a path."""
        self.console.print(in_lines(f"wrote {files}", self.console.width), soft_wrap=True)

    def advance(self, text: str, epochs: float) -> None:
        """Add ``epochs``, a number that may be fractional."""
        self.bar.update(self._task.id, advance=epochs, description=text)
        if self.bar.disable and time.monotonic() - self._printed >= 2:
            self._printed = time.monotonic()
            share, took_s = self._task.percentage, self._printed - self._began
            left = f", ETA {took_s * (100 - share) / share:.0f} s" if share >= 2 else ""
            self.console.print(f"{text}  {share:3.0f} % of all{left}")


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


def make_table(runs: list[Run]) -> Table:
    """Return the table of all runs."""
    names = ("test accuracy", "kB/step sent", "ratio", *(f"{part} ms" for part in PARTS))
    table = Table("compression", names)
    for run in runs:
        cells = (
            f"{run.accuracy:.2%}",
            f"{run.sent_nbytes_per_step / 1e3:.1f}",
            f"{run.ratio:.1f}",
        )
        table.add_row(run.recipe, *cells, *(f"{ms:.2f}" for ms in run.ms_per_step.values()))
    return table


def forecast_ms(run: Run, compute_ms: float, gbit_per_s: float, cycle_s: float) -> float:
    """Return the forecast time of a step between two hosts in ms; see ``FORECAST``.

    ``cycle_s``: time that the launcher's own cycle adds to a collective.
    """
    rounds = make_policy(run.recipe.partition("(")[0], **run.options).after_warmup.rounds
    nbytes = round(run.sent_nbytes_per_step / len(rounds))
    messages = tuple(cost_model.Message(collective, nbytes) for collective in rounds)
    encode_s, decode_s = run.ms_per_step["encode"] / 1e3, run.ms_per_step["decode"] / 1e3
    part = cost_model.Transfer(1.0, messages, encode_s, decode_s)
    compute = cost_model.Compute(compute_ms / 1e3, spare_core=False)
    network = cost_model.given_network(gbit_per_s, LATENCY_S, cycle_s)
    return 1e3 * cost_model.step_time(compute, [part], network, ranks=2).total_s


def make_forecast(runs: list[Run], cycle_s: float) -> Table:
    """Return the table of forecast steps between two hosts."""
    title = "Forecast of a step between two hosts in ms"
    table = Table("compression", [f"{link:g} Gbit/s" for link in LINKS], title)
    compute_ms = min(run.ms_per_step["compute"] for run in runs)
    first = [forecast_ms(runs[0], compute_ms, link, cycle_s) for link in LINKS]
    for run in runs:
        steps = [forecast_ms(run, compute_ms, link, cycle_s) for link in LINKS]
        cells = (f"{ms:.1f} ({none / ms:.2f}x)" for ms, none in zip(steps, first, strict=True))
        table.add_row(run.recipe, *cells)
    return table


def plot_forecast(runs: list[Run], path: Path, cycle_s: float) -> None:
    """Draw the forecast over the bandwidth of the links."""
    axes = (figure := Figure(figsize=(7, 4.5), layout="constrained")).subplots()
    compute_ms, links = min(run.ms_per_step["compute"] for run in runs), np.geomspace(0.05, 20, 60)
    for run, style in zip(runs, itertools.cycle(STYLES), strict=False):
        steps = [forecast_ms(run, compute_ms, link, cycle_s) for link in links]
        axes.loglog(links, steps, color=style[:7], label=run.recipe)
    axes.set(xlabel="bandwidth (Gbit/s)", ylabel="step between two hosts, forecast (ms)")
    axes.legend()
    axes.yaxis.set_minor_formatter("{x:g}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


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
    """Return the flags."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add(
        "--compression",
        type=recipe_choices,
        default="none,fp16,topk,fft,dct",
        metavar=COMPRESSIONS,
        help=f"as topk:density=0.01,fft; of: {', '.join(RECIPES)} (default: %(default)s)",
    )
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
    return args


def can_make_cluster(hvd: ModuleType) -> bool:
    """Return whether all ranks run on this machine, which has all that ``docker/netns`` needs."""
    is_root, found = os.geteuid() == 0, map(shutil.which, CLUSTER_TOOLS)
    return hvd.local_size() == hvd.size() and is_root and all(found)


def main(
    script: str,
    description: str,
    hvd: ModuleType,
    train: Callable[[str, dict, argparse.Namespace, Callable[[str, float], None]], Run],
    exchange: str,
    *,
    horovod: bool = True,
) -> None:
    """Train once for each recipe; rank 0 reports.

    ``exchange``: the meaning of that column. ``horovod``: whether the job is one of Horovod, whose
    cycle a forecast counts, and which starts the cluster's jobs too.
    """
    args = parse_args(description)
    hvd.init()
    monitor = Monitor(len(args.compression) * args.epochs, quiet=hvd.rank() != 0)
    if hvd.size() == 1:
        monitor.console.print("One process: nothing is exchanged; start two, as make demo does.")
    with monitor.bar:
        runs = [
            train(choice.name, dict(choice.options), args, monitor.advance)._replace(
                recipe=choice.label
            )
            for choice in args.compression
        ]
    monitor.console.print(make_table(runs))
    monitor.console.print(Text(CAPTION + exchange))
    if hvd.size() > 1:
        cycle_s = cost_model.CYCLE_S if horovod else 0.0
        caption = Text(FORECAST.format(cycle=CYCLE if horovod else ""))
        monitor.console.print(Text(), make_forecast(runs, cycle_s), caption, sep="\n")
        if horovod and can_make_cluster(hvd):
            monitor.console.print(Text(CLUSTER))
    if hvd.rank() == 0 and hvd.size() > 1:
        path = save(runs, args, script, hvd.size())
        plot_forecast(runs, path.with_name(f"{path.name}_forecast.png"), cycle_s)
        monitor.tell_of(f"{path}.png and .json, {path}_forecast.png")
