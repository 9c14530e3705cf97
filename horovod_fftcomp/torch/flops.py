"""Density of each layer by the number of multiplications per weight."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from horovod_fftcomp.engine.policy import Rule

# Pairs (lowest number of multiplications per weight and step, compression rate). The fewer
# multiplications a weight takes, the larger is the share of time spent on exchanging its gradient.
RATES = ((196, 25), (128, 50), (0, 400))

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def rules_by_flops(
    model: nn.Module, *inputs: object, rates: Sequence[tuple[float, float]] = RATES
) -> list[Rule]:
    """Return a density for each convolution and linear layer, in the format of ``rules=``.

    The density is 1 / rate, where ``rates`` has pairs (lowest number of multiplications per weight
    and step, rate). A weight is multiplied once per sample and position of its layer's output.
    ``inputs``: arguments of ``model`` in a training step, with the batch size of one process; the
    model is run on them once, in evaluation mode without gradients. The first convolution is sent
    dense. Raises ValueError if no rate applies to a layer. Source of the rule: Chen et al., NeurIPS
    2020; the default rates are our choice.

    >>> layers = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(72, 2)
    >>> model = nn.Sequential(*layers)
    >>> rules_by_flops(model, torch.zeros(20, 1, 7, 7))
    [('0.weight', 'dense'), ('1.weight', 0.02), ('3.weight', 0.0025)]
    """
    names: dict[torch.Tensor, str] = {weight: name for name, weight in model.named_parameters()}
    uses: dict[str, float] = {}
    convolutions: list[str] = []

    def count(module: _Layer, _: object, output: torch.Tensor) -> None:
        name = names[module.weight]
        n_uses = output.numel() / len(module.weight)  # whose rows are features or channels
        if not isinstance(module, nn.Linear):
            convolutions.append(name)
        uses[name] = uses.get(name, 0) + n_uses  # a weight may serve several layers

    with _hooked(model, count), torch.no_grad():
        model(*inputs)
    return [
        (glob.escape(name), "dense" if name in convolutions[:1] else _density(n_uses, rates))
        for name, n_uses in uses.items()
    ]


def _density(n_uses: float, rates: Sequence[tuple[float, float]]) -> float:
    for least, rate in sorted(rates, reverse=True):
        if n_uses >= least:
            return 1 / rate
    raise ValueError(
        f"rates has no entry for {n_uses:g} multiplications per weight; end it with (0, rate)"
    )


@contextmanager
def _hooked(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Call ``hook`` after each convolution and linear layer of ``model``, in evaluation mode."""
    training = {module: module.training for module in model.modules()}
    layers = [module for module in training if isinstance(module, (nn.Linear, *_CONVOLUTIONS))]
    handles = [module.register_forward_hook(hook) for module in layers]
    model.eval()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
