"""Every recipe on three ranks: what arrives, and that no order of hooks holds anybody up."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from horovod_fftcomp import get_scheme, list_compressors, simulate
from horovod_fftcomp.torch import Compression
from tests.parallel.models import distributed, flat, make_model, small_buckets, train


class OneTensor(nn.Module):
    """A layer whose tensor has the name that a simulation gives its own: draws depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient = nn.Parameter(torch.randn(60, 100))

    def forward(self, x):
        return x @ self.gradient.T


COMPRESSED = [name for name in list_compressors() if name != "none"]


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, {}) for recipe in COMPRESSED),
        ("topk", {"scope": "bucket"}),
        ("topk", {"scope": "model"}),
        ("random_k", {"exchange": "gather"}),
        ("hard_threshold", {"threshold": 0.01}),
        ("hard_threshold", {"density": 0.05, "calibrate_steps": 4}),
        ("scalecom", {"selector": "exact", "bits": 16}),
    ],
    ids=str,
)
def test_hooks_in_another_order_on_each_rank(recipe, options, same_everywhere):
    model = make_model()
    losses = train(model, distributed(model, small_buckets(model, recipe, **options)), 10)
    same_everywhere(flat(model))
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_reduced_gradients_are_those_of_a_simulation(recipe, same_everywhere):
    """To the rounding of a mean where payloads are gathered; allreduce adds in its own order."""
    torch.manual_seed(0)
    model = OneTensor()
    optimizer = distributed(model, getattr(Compression, recipe)(model, timeout_s=20), lr=0.0)
    own, reduced = [], []
    for step in range(5):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        model.gradient.register_hook(lambda grad: own.append(grad.clone().reshape(-1)))
        model(torch.randn(8, 100, generator=generator)).square().sum().backward()
        model.gradient._backward_hooks.clear()
        optimizer.step()
        reduced.append(model.gradient.grad.clone().reshape(-1))
    same_everywhere(*reduced)
    gradients = hvd.allgather(torch.stack(own)[None], name="own").numpy().swapaxes(0, 1)
    gathers = "allgather" in get_scheme(recipe).rounds
    for found, expected in zip(reduced, simulate(recipe, gradients), strict=True):
        scale = np.abs(expected.average).max()
        tolerance = 2e-3 if recipe == "fp16" else 1e-6
        options = {"rtol": 2e-7} if gathers else {"rtol": 0, "atol": tolerance * scale}
        np.testing.assert_allclose(found.numpy(), expected.average, **options)
