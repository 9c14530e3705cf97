"""The low-pass filter of residuals, ``beta``, of all recipes that have one."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, simulate
from horovod_fftcomp.recipes import RECIPES

FILTERED = [name for name, recipe in RECIPES.items() if "beta" in recipe.options]
FINE = {
    "qsgd": {"error_feedback": True},
    "natural": {"error_feedback": True},
    "dorefa": {"error_feedback": True, "bits": 8},
    "hard_threshold": {"threshold": 1.0},
    "strom": {"threshold": 1.0},
    "auto": {"every": 5},  # the first four are trials
    "powersgd": {"rank": 2},
}
BETA = 0.3
CASES = [
    (name, {**FINE.get(name, {}), **exchange})
    for name in FILTERED
    for exchange in ({"exchange": "gather"}, {"exchange": "sharded"})
    if "exchange" in RECIPES[name].options or exchange["exchange"] == "gather"
    if name not in ("random_block", "random_k") or exchange["exchange"] == "gather"
]


def gradients(n_steps=8, n_ranks=2):
    return np.random.default_rng(3).standard_normal((n_steps, n_ranks, 6000)).astype(np.float32)


def options_of(name, options):
    return {key: value for key, value in options.items() if key in RECIPES[name].options}


def test_every_recipe_with_an_option_for_feedback_has_a_filter():
    with_feedback = {name for name, one in RECIPES.items() if "error_feedback" in one.options}
    assert with_feedback | {"strom", "adacomp"} == set(FILTERED)


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
    if name not in ("scalecom", "random_block", "random_k"):  # whose default may be a filter
        with pytest.raises(ValueError, match="beta is of the residual, so it needs error_feedback"):
            get_scheme(name, **{**options, "error_feedback": False}, beta=0.5)


def test_the_filter_is_in_the_specification_but_one_is_not():
    assert get_scheme("topk").spec() == get_scheme("topk", beta=1.0).spec()
    assert "beta=0.5" in get_scheme("topk", beta=0.5).spec()
    assert "beta" not in get_scheme("topk").spec()
