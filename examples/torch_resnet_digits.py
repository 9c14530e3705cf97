"""Train a ResNet with batch norm on handwritten digits, once with each recipe.

    horovodrun -np 2 python examples/torch_resnet_digits.py
    python examples/torch_resnet_digits.py --simulate 8 --skew 0.8 --compression none,topk

With --skew a learner sees mostly the digits of its own, as where data stays where it was made.
"""

from __future__ import annotations

import argparse

import torch
from comparison import Batches, Task, main, parse_args
from torch import nn
from torch_digits import load_data

WIDTHS = (16, 32, 64)


class Residual(nn.Module):
    """Residual block: two 3 by 3 convolutions with batch norm, and a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        first = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(n_out)
        second = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out)
        self.body = nn.Sequential(*first, nn.ReLU(), *second)
        self.around = nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images with new channels."""
        return torch.relu(self.body(images) + self.around(images))


def make_model(widths: tuple[int, int, int] = WIDTHS) -> nn.Module:
    """Return a net with these channels in its three stages; 77,818 parameters by default."""
    a, b, c = widths
    stem = nn.Conv2d(1, a, 3, padding=1, bias=False), nn.BatchNorm2d(a), nn.ReLU()
    stages = Residual(a, a, 1), Residual(a, b, 2), Residual(b, c, 2)
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10))


def make_task(args: argparse.Namespace) -> Task:
    """Return the model, its optimizer and digits."""
    torch.manual_seed(args.seed)
    (images, labels), test = (data.tensors for data in load_data())
    model = make_model()
    by_label = torch.argsort(labels, stable=True)

    def batches(rank: int, size: int) -> Batches:
        generator = torch.Generator().manual_seed(1000 * args.seed + rank)
        own = by_label[rank * len(by_label) // size : (rank + 1) * len(by_label) // size]
        n_own = round(args.skew * args.batch_size)
        while True:
            few = own[torch.randint(len(own), (n_own,), generator=generator)]
            rest = torch.randint(len(labels), (args.batch_size - n_own,), generator=generator)
            chosen = torch.cat([few, rest])
            yield images[chosen], labels[chosen]

    def quality() -> float:
        model.eval()
        with torch.no_grad():
            accuracy = (model(test[0]).argmax(1) == test[1]).double().mean().item()
        model.train()
        return accuracy

    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    return Task(model, optimizer, batches, quality, "test accuracy")


if __name__ == "__main__":
    main("torch_resnet_digits", make_task, parse_args(
        __doc__.splitlines()[0], compression="none,topk,fft,scalecom", steps=300, batch_size=8,
        lr=0.1,
    ))  # fmt: skip
