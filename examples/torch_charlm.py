"""Train a small transformer language model on Python's own source, once with each recipe.

    horovodrun -np 2 python examples/torch_charlm.py
    python examples/torch_charlm.py --simulate 8 --compression "none,topk(density=0.01),scalecom"

The text is the standard library of the Python that runs this, so every machine has it.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from comparison import Batches, Task, main, parse_args
from torch import nn

MODULES = ("argparse", "ast", "datetime", "decimal", "doctest", "inspect", "tarfile", "typing")
CHARACTERS, CONTEXT = 128, 64
HELD_OUT = 0.1  # the share at the end of each module's source
N_EVALUATED = 128  # windows of the held-out text


class CharacterModel(nn.Module):
    """A transformer that predicts the next character of a text."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores (text, character, place), as ``cross_entropy`` takes them."""
        found = self.layers(self.characters(text) + self.places, self.mask, is_causal=True)
        return self.head(found).transpose(1, 2)


def read_modules() -> list[torch.Tensor]:
    """Return the source of each of ``MODULES``, a number for each character."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [(folder / f"{module}.py").read_bytes() for module in MODULES]
    return [torch.tensor([c for c in source if c < CHARACTERS]) for source in sources]


def load_text() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the modules to train on, and the held-out text."""
    train, held_out = [], []
    for text in read_modules():
        cut = int(len(text) * (1 - HELD_OUT))
        train.append(text[:cut])
        held_out.append(text[cut:])
    return train, torch.cat(held_out)


def windows(text: torch.Tensor, begin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets: ``CONTEXT`` characters from each begin, and the next ones."""
    chosen = text[begin[:, None] + torch.arange(CONTEXT + 1)]
    return chosen[:, :-1], chosen[:, 1:]


def make_task(args: argparse.Namespace, width: int = 64, layers: int = 2) -> Task:
    """Return the model, its optimizer and text; with skew each learner has its own modules."""
    torch.manual_seed(args.seed)
    modules, held_out = load_text()
    everything, model = torch.cat(modules), CharacterModel(width, layers)
    generator = torch.Generator().manual_seed(0)
    test = windows(
        held_out,
        torch.randint(len(held_out) - CONTEXT, (N_EVALUATED,), generator=generator),
    )

    def batches(rank: int, size: int) -> Batches:
        generator = torch.Generator().manual_seed(1000 * args.seed + rank)
        own = torch.cat(modules[rank % len(modules) :: size] or modules[:1])
        while True:
            n_own = round(args.skew * args.batch_size)
            parts = []
            for text, n in ((own, n_own), (everything, args.batch_size - n_own)):
                begin = torch.randint(len(text) - CONTEXT, (n,), generator=generator)
                parts.append(windows(text, begin))
            yield tuple(torch.cat(pair) for pair in zip(*parts, strict=True))

    def quality() -> float:
        model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(test[0]), test[1]).item()
        model.train()
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    return Task(model, optimizer, batches, quality, "validation loss")


if __name__ == "__main__":
    main("torch_charlm", make_task, parse_args(
        __doc__.splitlines()[0], compression="none,topk,fft,scalecom", steps=300, batch_size=8,
        lr=3e-3,
    ))  # fmt: skip
