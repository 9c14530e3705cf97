"""Simulated learners: whose gradients, whose buffers, and what the mean of them is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod")
from torch import nn  # noqa: E402

from horovod_fftcomp.torch import SimulatedLearners  # noqa: E402

pytestmark = pytest.mark.torch


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))


def backward(model, rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(16, 64, generator=generator)).square().mean().backward()


def test_without_compression_the_mean_is_that_of_the_gradients():
    model = make_model()
    learners = SimulatedLearners(model, 3, "none")
    expected = None
    for rank in range(3):
        with learners.turn_of(rank):
            backward(model, rank)
        grads = [parameter.grad.clone() for parameter in model.parameters()]
        expected = (
            grads if expected is None else [a + b for a, b in zip(expected, grads, strict=True)]
        )
    learners.reduce()
    for parameter, total in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total / 3)
    assert learners.dense_nbytes == 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("recipe", ["topk", "fft", "scalecom", "random_k"])
def test_what_is_not_sent_is_carried_on_by_each_learner(recipe):
    model = make_model()
    options = {"beta": 1} if recipe in ("scalecom", "random_k") else {}
    learners = SimulatedLearners(model, 2, recipe, density=0.1, **options)
    owed, sent = torch.zeros(32, 64), torch.zeros(32, 64)
    for step in range(5):
        for rank in range(2):
            with learners.turn_of(rank):
                backward(model, rank, step)
            owed += model[0].weight.grad
        learners.reduce()
        sent += 2 * model[0].weight.grad
    residual = sum(torch.from_numpy(engine.residual("0.weight")) for engine in learners.engines)
    torch.testing.assert_close(sent + residual, owed, atol=1e-6, rtol=1e-5)
    assert all(norm > 0 for norm in learners.residual_norms())


def test_learners_have_buffers_of_their_own():
    model = make_model()
    learners = SimulatedLearners(model, 2, "none")
    means = []
    for rank in range(2):
        with learners.turn_of(rank):
            assert not model[1].running_mean.any()
            backward(model, rank)
            means.append(model[1].running_mean.clone())
    assert not torch.equal(*means)
    for rank in range(2):
        with learners.turn_of(rank):
            assert torch.equal(model[1].running_mean, means[rank])


def test_parameters_that_nobody_uses_get_no_gradient():
    model = make_model()
    learners = SimulatedLearners(model, 2, "none")
    for rank in range(2):
        with learners.turn_of(rank):
            model[0](torch.ones(4, 64)).sum().backward()
    learners.reduce()
    assert model[0].weight.grad is not None
    assert model[3].weight.grad is None


def test_a_bad_gradient_leaves_no_trace():
    model = make_model()
    learners = SimulatedLearners(model, 2, "topk", density=0.1)
    for step in range(3):
        before = learners.residual_norms()
        for rank in range(2):
            with learners.turn_of(rank):
                backward(model, rank, step)
                if step == 2 and rank == 1:
                    model[1].bias.grad[0] = float("nan")  # of a tensor that travels dense
        learners.reduce()
    assert learners.residual_norms() == before
    assert learners.costs[0].skipped_steps == 1
    assert torch.isnan(model[1].bias.grad[0])


def test_density_rules_and_warm_up_are_those_of_a_compressor():
    model = make_model()
    rules = [("0.weight", "dense")]
    learners = SimulatedLearners(
        model, 2, "topk", rules=rules, density=0.1, warmup_steps=1, min_numel=1
    )
    sizes = []
    for step, density in enumerate((None, None, 0.5)):
        if density:
            learners.set_density(density)
        for rank in range(2):
            with learners.turn_of(rank):
                backward(model, rank, step)
        before = learners.costs[0].sent_nbytes
        learners.reduce()
        sizes.append(learners.costs[0].sent_nbytes - before)
    assert sizes[0] == 4 * 64 * 32
    assert sizes[1] < sizes[2] < sizes[0]
    with pytest.raises(TypeError, match="has no option colour"):
        SimulatedLearners(model, 2, "topk", colour=1)


def test_a_discarded_reduction_never_was():
    made = []
    for discards in (False, True):
        model = make_model()
        learners = SimulatedLearners(model, 2, "topk", density=0.05)
        for step in range(3):
            for number in [50 + step, step] if discards else [step]:
                for rank in range(2):
                    with learners.turn_of(rank):
                        backward(model, rank, number)
                learners.reduce()
                if number >= 50:
                    learners.discard()
        grads = [parameter.grad for parameter in model.parameters()]
        made.append((grads, learners.residual_norms(), learners.costs[0].sent_nbytes))
    (expected, norms, sent), (found, norms_too, sent_too) = made
    assert (norms, sent) == (norms_too, sent_too)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
