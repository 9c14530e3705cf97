"""Positions that all ranks draw alike: how they are drawn, how often, and what travels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, simulate
from horovod_fftcomp.codec.sparsifiers import RandomBlock, RandomK
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.drive import drive, exchange_of
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.wire import counter_rng
from tests.contracts import DRAWN_RECIPES, SHARED_RECIPES
from tests.reference_ops import positions_of

SELECTIONS = [RandomBlock, RandomK]


def alone(scheme, tensors, grads, step=0):
    """Return what an exchange on a single rank ends in."""
    engine = Engine([Bucket(tuple(tensors), always(scheme))], 0, 1)
    engine.step = step
    return drive(exchange_of(engine, 0, grads), lambda round_: round_.data.copy())


def test_numbers_are_those_of_the_published_functions():
    assert counter_rng.mix(0) == 0xE220A8397B1DCDAF
    assert counter_rng.draw(42, 0, "layer1.weight", 0) == 0x646FF99C882AB844
    starts = [
        counter_rng.below(counter_rng.draw(42, t, "layer1.weight", 0), 1000) for t in range(4)
    ]
    assert starts == [392, 868, 913, 414]
    names = ["layer1.weight", "", "b"]
    expected = [counter_rng.draw(2**64 - 1, 7, name, 1) for name in names]
    assert (
        counter_rng.draws(counter_rng.named((2**64 - 1, n) for n in names), 7, 1).tolist()
        == expected
    )


def test_positions_are_those_of_the_formulas():
    block = positions_of(RandomBlock(0.2, seed=42), 1000, 2, "layer1.weight")
    assert block.tolist() == [*range(913, 1000), *range(113)]
    drawn = positions_of(RandomK(0.005, seed=42), 1000, 0, "layer1.weight")
    assert drawn.tolist() == [392, 619, 846, 73, 300]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 37, 1000, 1024, 9973])
@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
def test_positions_are_distinct_and_as_many_as_counted(selection, n, density):
    sampler = selection(density)
    for step in range(5):
        found = positions_of(sampler, n, step, "w")
        assert found.dtype == np.int64
        assert len(set(found.tolist())) == found.size == sampler.count(n)
        assert set(found.tolist()) <= set(range(n))


def test_positions_of_a_large_tensor_are_exact():
    n = 2**32 - 5
    found = positions_of(RandomK(1e-6, seed=1), n, 0, "w")
    step = (int(found[1]) - int(found[0])) % n
    assert math.gcd(step, n) == 1
    last = (int(found[0]) + step * (found.size - 1)) % n
    assert int(found[-1]) == last


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_position_is_sent_equally_often(selection):
    """Pearson's chi-square of the starts; of the visits, which depend, the largest deviation."""
    n, steps = 100, 8000
    sampler = selection(0.1)
    visits, starts = np.zeros(n), np.zeros(n)
    for step in range(steps):
        found = positions_of(sampler, n, step, "w")
        visits[found] += 1
        starts[found[0]] += 1
    expected = steps / n
    assert ((starts - expected) ** 2 / expected).sum() < 149.4  # 99 degrees of freedom, p = 0.001
    mean, deviation = 0.1 * steps, math.sqrt(0.1 * 0.9 * steps)
    assert visits.sum() == 10 * steps
    assert np.abs(visits - mean).max() < 5 * deviation


@pytest.mark.parametrize("selection", SELECTIONS)
def test_mean_error_over_all_starts_is_the_share_not_sent(selection):
    n, x = 37, np.random.default_rng(0).standard_normal(37)
    starts = {int(p[0]): p for p in (positions_of(selection(0.14), n, t, "w") for t in range(3000))}
    assert len(starts) == n
    if selection is RandomBlock:
        lost = [(x**2).sum() - (x[p] ** 2).sum() for p in starts.values()]
        assert np.mean(lost) == pytest.approx((1 - 5 / 37) * (x**2).sum())


@pytest.mark.parametrize("recipe", DRAWN_RECIPES)
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_bytes_do_not_grow_with_the_ranks(recipe, ranks):
    gradients = np.random.default_rng(0).standard_normal((2, ranks, 3000)).astype(np.float32)
    for step in simulate(recipe, gradients, density=0.01):
        assert step.sent_bytes == [4 * 30] * ranks
    assert get_scheme(recipe, density=0.01).rounds == ("allreduce",)


@pytest.mark.parametrize("recipe", SHARED_RECIPES)
def test_all_of_a_tensor_is_the_dense_mean(recipe):
    gradients = np.random.default_rng(0).standard_normal((3, 2, 999)).astype(np.float32)
    for ours, dense in zip(
        simulate(recipe, gradients, density=1.0), simulate("none", gradients), strict=True
    ):
        assert ours.average.tobytes() == dense.average.tobytes()
        assert not ours.residual.any()


@pytest.mark.parametrize("recipe", DRAWN_RECIPES)
def test_unbiased_means_are_the_gradient(recipe):
    gradient = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    options = {"density": 0.2, "error_feedback": False, "unbiased": True}
    steps = 800
    mean = np.zeros(50)
    for step in simulate(recipe, (gradient[None] for _ in range(steps)), **options):
        mean += step.average / steps
    # The variance of one draw of one element is (n/k - 1) of its square.
    np.testing.assert_allclose(mean, gradient, atol=5 * math.sqrt(4 / steps) * 3, rtol=0)
    assert np.abs(mean - gradient).mean() < 2 * math.sqrt(4 / steps)
    with pytest.raises(ValueError, match="error_feedback=False"):
        get_scheme(recipe, unbiased=True)


@pytest.mark.parametrize("recipe", DRAWN_RECIPES)
@pytest.mark.parametrize("ranks", [2, 5])
def test_gathered_each_rank_sends_what_it_drew_for_itself(recipe, ranks):
    n, density = 2000, 0.1
    selection = get_scheme(recipe, density=density).selection
    gradients = np.random.default_rng(0).standard_normal((3, ranks, n)).astype(np.float32)
    residual = np.zeros((ranks, n))
    steps = simulate(recipe, gradients, density=density, exchange="gather", beta=1.0)
    for number, (grads, step) in enumerate(zip(gradients, steps, strict=True)):
        due, sent = residual + grads, np.zeros((ranks, n))
        for rank in range(ranks):
            chosen = positions_of(selection, n, number, f"gradient#{rank}")
            sent[rank, chosen] = due[rank, chosen]
        residual = due - sent
        np.testing.assert_allclose(step.average, sent.mean(0), atol=1e-6)
        np.testing.assert_allclose(step.residual, residual, atol=1e-6)
        assert step.sent_bytes == [4 * 200] * ranks
        assert step.received_bytes == [4 * 200 * (ranks - 1)] * ranks
    union = np.count_nonzero(step.average) / n
    assert union == pytest.approx(1 - (1 - density) ** ranks, rel=0.25)


def test_tensors_seeds_and_steps_draw_differently():
    drawn = {
        tuple(positions_of(RandomK(0.01, seed), 10_000, step, name))
        for seed in range(3) for step in range(3) for name in ("a", "b", "c")
    }  # fmt: skip
    assert len(drawn) == 27


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_other_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="seed must be a whole number"):
        get_scheme("random_k", seed=seed)
    for other in (1.0, True, None):
        with pytest.raises(TypeError, match=f"seed must be a whole number, got {other}"):
            get_scheme("random_k", seed=other)


@pytest.mark.parametrize("recipe", DRAWN_RECIPES)
@pytest.mark.parametrize("options", [{}, {"error_feedback": False}, "unbiased"])
def test_energies_are_those_of_what_arrives(recipe, options):
    if options == "unbiased":
        options = {"error_feedback": False, "unbiased": True}
    scheme, tensor = get_scheme(recipe, density=0.1, **options), Tensor("w", (40, 50))
    grad = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    outcome = alone(scheme, [tensor], [grad])
    energy, total = outcome.measured().energies["w"], outcome.sums[0]
    assert energy.gradient == pytest.approx((grad**2).sum(), rel=1e-5)
    assert energy.left == pytest.approx(((grad - total) ** 2).sum(), rel=1e-4)


@pytest.mark.parametrize("recipe", SHARED_RECIPES)
def test_nothing_is_left_of_a_tensor_that_is_sent_whole(recipe):
    scheme, tensor = get_scheme(recipe, density=1.0), Tensor("w", (1500,))
    for seed in range(20):
        grad = np.random.default_rng(seed).standard_normal(1500).astype(np.float32)
        assert 0 <= alone(scheme, [tensor], [grad]).measured().energies["w"].left < 1e-3


@pytest.mark.parametrize("recipe", SHARED_RECIPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_makes_all_of_its_tensor_nan_wherever_it_lies(recipe, bad):
    scheme = get_scheme(recipe, density=0.01)
    tensors = [Tensor("a", (1000,)), Tensor("b", (500,))]
    for place in (0, 123, 999):
        grads = [np.ones(1000, np.float32), np.ones(500, np.float32)]
        grads[0][place] = bad
        outcome = alone(scheme, tensors, grads, step=7)
        assert not outcome.flags.finite
        assert np.isnan(outcome.sums[0]).all()
        assert np.isfinite(outcome.sums[1]).all()
