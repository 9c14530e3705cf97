"""Train a small conv net on handwritten digits, once with each recipe, and compare.

    horovodrun -np 2 python examples/torch_digits.py

The images come with scikit-learn. What compression adds to a Horovod script is marked in ``train``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import digits
import horovod.torch as hvd
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from horovod_fftcomp.torch import Compression

EXCHANGE = "the rest of the time in optimizer.synchronize()."


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, with a channel."""
    x_train, x_test, y_train, y_test = map(torch.from_numpy, digits.load_data())
    return TensorDataset(x_train[:, None], y_train), TensorDataset(x_test[:, None], y_test)


def make_model() -> nn.Module:
    """Return a net of 151,306 parameters."""
    conv1, conv2 = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
    head = nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(conv1, nn.ReLU(), conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *head)


def train(
    recipe: str, options: dict, args: argparse.Namespace, progress: Callable[[str, float], None]
) -> digits.Run:
    """Train in a Horovod job and measure; ``progress`` is called after every step."""
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()
    sampler = DistributedSampler(train_set, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(train_set, args.batch_size, sampler=sampler)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # Compression: this line and the argument below, e.g. Compression.fft(model, density=0.15).
    compression = getattr(Compression, recipe)(model, **digits.SHORT | options)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    n = digits.LR_WARM_UP_EPOCHS * len(loader)
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
    images, labels = test_set.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    return digits.make_run(
        recipe,
        options,
        accuracy=accuracy,
        stats=compression.stats(),
        losses=losses,
        seconds=[seconds_of(*clock) for clock in clocks],
        weights=(tensor.numpy() for tensor in model.state_dict().values()),
        gather=hvd.allgather_object,
    )


def seconds_of(*clock: tuple[float, dict]) -> digits.Seconds:
    """Return the times of a step.

    ``clock``: time and stats at its start, before and after ``synchronize``, and at its end.
    """
    times = [(at, stats["encode_s"], stats["decode_s"]) for at, stats in clock]
    start, ready, reduced, end = map(np.array, times)
    total, encode, decode = end - start
    return digits.Seconds(encode, (reduced - ready) @ (1, -1, -1), decode, total)


def main() -> None:
    """Train once for each recipe; rank 0 reports."""
    torch.set_num_threads(1)  # the ranks share the cores
    digits.main("torch_digits", __doc__.splitlines()[0], hvd, train, EXCHANGE)


if __name__ == "__main__":
    main()
