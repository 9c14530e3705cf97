"""The low-pass filter of residuals, ``beta``, of all recipes that have one."""

from __future__ import annotations

import inspect
import itertools
import random

import numpy as np
import pytest
import scipy.special

from horovod_fftcomp import get_scheme, simulate
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once
from tests.contracts import ADAPTIVE_RECIPES, DRAWN_RECIPES

FILTERED = [name for name, recipe in RECIPES.items() if "beta" in recipe.options]
FINE = {
    "qsgd": {"error_feedback": True},
    "natural": {"error_feedback": True},
    "dorefa": {"error_feedback": True, "bits": 8},
    "hard_threshold": {"threshold": 1.0},
    "strom": {"threshold": 1.0},
    "auto": {"every": 5},  # the first four are trials
    "powersgd": {"rank": 2},
    "arctopk": {"bits": 32},
}
BETA = 0.3
CASES = [
    (name, {**FINE.get(name, {}), **exchange})
    for name in FILTERED
    for exchange in ({"exchange": "gather"}, {"exchange": "sharded"})
    if "exchange" in RECIPES[name].options or exchange["exchange"] == "gather"
    if name not in DRAWN_RECIPES or exchange["exchange"] == "gather"
]


def gradients(n_steps=8, n_ranks=2):
    return np.random.default_rng(3).standard_normal((n_steps, n_ranks, 6000)).astype(np.float32)


def options_of(name, options):
    return {key: value for key, value in options.items() if key in RECIPES[name].options}


def test_every_recipe_with_an_option_for_feedback_has_a_filter():
    with_feedback = {name for name, one in RECIPES.items() if "error_feedback" in one.options}
    always = {name for name in ADAPTIVE_RECIPES if get_scheme(name).error_feedback}
    assert with_feedback | always == set(FILTERED)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_residuals_are_those_of_the_formula(name, options):
    """Summed over the ranks, of which the sums of what is sent are known."""
    options = options_of(name, options)
    grads = gradients()
    residual, largest = np.zeros(grads.shape[2]), 0.0
    for grad, step in zip(grads, simulate(name, grads, beta=BETA, **options), strict=True):
        wanted = residual + grad.sum(0, np.float64)
        expected = (1 - BETA) * residual + BETA * (wanted - 2 * step.average)
        residual = step.residual.sum(0, np.float64)
        np.testing.assert_allclose(residual, expected, atol=2e-5)
        largest = max(largest, np.abs(residual).max())
    assert largest > 0 or name == "powersgd"  # a vector, which it sends whole


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in ("topk", "fft", "dct", "sparcml", "gtopk", "scalecom")),
     ("random_k", {}), ("arctopk", {"bits": 32, "block": 32}), ("topk", {"exchange": "sharded"})],
)  # fmt: skip
def test_a_step_that_sends_everything_keeps_the_filters_share(name, options):
    """Source: Chen et al. 2020: residual <- (1 - beta) residual + beta (wanted - sent)."""
    given = {"bits": 32} if "bits" in RECIPES[name].options else {}
    policy = make_policy(name, density=0.1, beta=0.5, **{**given, **options})
    tensors = (Tensor("a", (64, 64)),)
    engines = [Engine([Bucket(tensors, policy)], rank, 2) for rank in range(2)]
    rng = np.random.default_rng(0)
    for density in (0.1, 1.0):
        before = sum(engine.residual("a").astype(np.float64) for engine in engines)
        for engine in engines:
            engine.buckets = [Bucket(tensors, policy.with_density(density))]
        grads = [[[rng.standard_normal(4096).astype(np.float32)]] for _ in engines]
        exchange_once(engines, grads, random.Random(0))
        for engine in engines:
            engine.settle()
    after = sum(engine.residual("a").astype(np.float64) for engine in engines)
    assert np.abs(before).max() > 0
    np.testing.assert_allclose(after, 0.5 * before, atol=1e-5 * np.abs(before).max())


def test_beta_filters_the_second_residual_of_a_threshold_too():
    grads = np.array([[[1.5], [-1.0]], [[2.0], [2.0]]], np.float32)  # steps, ranks, one element
    options = {"threshold": 1.0, "beta": 0.5, "exchange": "sharded"}
    first, second = simulate("hard_threshold", grads, **options)
    assert first.residual.sum() == 0.25  # the sum, 0.5, is below the threshold
    assert second.residual.sum() == 0.125  # 4.25 is sent


@pytest.mark.parametrize("name", FILTERED)
def test_one_is_no_filter(name):
    options = options_of(name, FINE.get(name, {}))
    grads = gradients(4)
    residual = np.zeros(grads.shape[2])
    for grad, step in zip(grads, simulate(name, grads, beta=1.0, **options), strict=True):
        residual = residual + grad.sum(0, np.float64) - 2 * step.average
        np.testing.assert_allclose(step.residual.sum(0, np.float64), residual, atol=2e-5)


@pytest.mark.parametrize("name", FILTERED)
def test_values_out_of_range_are_refused(name):
    options = options_of(name, FINE.get(name, {}))
    for beta in (0.0, -0.5, 1.01):
        with pytest.raises(
            ValueError, match=r"beta must lie in \(0, 1\], got .*; 1 means no filter"
        ):
            get_scheme(name, beta=beta, **options)
    if inspect.signature(RECIPES[name].make).parameters.get("error_feedback") is None:
        return
    if RECIPES[name].options["beta"] == 1:  # others have a filter by default
        with pytest.raises(ValueError, match="error_feedback"):
            get_scheme(name, **{**options, "error_feedback": False}, beta=0.5)


def test_the_filter_is_in_the_specification_but_one_is_not():
    assert get_scheme("topk").spec() == get_scheme("topk", beta=1.0).spec()
    assert "beta=0.5" in get_scheme("topk", beta=0.5).spec()
    assert "beta" not in get_scheme("topk").spec()


def digits_accuracy(recipe, n_ranks=2, n_steps=300, lr=0.05, momentum=0.9, **options):
    """Return the test accuracy of an MLP of 64, 256, 128 and 10 units after SGD."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    rng, sizes = np.random.default_rng(0), (64, 256, 128, 10)
    order, images = rng.permutation(len(labels)), (images / 16).astype(np.float32)
    (x_test, x), (y_test, y) = (np.split(each[order], [450]) for each in (images, labels))
    layers = list(itertools.pairwise(sizes))
    weights = [rng.standard_normal(pair) * np.sqrt(2 / pair[0]) for pair in layers]
    weights = [weight.astype(np.float32) for weight in weights]
    velocities = [np.zeros_like(weight) for weight in weights]
    tensors = tuple(Tensor(f"layer{n}", pair) for n, pair in enumerate(layers))
    bucket = Bucket(tensors, make_policy(recipe, **options))
    engines = [Engine([bucket], rank, n_ranks) for rank in range(n_ranks)]
    for _ in range(n_steps):
        grads = []
        for rank in range(n_ranks):
            batch = rng.choice(np.arange(rank, len(y), n_ranks), 32)
            active = [x[batch]]
            for weight in weights[:-1]:
                active.append(np.maximum(active[-1] @ weight, 0))
            delta = scipy.special.softmax(active[-1] @ weights[-1], 1)
            delta[np.arange(32), y[batch]] -= 1
            own = []
            for inputs, weight in zip(active[::-1], weights[::-1], strict=True):
                own.append((inputs.T @ delta / 32).reshape(-1))
                delta = (delta @ weight.T) * (inputs > 0)
            grads.append([own[::-1]])
        exchange_once(engines, grads, random.Random(0))
        for weight, velocity, total in zip(weights, velocities, engines[0].sums(0), strict=True):
            velocity *= momentum
            velocity += total.reshape(weight.shape) / n_ranks
            weight -= lr * velocity
        for engine in engines:
            engine.settle()
    for weight in weights[:-1]:
        x_test = np.maximum(x_test @ weight, 0)
    return ((x_test @ weights[-1]).argmax(1) == y_test).mean()


@pytest.mark.more
@pytest.mark.parametrize("recipe", ["random_block", "random_k"])
def test_random_positions_train_under_momentum(recipe):
    """Dense SGD gets 0.97; a full residual comes back too late, which 0.1 to 0.5 tell."""
    assert digits_accuracy(recipe, density=0.05) > 0.9


@pytest.mark.parametrize("recipe", ["random_block", "random_k", "scalecom", "arctopk"])
def test_without_error_feedback_nothing_is_filtered(recipe):
    plain, filtered = (get_scheme(recipe, error_feedback=False, beta=beta) for beta in (1.0, 0.5))
    assert plain == filtered
