"""Train a small conv net on handwritten digits under DDP, once with each recipe, and compare.

    torchrun --nproc-per-node 2 examples/ddp_digits.py

The images come with scikit-learn. Needs neither Horovod nor MPI. What compression adds to a script
for DDP is marked in ``train``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from horovod_fftcomp.torch_distributed import compress

EXCHANGE = "stats()'s wait_s. What is exchanged dense (biases; of none, everything) is in compute."


class Job:
    """What ``digits.main`` asks a launcher."""

    rank, size = staticmethod(dist.get_rank), staticmethod(dist.get_world_size)

    @staticmethod
    def init() -> None:
        """Connect this process to the others."""
        dist.init_process_group("gloo")

    @staticmethod
    def allgather_object(value: object) -> list:
        """Return the ``value`` of every rank."""
        values: list = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def make_model() -> nn.Module:
    """Return a net of 151,306 parameters."""
    conv1, conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    head = nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(conv1, nn.ReLU(), conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *head)


def train(
    recipe: str, options: dict, args: argparse.Namespace, progress: Callable[[str, float], None]
) -> digits.Run:
    """Train and measure; ``progress`` is called after every step."""
    torch.manual_seed(args.seed)
    x_train, x_test, y_train, y_test = map(torch.from_numpy, digits.load_data())
    train_set = TensorDataset(x_train[:, None], y_train)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    # Compression: this line, e.g. compress(model, "fft", density=0.15).
    compression = compress(model, recipe, **digits.SHORT | options)
    n = digits.LR_WARM_UP_EPOCHS * len(loader)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / n, total_iters=n)
    losses, clock = [], digits.Clock(compression.stats)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            clock.begin()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            warm_up.step()
            clock.end()
            losses.append(loss.item())
            text = f"{recipe:<4} epoch {epoch + 1:>2}/{args.epochs}  loss {losses[-1]:.4f}"
            progress(text, 1 / len(loader))
    with torch.no_grad():
        accuracy = (model(x_test[:, None]).argmax(1) == y_test).double().mean().item()
    return digits.make_run(
        recipe,
        options,
        accuracy=accuracy,
        stats=compression.stats(),
        losses=losses,
        seconds=clock.seconds,
        weights=(tensor.numpy() for tensor in model.state_dict().values()),
        gather=Job.allgather_object,
    )


def main() -> None:
    """Train once for each recipe; rank 0 reports."""
    torch.set_num_threads(1)  # the ranks share the cores
    digits.main("ddp_digits", __doc__.splitlines()[0], Job, train, EXCHANGE, horovod=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
