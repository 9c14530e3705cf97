"""A density for each layer by how much is computed for each of its gradients."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from horovod_fftcomp.engine.policy import Rule

# (multiplications a step and weight, from which on; compression rate). The fewer multiplications a
# weight takes, the more of the time goes into exchanging its gradient.
RATES = ((196, 25), (128, 50), (0, 400))

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def rules_by_flops(
    model: nn.Module, *inputs: object, rates: Sequence[tuple[float, float]] = RATES
) -> list[Rule]:
    """Return ``rules=`` that give each convolution and linear layer a density by its work.

    ``inputs``: what ``model`` is called with in a training step, in this process's batch size. It
    is run once without gradients, in evaluation mode. A weight is multiplied once for each
    position and sample of its layer's output; ``rates`` are (from how many on, rate), and the
    density is 1 / rate. The first convolution travels dense. Source of the rule: Chen et al.,
    NeurIPS 2020; the rates are a choice.

    >>> layers = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(72, 2)
    >>> model = nn.Sequential(*layers)
    >>> rules_by_flops(model, torch.zeros(20, 1, 7, 7))
    [('0.weight', 'dense'), ('1.weight', 0.02), ('3.weight', 0.0025)]
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    uses: dict[str, float] = {}
    convolutions: list[str] = []

    def count(module: nn.Module, _: object, output: torch.Tensor) -> None:
        name = names[module.weight]
        if isinstance(module, nn.Linear):
            applied = output.numel() / module.out_features
        else:
            applied = output.numel() / module.out_channels
            convolutions.append(name)
        uses[name] = uses.get(name, 0) + applied  # a weight may serve several layers

    with _watched(model, count), torch.no_grad():
        model(*inputs)
    return [
        (glob.escape(name), "dense" if name in convolutions[:1] else _density(applied, rates))
        for name, applied in uses.items()
    ]


def _density(applied: float, rates: Sequence[tuple[float, float]]) -> float:
    for least, rate in sorted(rates, reverse=True):
        if applied >= least:
            return 1 / rate
    raise ValueError(f"rates names none for {applied:g} multiplications: end it with (0, rate)")


@contextmanager
def _watched(model: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    """Call ``hook`` after each convolution and linear layer of ``model``, in evaluation mode."""
    training = {module: module.training for module in model.modules()}
    watched = [module for module in training if isinstance(module, (nn.Linear, *_CONVOLUTIONS))]
    handles = [module.register_forward_hook(hook) for module in watched]
    model.eval()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
