"""Adam and AdamW that take second moments from uncompressed gradients alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from horovod_fftcomp import UnsupportedError  # noqa: E402
from horovod_fftcomp.engine import checkpoint  # noqa: E402
from horovod_fftcomp.engine.policy import make_policy  # noqa: E402
from horovod_fftcomp.torch_distributed import Adam, AdamW, SimulatedLearners  # noqa: E402

pytestmark = pytest.mark.torch
RANKS = 3


def a_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30))


def backward(learners, model, step, ranks=RANKS):
    """Exchange the gradients of a step's batches."""
    for rank in range(ranks):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank))
        with learners.turn_of(rank):
            (model(x) - torch.sin(3 * x[:, :30])).square().mean().backward()
    learners.reduce()


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (Adam, torch.optim.Adam, {}),
        (Adam, torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
        (AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-6}),
    ],
)
def test_without_compression_steps_are_those_of_torch(ours, theirs, options):
    models = a_model(), a_model()
    optimizers = [
        make(
            [
                {"params": model[0].parameters(), "lr": 0.02},
                {"params": model[2].parameters(), "weight_decay": 0.0},
            ],
            lr=0.01,
            **options,
        )
        for make, model in zip((ours, theirs), models, strict=True)
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    for step in range(6):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            backward(SimulatedLearners(model, RANKS, "none"), model, step)
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-6, atol=1e-8)


def test_second_moments_come_from_uncompressed_steps_alone():
    """Beside a computation in NumPy, from the gradients that were exchanged."""
    model = a_model()
    learners = SimulatedLearners(
        model, RANKS, "topk", density=0.1, warmup_steps=2, dense_every=3, dense_by="none"
    )
    lr, beta1, beta2, eps, decay = 0.01, 0.9, 0.99, 1e-8, 0.1
    optimizer = AdamW(model.parameters(), lr, (beta1, beta2), eps, decay)
    weight = model[0].weight
    x, m, v = weight.detach().numpy().astype(np.float64), 0.0, 0.0
    last = 0
    for step in range(12):
        backward(learners, model, step)
        g = weight.grad.numpy().astype(np.float64)
        dense = step < 2 or (step - 2) % 3 == 2
        assert (np.count_nonzero(g) > 0.9 * g.size) == dense
        m = beta1 * m + (1 - beta1) * g
        if dense:
            gap, last = step + 1 - last, step + 1
            v = beta2**gap * v + (1 - beta2**gap) * g * g
        root = np.sqrt(v / (1 - beta2**last)) + eps
        x = x * (1 - lr * decay) - lr / (1 - beta1 ** (step + 1)) * m / root
        optimizer.step()
        np.testing.assert_allclose(weight.detach().numpy(), x, rtol=1e-4, atol=1e-6)
        assert optimizer.state[weight]["refreshed"] == last
        # Vectors are always sent dense.
        assert optimizer.state[model[0].bias]["refreshed"] == step + 1


@pytest.mark.parametrize("dense_by", ["none", "bf16", "qsgd(levels=127)"])
def test_dense_steps_leave_residuals_as_they_are(dense_by):
    model = a_model()
    learners = SimulatedLearners(
        model, RANKS, "topk", density=0.1, dense_every=2, dense_by=dense_by
    )
    backward(learners, model, 0)
    before = [engine.residual("0.weight") for engine in learners.engines]
    backward(learners, model, 1)
    for engine, residual in zip(learners.engines, before, strict=True):
        assert residual.any()
        np.testing.assert_array_equal(engine.residual("0.weight"), residual)
    ours, exact = model[0].weight.grad.clone(), a_model()
    backward(SimulatedLearners(exact, RANKS, "none"), exact, 1)
    error = (ours - exact[0].weight.grad).norm() / ours.norm()
    assert error < 0.02


def test_clipping_leaves_second_moments_unclipped():
    model, plain = a_model(), a_model()
    optimizer = AdamW(model.parameters(), 0.01, max_norm=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    for each in (model, plain):
        backward(SimulatedLearners(each, RANKS, "none"), each, 0)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    optimizer.step()
    theirs.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
        moments = optimizer.state[one], theirs.state[other]
        torch.testing.assert_close(moments[0]["exp_avg"], moments[1]["exp_avg"])
        scale = (norm / 1e-3) ** 2
        torch.testing.assert_close(moments[0]["exp_avg_sq"], moments[1]["exp_avg_sq"] * scale)


def test_exchanges_without_a_step_count_together():
    """With a compressed one among them, the gradient is not uncompressed."""
    model = a_model()
    learners = SimulatedLearners(model, RANKS, "topk", density=0.1, warmup_steps=1, dense_every=2)
    optimizer = AdamW(model.parameters())

    def train(steps):
        for step in steps:
            backward(learners, model, step)
            if step % 2 == 0:  # compressed ones come between, but for the warm-up
                optimizer.step()
        return optimizer.state[model[0].weight]["refreshed"]

    assert train(range(5)) == 1
    with pytest.warns(RuntimeWarning, match="2 times between two steps .* no_sync"):
        assert train(range(5, 8)) == 1
    assert train(range(8, 16)) == 1  # told once


def test_first_moments_that_are_exchanged_are_adams():
    """Where all is sent exactly it makes no difference which of the two is sent."""
    ends = []
    for momentum in (0.0, 0.9):
        model = a_model()
        options = dict(momentum=momentum, warmup_steps=3, dense_every=4, dense_by="none")
        learners = SimulatedLearners(model, RANKS, "topk", density=1.0, bits=32, **options)
        optimizer = AdamW(model.parameters(), 0.01, (0.9, 0.99), weight_decay=0.1)
        for step in range(12):
            backward(learners, model, step)
            if step in (3, 7):  # one is compressed, one is not
                learners.discard()
                continue
            optimizer.step()
        state = optimizer.state[model[0].weight]
        assert (state["refreshed"], state["step"]) == (7, 10)
        ends.append((weights(model), state["exp_avg"], state["exp_avg_sq"]))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-6)


MOMENTS = dict(momentum=0.9, dense_every=3, warmup_steps=1)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (AdamW, {"betas": (0.8, 0.99)}, "momentum=0.9, and the first beta of AdamW is 0.8"),
        (AdamW, {"betas": (0.0, 0.99)}, "momentum=0.9, and the first beta of AdamW is 0.0"),
        (Adam, {"weight_decay": 0.1}, "Adam has a weight_decay that belongs to gradients"),
        (torch.optim.AdamW, {}, "of this AdamW sends first moments"),
        (torch.optim.SGD, {"lr": 0.1}, "of this SGD sends first moments"),
    ],
)
@pytest.mark.parametrize("by_rule", [False, True])
def test_optimizers_that_take_no_first_moments_refuse_them(make, options, message, by_rule):
    model = a_model()
    given = {"rules": [("0.weight", MOMENTS)]} if by_rule else MOMENTS
    learners = SimulatedLearners(model, RANKS, "dither", **given)
    optimizer = make(model.parameters(), **options)
    backward(learners, model, 0)
    optimizer.step()  # of gradients
    backward(learners, model, 1)
    with pytest.raises(UnsupportedError, match=message):
        optimizer.step()


def test_velocities_are_no_first_moments():
    model = a_model()
    learners = SimulatedLearners(model, RANKS, "topk", momentum=0.9, density=1.0, warmup_steps=0)
    optimizer = AdamW(model.parameters())
    backward(learners, model, 0)
    assert learners.engines[0].momenta == [0.0]
    with pytest.raises(UnsupportedError, match="no second moment yet"):
        optimizer.step()


def test_a_second_step_takes_the_same_first_moments():
    model = a_model()
    learners = SimulatedLearners(model, RANKS, "dither", **MOMENTS)
    optimizer = AdamW(model.parameters())
    for step in range(2):
        backward(learners, model, step)
        optimizer.step()
    state = optimizer.state[model[0].weight]
    before = [state[kind].clone() for kind in ("exp_avg", "exp_avg_sq")]
    optimizer.step()
    assert torch.equal(state["exp_avg"], before[0])
    assert torch.equal(state["exp_avg_sq"], before[1])


def test_first_moments_that_come_twice_for_a_step_are_named():
    model = a_model()
    learners = SimulatedLearners(model, RANKS, "dither", **{**MOMENTS, "dense_every": 50})
    optimizer = AdamW(model.parameters())
    backward(learners, model, 0)
    optimizer.step()
    for step in range(1, 7):
        backward(learners, model, step)
        if step in (2, 4):
            optimizer.step()
    with pytest.warns(RuntimeWarning, match="exchanged 2 times .* or as first moments"):
        optimizer.step()


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_mean_of_first_moments_stays_on_other_numbers_of_ranks(ranks):
    model = a_model()
    options = dict(density=1.0, bits=32, dense_by="none", **MOMENTS)
    learners = SimulatedLearners(model, 4, "topk", **options)
    for step in range(2):
        backward(learners, model, step, ranks=4)
    states = [engine.state_dict() for engine in learners.engines]
    others = SimulatedLearners(model, ranks, "topk", **options)
    for rank, engine in enumerate(others.engines):
        engine.load_state_dict(checkpoint.part_of(checkpoint.gathered(states), rank, ranks))
    means = [
        np.sum([e.state_dict()["state"]["velocity"]["0.weight"] for e in each.engines
                if "0.weight" in e.state_dict()["state"].get("velocity", {})], 0) / size
        for each, size in ((learners, 4), (others, ranks))
    ]  # fmt: skip
    np.testing.assert_allclose(means[1], means[0], rtol=1e-5, atol=1e-7)


def test_compressed_gradients_alone_are_refused():
    model = a_model()
    learners = SimulatedLearners(model, RANKS, "topk", density=0.1)
    optimizer = AdamW(model.parameters())
    backward(learners, model, 0)
    with pytest.raises(UnsupportedError, match="no second moment yet"):
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_resume_is_exact(momentum):
    """Of optimizer, model and learners; also from a file, by the safe loader."""

    def start():
        model = a_model()
        options = dict(density=0.1, warmup_steps=2, dense_every=3, dense_by="qsgd")
        options["momentum"] = momentum
        learners = SimulatedLearners(model, RANKS, "topk", **options)
        return model, learners, AdamW(model.parameters(), 0.01, max_norm=0.1)

    model, learners, optimizer = start()
    for step in range(5):
        backward(learners, model, step)
        optimizer.step()
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    states = [engine.state_dict() for engine in learners.engines]
    resumed, others, optimizers = start()
    resumed.load_state_dict(saved[0])
    optimizers.load_state_dict(saved[1])
    for engine, state in zip(others.engines, states, strict=True):
        engine.load_state_dict(state)
    for step in range(5, 12):
        for each in ((model, learners, optimizer), (resumed, others, optimizers)):
            backward(each[1], each[0], step)
            each[2].step()
    assert torch.equal(weights(model), weights(resumed))


def test_states_of_torch_optimizers_load():
    plain, model = a_model(), a_model()
    theirs = torch.optim.AdamW(plain.parameters(), 0.01)
    backward(SimulatedLearners(plain, RANKS, "none"), plain, 0)
    theirs.step()
    ours = AdamW(model.parameters(), 0.01)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    model.load_state_dict(plain.state_dict())
    for each, optimizer in ((plain, theirs), (model, ours)):
        backward(SimulatedLearners(each, RANKS, "none"), each, 1)
        optimizer.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "lr must be"),
        ({"betas": (0.9, 1.0)}, "betas must lie"),
        ({"max_norm": 0.0}, "max_norm must be"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW(a_model().parameters(), **options)


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("fft", {"dense_every": 1}, "from 2 up"),
        ("fft", {"dense_every": 10, "dense_by": "topk"}, "without bias"),
        ("fft", {"dense_every": 10, "dense_by": "dither:ratio=80"}, "much noise"),
        ("signsgd", {"dense_every": 10}, "sends signs"),
        ("dgc", {"dense_every": 10}, "momentum of its own"),
        ("topk", {"dense_every": 10, "momentum": 0.9, "nesterov": True}, "or Nesterov's"),
        ("topk", {"dense_every": 10, "momentum": 0.9, "decay": 0.9}, "momentum of its own"),
        ("fft", {"dense_every": 10, "dense_by": "dither:momentum=0.9"}, "without bias"),
    ],
)
def test_dense_steps_that_cannot_be_are_refused(recipe, options, message):
    with pytest.raises(ValueError, match=message):
        make_policy(recipe, **options)
