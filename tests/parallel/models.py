"""Small models and loops that the parallel tests share."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from torch import nn

from horovod_fftcomp.torch import Compression
from horovod_fftcomp.torch.compressor import TorchCompressor

EXACT = {"density": 1.0, "bits": 32}  # every value as float32: compression that loses nothing


class Branches(nn.Module):
    """Layers whose hooks fire in the order in which ``forward`` used them."""

    def __init__(self, n_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(n_layers)])
        self.head = nn.Linear(40, 10)

    def forward(self, x, order):
        return self.head(sum(torch.relu(self.layers[i](x)) for i in order))


def make_model(seed: int = 0) -> Branches:
    torch.manual_seed(seed)
    return Branches()


def order_of(step: int, layers: int = 6) -> list[int]:
    """Return an order of layers that differs between ranks and steps."""
    return np.random.default_rng([hvd.rank(), step]).permutation(layers).tolist()


def momentum_beside(scheme):
    """Return the momentum of an optimizer that goes with a scheme: none, if that keeps one."""
    return 0.0 if scheme.traits.momentum else 0.9


def distributed(model, compression, lr=0.05, **options):
    """Return stock Horovod's optimizer; models start equal by their seed.

    It has a momentum unless the recipe keeps one.
    """
    policy = getattr(compression, "policy", None)
    momentum = 0.9 if policy is None else momentum_beside(policy.after_warmup)
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum),
        named_parameters=model.named_parameters(),
        compression=compression,
        **options,
    )


def batches(steps: int, seed: int = 0):
    """Yield this rank's batches of a task that can be learned."""
    teacher = torch.randn(40, 10, generator=torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    for _ in range(steps):
        x = torch.randn(32, 40, generator=generator)
        yield x, (x @ teacher).argmax(1)


def train(model, optimizer, steps, seed=0, order=order_of, skip=0):
    losses, place = [], next(model.parameters()).device
    for step, (x, y) in enumerate(batches(steps, seed)):
        if step < skip:
            continue
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(place), order(step)), y.to(place))
        loss.backward()
        synchronized_step(optimizer)
        losses.append(loss.item())
    return losses


def synchronized_step(optimizer):
    """Step as scripts with gradient clipping or AMP do."""
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def small_buckets(model, recipe, **options) -> TorchCompressor:
    factory = getattr(Compression, recipe)
    return factory(model, bucket_nbytes=16_000, timeout_s=200, **options)


def compressed_names(compression) -> list[str]:
    """Return the names of the tensors that are not sent dense."""
    rows = (line.split() for line in compression.summary().splitlines())
    recipes = {name: recipe for name, recipe, *_ in rows}
    return [t.name for t in compression.tensors() if recipes[t.name] != "dense"]


def flat(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def loss_of(model, x, y, step=0):
    return nn.functional.cross_entropy(model(x, order_of(step)), y)


class ScriptedScaler:
    """A loss scaler whose scale is a function of the step."""

    def __init__(self, scales):
        self.scales, self.step = scales, 0

    def get_scale(self):
        return self.scales[self.step % len(self.scales)]
