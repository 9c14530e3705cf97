"""Every recipe on three ranks: what arrives, and that no order of hooks holds anybody up."""

from __future__ import annotations

import functools
import io

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from horovod_fftcomp import get_scheme, simulate
from horovod_fftcomp.torch import Compression, LocalSteps
from tests import payloads
from tests.parallel import told_of_nan
from tests.parallel.models import distributed, flat, make_model, small_buckets, train


class OneTensor(nn.Module):
    """A layer whose tensor has the name that a simulation gives its own: draws depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient = nn.Parameter(torch.randn(60, 100))

    def forward(self, x):
        return x @ self.gradient.T


SHARDED = ["topk", "fft", "qsgd"]
COMPRESSED = [name for name in payloads.EACH if name != "none"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *payloads.over_gloo_too(COMPRESSED, {}),
        ("topk", {"scope": "bucket"}),
        ("topk", {"scope": "model"}),
        ("random_k", {"exchange": "gather"}),
        ("hard_threshold", {"threshold": 0.01}),
        ("hard_threshold", {"density": 0.05, "calibrate_steps": 4}),
        ("scalecom", {"selector": "exact", "bits": 16}),
        *payloads.over_gloo_too(SHARDED, {"exchange": "sharded"}),
        ("strom", {"exchange": "sharded", "threshold": 0.01}),
        ("dgc", {"exchange": "sharded"}),
        ("hard_threshold", {"exchange": "sharded", "density": 0.05, "calibrate_steps": 4}),
    ],
    ids=str,
)
def test_hooks_in_another_order_on_each_rank(recipe, options, same_everywhere):
    model = make_model()
    losses = train(model, distributed(model, small_buckets(model, recipe, **options)), 10)
    same_everywhere(flat(model))
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, {}) for recipe in COMPRESSED),
        *((recipe, {"exchange": "sharded"}) for recipe in [*SHARDED, "strom", "signum"]),
    ],
    ids=str,
)
def test_reduced_gradients_are_those_of_a_simulation(recipe, options, same_everywhere):
    """To the rounding of a mean where payloads are gathered; allreduce adds in its own order."""
    torch.manual_seed(0)
    model = OneTensor()
    optimizer = distributed(
        model, getattr(Compression, recipe)(model, timeout_s=200, **options), lr=0.0
    )
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
    for found, expected in zip(reduced, simulate(recipe, gradients, **options), strict=True):
        scale = np.abs(expected.average).max()
        tolerance = 2e-3 if recipe in payloads.SUMS_OF_FLOAT16 else 1e-6
        within = {"rtol": 2e-7} if gathers else {"rtol": 0, "atol": tolerance * scale}
        np.testing.assert_allclose(found.numpy(), expected.average, **within)


@pytest.mark.parametrize(
    ("recipe", "options"), [("signsgd", {}), ("signum", {}), ("demo", {"sign": True})]
)
def test_signs_arrive_of_norms_biases_and_scalars(recipe, options, same_everywhere):
    model = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model.scale = nn.Parameter(torch.tensor(1.0))
    model[0].bias.requires_grad_(False)
    compression = getattr(Compression, recipe)(model, timeout_s=200, **options)
    optimizer = distributed(model, compression, lr=0.0)
    generator = torch.Generator().manual_seed(0)  # of all ranks: no tie is there
    x, y = torch.randn(32, 20, generator=generator), torch.randn(32, 1, generator=generator)
    (model.scale * model(x) - y).square().mean().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert set(parameter.grad.unique().tolist()) <= {-1, 0, 1}, name
            assert parameter.grad.any(), name
            same_everywhere(parameter.grad.reshape(-1))
    assert set(model[1].running_mean.unique().tolist()) - {-1, 0, 1}  # no buffer is sent


class OneOfEach(nn.Module):
    """A layer for each recipe of ``TOGETHER``, with its name."""

    def __init__(self) -> None:
        super().__init__()
        for name in payloads.TOGETHER:
            self.register_parameter(name, nn.Parameter(torch.randn(payloads.SHAPE)))

    def forward(self, x):
        return sum((x @ weight.T).square().sum() for weight in self.parameters())


@pytest.mark.transport
def test_recipes_side_by_side_are_those_of_a_simulation(same_everywhere):
    torch.manual_seed(0)
    model = OneOfEach()
    compression = Compression.topk(model, rules=payloads.RULES, timeout_s=200)
    optimizer = distributed(model, compression, lr=0.0)
    own, reduced = [], []
    for step in range(payloads.STEPS_TOGETHER):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        grads = {}
        for name, weight in model.named_parameters():
            weight.register_hook(lambda grad, n=name, kept=grads: kept.update({n: grad.clone()}))
        model(torch.randn(8, 100, generator=generator)).backward()
        for weight in model.parameters():
            weight._backward_hooks.clear()
        optimizer.step()
        own.append(torch.stack([grads[name].reshape(-1) for name in payloads.TOGETHER]))
        reduced.append(torch.stack([weight.grad.reshape(-1) for weight in model.parameters()]))
    same_everywhere(*reduced)
    gradients = hvd.allgather(torch.stack(own)[None], name="own").numpy().swapaxes(0, 1)
    payloads.check_together([step.numpy() for step in reduced], gradients)
    assert compression.stats()["skipped_steps"] == 0


@told_of_nan
@pytest.mark.parametrize("recipe", ["none", "topk", "powersgd"])
def test_ranks_that_step_alone_meet_again(recipe, same_everywhere):
    """Where all is sent, at the mean of their weights; else at what the ranks' changes leave."""
    model = make_model()
    exact = {"density": 1.0, "bits": 32} if recipe == "topk" else {}
    compression = small_buckets(model, recipe, **exact)
    local = LocalSteps(model, compression, period=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(6):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        optimizer.zero_grad()
        model(x, range(6)).square().mean().backward()
        grads = [weight.grad for weight in model.parameters()]
        optimizer.step()
        own = flat(model)
        mean = hvd.allreduce(own, name="mean")
        assert local.after_step() == (step % 3 == 2)
        assert all(w.grad is grad for w, grad in zip(model.parameters(), grads, strict=True))
        if step % 3 == 2:
            same_everywhere(flat(model))
            if recipe != "powersgd":
                torch.testing.assert_close(flat(model), mean, rtol=0, atol=1e-5)
        else:
            assert torch.equal(flat(model), own)
    before = flat(model)
    with torch.no_grad():
        model.head.bias[0] = float("nan") if hvd.rank() == 0 else 1.0
    local.synchronize()
    assert torch.equal(flat(model), before)


class LocalTraining:
    """Model that each rank trains alone, in periods of 2 steps."""

    def __init__(self, rules=(), **options):
        self.model = make_model()
        self.compression = small_buckets(self.model, "topk", rules=rules)
        self.local = LocalSteps(self.model, self.compression, period=2, **options)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.parts = self.model, self.optimizer, self.compression, self.local

    def step(self, number):
        generator = torch.Generator().manual_seed(10 * number + hvd.rank())
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 40, generator=generator), range(6)).square().mean().backward()
        self.optimizer.step()
        return self.local.after_step()


def nesterov(lr, momentum):
    return functools.partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_an_outer_optimizer_takes_mean_changes_as_gradients(
    lr, momentum, same_everywhere, monkeypatch
):
    training = LocalTraining(outer=nesterov(lr, momentum))
    plain = LocalTraining()
    means, averaged = [], training.local.means_of

    def means_of(changes):
        means[:] = averaged(changes)
        return means

    monkeypatch.setattr(training.local, "means_of", means_of)
    last, velocity = flat(training.model), 0.0
    for number in range(8):
        plain.step(number)
        if training.step(number):
            mean = torch.cat([each.reshape(-1) for each in means])
            velocity = momentum * velocity + mean
            last = last - lr * (mean + momentum * velocity)
            atol = 1e-6 if momentum else 0.0
            torch.testing.assert_close(flat(training.model), last, rtol=0, atol=atol)
            same_everywhere(flat(training.model))
    assert torch.equal(flat(plain.model), flat(training.model)) == (momentum == 0.0)


@pytest.mark.transport
def test_local_steps_continue_exactly_from_a_checkpoint():
    # Nothing is dense: three ranks add in an order that depends on what Horovod happens to fuse.
    options = {"rules": [("*", 0.1)], "outer": nesterov(0.7, 0.9)}
    whole, begun, resumed = (LocalTraining(**options) for _ in range(3))
    for number in range(9):
        whole.step(number)
    for number in range(5):
        begun.step(number)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in begun.parts], file)
    file.seek(0)
    for part, saved in zip(resumed.parts, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(saved)
    for number in range(5, 9):
        resumed.step(number)
    assert torch.equal(flat(resumed.model), flat(whole.model))
