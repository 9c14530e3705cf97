"""Train a small conv net on handwritten digits, once for each recipe, and compare.

    horovodrun -np 2 python examples/torch_digits.py

The images come with scikit-learn. What compression adds to a Horovod script is marked in ``train``.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from horovod_fftcomp import RECIPES, get_scheme
from horovod_fftcomp.torch import Compression

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # waiting ranks leave the core to others
LR_WARM_UP_EPOCHS = 2
UNTIMED_STEPS = 10  # the first one compiles the kernels
PARTS = ("compute", "encode", "exchange", "decode", "step")
CAPTION = f"""\
sent: what a rank hands to collectives. ms: medians of all steps but the first {UNTIMED_STEPS}, \
mean of the ranks. encode, decode: as compression.stats() counts them. exchange: the rest of the \
time in optimizer.synchronize(). compute: the rest of the step."""
# By Okabe and Ito; the colour-blind can tell these apart.
STYLES = ("#000000 o", "#E69F00 s", "#56B4E9 D", "#009E73 ^", "#D55E00 v", "#CC79A7 P")


class Run(NamedTuple):
    """What came out of one training; losses (of each step) and ms are means over ranks."""

    recipe: str
    options: dict[str, object]
    accuracy: float
    sent_nbytes_per_step: float
    ratio: float
    ms_per_step: dict[str, float]
    losses: list[float]


class Monitor:
    """Progress unless ``quiet``: a live bar in a terminal, else a line every two seconds."""

    def __init__(self, epochs: float, quiet: bool) -> None:
        # Open MPI gives ranks a pseudo-terminal without a size, and control codes would garble it.
        live = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0
        plain = {} if live else {"force_terminal": False, "width": 100}
        self.console = Console(quiet=quiet, highlight=False, **plain)
        self.bar = Progress(console=self.console, disable=quiet or not live)
        self.bar.add_task("", total=epochs)
        self._task, self._printed = self.bar.tasks[0], time.monotonic()

    def advance(self, text: str, epochs: float) -> None:
        """Add ``epochs``, which may be a part of one."""
        self.bar.update(self._task.id, advance=epochs, description=text)
        if self.bar.disable and time.monotonic() - self._printed >= 2:
            self._printed = time.monotonic()
            share, left = self._task.percentage, self._task.time_remaining or 0
            self.console.print(f"{text}  {share:3.0f} % of all, ETA {left:.0f} s")


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set; the split never changes."""
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = map(torch.from_numpy, parts)
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def make_model() -> nn.Module:
    """Return a net of 151,306 parameters."""
    conv1, conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    head = nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(conv1, nn.ReLU(), conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *head)


def train(
    recipe: str, options: dict, args: argparse.Namespace, progress: Callable[[str, float], None]
) -> Run:
    """Train as any Horovod script does, and measure; ``progress`` hears of every step."""
    torch.manual_seed(args.seed)
    train_set, _ = load_data()
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Compression: this line and the argument below, e.g. Compression.fft(model, density=0.15).
    compression = getattr(Compression, recipe)(model, **options)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    n = LR_WARM_UP_EPOCHS * len(loader)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / n, total_iters=n)
    losses, clocks = [], []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            start = time.perf_counter(), compression.stats()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            ready = time.perf_counter(), compression.stats()
            optimizer.synchronize()  # only for the clocks: optimizer.step() would do it
            reduced = time.perf_counter(), compression.stats()
            with optimizer.skip_synchronize():
                optimizer.step()
            warm_up.step()
            clocks.append((start, ready, reduced, (time.perf_counter(), compression.stats())))
            losses.append(loss.item())
            text = f"{recipe:<4} epoch {epoch + 1:>2}/{args.epochs}  loss {losses[-1]:.4f}"
            progress(text, 1 / len(loader))
    check_same_weights(model, recipe)
    return make_run(recipe, options, model, compression.stats(), losses, clocks)


def check_same_weights(model: nn.Module, recipe: str) -> None:
    """Raise RuntimeError, on all ranks, unless the weights are the same to the last bit."""
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    digest = torch.tensor(list(hashlib.sha256(weights).digest()), dtype=torch.uint8)
    digests = hvd.allgather(digest, name="weights").reshape(hvd.size(), -1)
    differing = [rank for rank, other in enumerate(digests) if not torch.equal(other, digests[0])]
    if differing:
        raise RuntimeError(f"{recipe}: weights of ranks {differing} differ from those of rank 0")


def make_run(
    recipe: str, options: dict, model: nn.Module, stats: dict, losses: list, clocks: list
) -> Run:
    """Test the model and take medians over steps, means over ranks; see ``CAPTION``."""
    images, labels = load_data()[1].tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    seconds = [[(at, s["encode_s"], s["decode_s"]) for at, s in step] for step in clocks]
    start, ready, reduced, end = 1e3 * np.moveaxis(seconds[UNTIMED_STEPS:] or seconds, 1, 0)
    total, encode, decode = (end - start).T
    exchange = (reduced - ready) @ (1, -1, -1)
    parts = (total - encode - exchange - decode, encode, exchange, decode, total)
    ms = hvd.allreduce(torch.tensor([np.median(part) for part in parts]), name="ms").tolist()
    timed = dict(zip(PARTS, ms, strict=True))
    losses = hvd.allreduce(torch.tensor(losses), name="losses").tolist()
    sent, options = stats["sent_nbytes"] / len(losses), {**RECIPES[recipe].options, **options}
    return Run(recipe, options, accuracy, sent, stats["ratio"], timed, losses)


def make_table(runs: list[Run]) -> Table:
    """Return the table of all runs."""
    names = ("test accuracy", "kB/step sent", "ratio", *(f"{part} ms" for part in PARTS))
    columns = [Column(name, justify="right") for name in names]
    table = Table("recipe", *columns, caption=CAPTION, caption_justify="left")
    for run in runs:
        cells = (
            f"{run.accuracy:.2%}",
            f"{run.sent_nbytes_per_step / 1e3:.1f}",
            f"{run.ratio:.1f}",
        )
        table.add_row(run.recipe, *cells, *(f"{ms:.2f}" for ms in run.ms_per_step.values()))
    return table


def save(runs: list[Run], args: argparse.Namespace) -> Path:
    """Write numbers and plot; return their path without suffix."""
    path = args.out.resolve() / "torch_digits"
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {**vars(args), "out": str(args.out), "ranks": hvd.size()}
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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags, and in ``options`` what they mean for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, five = parser.add_argument, ["none", "fp16", "topk", "fft", "dct"]
    add("--compressor", nargs="+", default=five, metavar="NAME", help=f"of: {', '.join(RECIPES)}")
    add("--density", type=float, help="share of coefficients to send (default: the recipe's)")
    add("--bits", type=int, help="bits of each value sent (default: the recipe's)")
    add("--epochs", type=int, default=12, help="passes over the images (default: %(default)s)")
    add("--batch-size", type=int, default=32, help="images per rank (default: %(default)s)")
    add("--lr", type=float, default=0.03, help="learning rate (default: %(default)s)")
    add("--seed", type=int, default=0, help="weights, order of images (default: %(default)s)")
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


def main() -> None:
    """Train once for each recipe; rank 0 reports."""
    args = parse_args()
    hvd.init()
    torch.set_num_threads(1)  # the ranks share the cores
    monitor = Monitor(len(args.options) * args.epochs, quiet=hvd.rank() != 0)
    if hvd.size() == 1:
        monitor.console.print("One process: nothing is exchanged; start two: horovodrun -np 2 ...")
    with monitor.bar:
        runs = [train(*pair, args, monitor.advance) for pair in args.options.items()]
    monitor.console.print(make_table(runs))
    if hvd.rank() == 0 and hvd.size() > 1:
        monitor.console.print(f"wrote {save(runs, args)}.png and .json", soft_wrap=True)


if __name__ == "__main__":
    main()
