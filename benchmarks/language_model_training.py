"""Train a byte-level GPT on Python's own library with simulated learners: one run.

A run on a CPU can be saved after any step, and goes on from there to the bit.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from language_model_optimizers import UnclippedAdamW
from torch import nn
from torch.nn import functional

import horovod_fftcomp
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.engine.recipe_text import parse_recipe
from horovod_fftcomp.schedules import Exponential
from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch_distributed import AdamW, SimulatedLearners

HERE = Path(__file__).resolve().parent
LIBRARY = Path(json.__file__).resolve().parent.parent  # of the Python that runs
LEFT_OUT = {"site-packages", "test", "lib2to3", "idlelib"}  # folders
# Of Python 3.11.7; another version has other text, on which losses differ.
SHA256 = "29b552d0bef5913b37a9ffdb849c09746acbbefa80a89984936c39db9cf05bed"
BATCH, CONTEXT = 8, 128  # sequences of a learner, bytes of each
HEAD_WIDTH = 48
WARM_UP, LAST_RATE = 50, 0.1  # steps of the learning rate's rise; its last value over its highest
BETAS, WEIGHT_DECAY, MAX_NORM = (0.9, 0.99), 0.05, 1.0  # decay: of matrices
EVALUATE_EVERY, EVALUATED_BATCHES = 100, 24
TF32_WIDTH = 480  # of models that a GPU multiplies in TF32


class Size(NamedTuple):
    """A model, and how many steps it is trained for."""

    width: int
    layers: int
    steps: int


SIZES = {
    "0.4M": Size(96, 3, 1200),
    "3M": Size(240, 4, 600),
    "25M": Size(480, 9, 300),
    "124M": Size(864, 14, 300),
}
# A row's optimizer: takes parameter groups and the learning rate. One with ``max_norm`` clips.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, betas=BETAS, weight_decay=WEIGHT_DECAY, foreach=True),
    "adamw-unclipped": partial(
        UnclippedAdamW, betas=BETAS, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM
    ),
    "adamw-unclipped-10": partial(
        UnclippedAdamW, betas=BETAS, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM, every=10
    ),
    "adamw-ours": partial(AdamW, betas=BETAS, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM),
    "sgd": partial(torch.optim.SGD, momentum=0.9, foreach=True),
}
# What a row may add to its recipe.
AFTER = re.compile(r" after (\d+) dense steps")
EVERY = re.compile(r", every (\d+)th step by (\S+)$")  # exchanged by that recipe
FIRST = " with momentum first"  # momentum=0.9, and none of the optimizer's own
FALLING = " of falling density"  # from 4 times to a tenth, by an exponential; about as many bytes


class Run(NamedTuple):
    """One training. ``recipe``: as for ``--compression``, and what a row may add to it."""

    size: str
    learners: int
    steps: int
    recipe: str
    optimizer: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its files, without suffix."""
        recipe = re.sub(r"[^\w.=]+", "-", self.recipe).strip("-")
        job = f"{self.size}-{self.learners}x{self.steps}"
        return f"{job}_{recipe}_{self.optimizer}_lr{self.lr:g}_seed{self.seed}"


def options_of(recipe: str, steps: int) -> tuple[str, dict[str, Any]]:
    """Return name and options of a row's recipe, ``make_policy``'s arguments.

    Raises ValueError or TypeError for what is no recipe or never compresses.
    """
    options: dict[str, Any] = {"warmup_steps": 0}
    if after := AFTER.search(recipe):
        options["warmup_steps"] = int(after[1])
        if int(after[1]) >= steps:
            raise ValueError(f"{recipe!r} compresses nothing in {steps} steps; give more --steps")
    if FIRST in recipe:
        options["momentum"] = 0.9
    if every := EVERY.search(recipe):
        options |= {"dense_every": int(every[1]), "dense_by": every[2]}
        recipe = EVERY.sub("", recipe)
    choice = parse_recipe(AFTER.sub("", recipe).replace(FIRST, "").replace(FALLING, ""))
    options |= choice.options
    if FALLING in recipe:
        start = 4 * options.pop("density")
        options["density_schedule"] = Exponential(start, start / 40, steps)
    return choice.name, options


class Text(NamedTuple):
    """Bytes to train on and to validate with, and the SHA-256 of both together."""

    train: torch.Tensor
    valid: torch.Tensor
    sha256: str


def read_text(library: Path, any_text: bool = False) -> Text:
    """Return the .py files of a Python's library; ValueError if they are not the pinned ones."""
    paths = sorted(
        path
        for path in library.rglob("*.py")
        if not LEFT_OUT.intersection(path.relative_to(library).parts)
    )
    data = b"".join(path.read_bytes() for path in paths)
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != SHA256 and not any_text:
        raise ValueError(
            f"the text in {library} has SHA-256 {sha256}, expected {SHA256}, that of Python "
            "3.11.7: losses would not compare with the committed ones. Give the library of that "
            "Python (--library FOLDER), or --any-text, which the results then record"
        )
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    n_train = int(0.95 * len(whole))
    return Text(whole[:n_train], whole[n_train:], sha256)


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, bytes, width] of the same shape."""
        batch, length, width = x.shape
        heads = [
            part.view(batch, length, width // HEAD_WIDTH, HEAD_WIDTH).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        ]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte; initialised as GPT-2."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, bytes, 256] of bytes [batch, bytes]."""
        positions = self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        return self.head(self.norm(self.blocks(self.embedding(inputs) + positions)))


def rate_at(step: int, steps: int) -> float:
    """Return the share of the highest learning rate: a linear rise, times a cosine to a tenth."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1, (step + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * cosine)


class Training:
    """A run under way: model, optimizer, the compressors' state, generators and what was found."""

    def __init__(self, run: Run, device: str = "cpu") -> None:
        self.run, self.device = run, device
        torch.manual_seed(run.seed)
        size = SIZES[run.size]
        if size.width >= TF32_WIDTH:
            torch.set_float32_matmul_precision("high")  # as people train; on a CPU no difference
        self.model = GPT(size.width, size.layers).to(device)
        name, options = options_of(run.recipe, run.steps)
        self.learners = self._learners(name, options)
        policy = make_policy(name, **options)
        self.warm_up = policy.warmup_steps
        # With ``dense_every`` the package's AdamW takes its first moments from the compressor.
        own_momentum = policy.after_warmup.traits.momentum and not policy.dense_every
        self.optimizer = make_optimizer(run, self.model, bool(own_momentum))
        self.generators = [
            torch.Generator().manual_seed(1000 * run.seed + rank) for rank in range(run.learners)
        ]
        self.step = 0
        self.steps: list[int] = []  # of each evaluation, and what it found
        self.losses: list[float] = []
        self.sent: list[float] = []  # of each step: bytes for compressed tensors, mean of the ranks
        self.payloads: list[float] = []  # of these a rank's gradients; not sums that it hands on
        self.seconds = 0.0

    def _learners(self, name: str, options: dict[str, Any]) -> SimulatedLearners:
        """Return the learners; on a GPU its kernels compute the exchanges."""
        if not self.device.startswith("cuda"):
            return SimulatedLearners(self.model, self.run.learners, name, **options)
        from language_model_device import LearnersOnDevice, kernels_on

        kernels = kernels_on(next(self.model.parameters()).device)
        return LearnersOnDevice(self.model, self.run.learners, name, kernels, **options)

    def advance(self, text: Text) -> None:
        """Make one step, and evaluate if it is time."""
        began = time.perf_counter()
        for rank, generator in enumerate(self.generators):
            with self.learners.turn_of(rank):
                self._loss(text.train, generator).backward()
        before = self._sent_nbytes()
        self.learners.reduce()
        sent, sums = (b - a for a, b in zip(before, self._sent_nbytes(), strict=True))
        self.sent.append(sent)
        self.payloads.append(sent - sums)
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr * rate_at(self.step, self.run.steps)
        if "max_norm" not in self.optimizer.defaults:
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.step += 1
        if self.step % EVALUATE_EVERY == 0 or self.step == self.run.steps:
            self.steps.append(self.step)
            self.losses.append(self._validation_loss(text.valid))
        self.seconds += time.perf_counter() - began

    def _sent_nbytes(self) -> list[float]:
        """Return bytes that a rank has sent so far, and those of sums among them: means."""
        sent = [(costs.sent_nbytes, costs.sums_nbytes) for costs in self.learners.costs]
        return np.mean(sent, axis=0).tolist()

    def _loss(self, source: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        begins = torch.randint(0, len(source) - CONTEXT - 1, (BATCH,), generator=generator)
        chosen = torch.stack([source[begin : begin + CONTEXT + 1] for begin in begins])
        chosen = chosen.to(self.device).long()
        logits = self.model(chosen[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten())

    @torch.no_grad()
    def _validation_loss(self, source: torch.Tensor) -> float:
        """Return the mean loss of the same batches each time."""
        generator = torch.Generator().manual_seed(7)
        losses = (self._loss(source, generator).item() for _ in range(EVALUATED_BATCHES))
        return sum(losses) / EVALUATED_BATCHES

    def save(self, path: Path) -> None:
        """Write everything to a file, which is whole at every moment."""
        part = path.with_suffix(".part")
        torch.save(self, part)
        part.replace(path)

    def found(self, text: Text) -> dict[str, Any]:
        """Return the result of a finished run, JSON values."""
        parameters = sum(p.numel() for p in self.model.parameters())
        dense = self.learners.dense_nbytes / self.step
        compressed = 4 * parameters - dense
        after = statistics.fmean(self.payloads[self.warm_up :])
        begins = [0, *self.steps[:-1]]
        between = [
            round(statistics.fmean(self.sent[begin:end]) + dense)
            for begin, end in zip(begins, self.steps, strict=True)
        ]
        return {
            **self.run._asdict(),
            "parameters": parameters,
            "text_sha256": text.sha256,
            "max_norm": MAX_NORM,
            "warmup_steps": self.warm_up,
            "evaluated_at": self.steps,
            "validation_losses": [round(loss, 5) for loss in self.losses],
            "validation_loss": round(self.losses[-1], 5),
            "sent_nbytes": round(statistics.fmean(self.sent) + dense),  # of a step, by a rank
            "sent_nbytes_between": between,  # the same since the last evaluation
            "usual_nbytes": round(statistics.median(self.sent) + dense),
            # float32 bytes of what is compressed over its payloads', after the warm-up
            "ratio": round(compressed / after, 2) if compressed else 1.0,
            "seconds": round(self.seconds, 1),
            **facts(self.device),
        }


def make_optimizer(run: Run, model: nn.Module, own_momentum: bool) -> torch.optim.Optimizer:
    """Return a run's optimizer; without momentum for matrices if the recipe has its own."""
    matrices: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() >= 2]}
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    if own_momentum:
        matrices |= {"momentum": 0.0} if run.optimizer == "sgd" else {"betas": (0.0, BETAS[1])}
    return OPTIMIZERS[run.optimizer]([matrices, vectors], lr=run.lr)


def facts(device: str) -> dict[str, Any]:
    """Return what a run was made with and on, JSON values."""
    versions = environment.versions()
    where = f"{environment.n_cores()} cores, {environment.cpu_model()}, {platform.system()}"
    if device.startswith("cuda"):
        where = f"{torch.cuda.get_device_name()}, {where}"
    return {
        "machine": where,
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "versions": {name: versions[name] for name in ("python", "horovod_fftcomp", "torch")},
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit that this file belongs to, "" outside of a clone or without git."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # there is no git
        return ""
    return done.stdout.strip()


def train(run: Run, text: Text, scratch: Path, device: str = "cpu") -> Iterator[Training]:
    """Make or continue a run; yields the training after every step.

    It is saved in ``scratch`` at every evaluation, and what is saved there is continued; but on a
    GPU it is not saved and always begins anew.
    """
    path = scratch / f"{run.name}.pt"
    is_saved = not device.startswith("cuda")  # the state of kernels cannot be pickled
    if is_saved and path.exists():
        # The file holds a whole Training, so it is one of ours or an error.
        training = torch.load(path, weights_only=False)
    else:
        training = Training(run, device)
    while training.step < run.steps:
        training.advance(text)
        if is_saved and training.step % EVALUATE_EVERY == 0:
            training.save(path)
        yield training


def set_threads(threads: int) -> None:
    """Compute with so many threads, in PyTorch and in the codecs."""
    torch.set_num_threads(threads)
    horovod_fftcomp.set_num_threads(threads)
