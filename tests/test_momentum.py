"""Momentum before compression, for every recipe with error feedback."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, list_compressors, simulate
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always, make_policy
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once

WITH_MOMENTUM = [name for name in list_compressors() if "nesterov" in RECIPES[name].options]
OWN = {"dgc", "sketchsgd"}  # of another kind
EXCHANGES = [
    (name, options)
    for name in sorted(set(WITH_MOMENTUM) - OWN)
    for options in ({}, {"exchange": "sharded"})
    if not options or RECIPES[name].options.get("exchange") == "auto"
]
N = 5000


def gradients(steps=6, ranks=3, n=N):
    return np.random.default_rng(0).standard_normal((steps, ranks, n)).astype(np.float32)


def velocities_of(grads, momentum, nesterov):
    """Return what is exchanged, float32 ``[steps, ranks, n]``, by the equations of DGC."""
    moved, velocity, mu = [], np.zeros_like(grads[0]), np.float32(momentum)
    for grad in grads:
        velocity = mu * (velocity + grad) if nesterov else mu * velocity + grad
        moved.append(velocity + grad if nesterov else velocity)
    return np.array(moved)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("recipe", "options"), EXCHANGES)
def test_velocities_are_exchanged_as_gradients_are(recipe, options, nesterov):
    grads = gradients()
    moved = velocities_of(grads, 0.9, nesterov)
    ours = simulate(recipe, grads, momentum=0.9, nesterov=nesterov, **options)
    for step, plain in zip(ours, simulate(recipe, moved, **options), strict=True):
        assert step.average.tobytes() == plain.average.tobytes()
        assert step.residual.tobytes() == plain.residual.tobytes()
        assert step.sent_bytes == plain.sent_bytes


def test_recipes_with_error_feedback_and_dither_have_it():
    for name in list_compressors():
        options = RECIPES[name].options
        has_it = "beta" in options or name in OWN or name == "dither"
        assert ("nesterov" in options) == has_it, name


def engines_of(ranks=2, recipe="fft", **options):
    scheme = get_scheme(recipe, momentum=0.9, **options)
    bucket = Bucket((Tensor("w", (N,)),), always(scheme))
    return [Engine([bucket], rank, ranks) for rank in range(ranks)]


def step(engines, grads):
    exchange_once(engines, [[[grad]] for grad in grads], random.Random(0))
    sums = engines[0].sums(0)[0]
    for engine in engines:
        engine.settle()
    return sums


@pytest.mark.parametrize("recipe", ["fft", "auto", "powersgd", "scalecom"])
def test_a_saved_state_goes_on_bit_for_bit(recipe):
    grads, engines = gradients(8, 2), engines_of(recipe=recipe)
    for number in range(5):
        step(engines, grads[number])
    again = engines_of(recipe=recipe)
    for engine, before in zip(again, engines, strict=True):
        engine.load_state_dict(before.state_dict())
    for number in range(5, 8):
        assert step(again, grads[number]).tobytes() == step(engines, grads[number]).tobytes()


def test_a_bad_step_leaves_velocities_alone():
    grads, engines = gradients(3, 2), engines_of()
    step(engines, grads[0])
    before = [engine.state_dict()["state"] for engine in engines]
    broken = grads[1].copy()
    broken[1, 7] = np.nan
    assert np.isnan(step(engines, broken)).all()
    for engine, state in zip(engines, before, strict=True):
        after = engine.state_dict()["state"]
        assert after["velocity"]["w"].tobytes() == state["velocity"]["w"].tobytes()
        assert after["residual"]["w"].tobytes() == state["residual"]["w"].tobytes()


def test_a_frozen_tensor_keeps_its_velocity():
    grads, engines = gradients(2, 2), engines_of()
    step(engines, grads[0])
    before = engines[0].state_dict()["state"]["velocity"]["w"]
    step(engines, [None, grads[1, 1]])
    assert engines[0].state_dict()["state"]["velocity"]["w"].tobytes() == before.tobytes()


def test_a_warm_up_has_the_momentum_and_hands_it_on():
    policy = make_policy("fft", momentum=0.9, warmup_steps=3)
    engines = [Engine([Bucket((Tensor("w", (N,)),), policy)], rank, 2) for rank in range(2)]
    grads = gradients(4, 2)
    moved = velocities_of(grads, 0.9, False)
    for number in range(4):
        sums = step(engines, grads[number])
        if number < 3:
            np.testing.assert_allclose(sums, moved[number].sum(0), atol=1e-5)
    left = sum(engine.residual("w") for engine in engines)
    np.testing.assert_allclose(sums + left, moved[3].sum(0), atol=1e-5)


def test_velocities_follow_the_loss_scale():
    engines, others = engines_of(), engines_of()
    for number, scale in enumerate((1.0, 1.0, 1024.0, 1024.0)):
        grads = gradients(4, 2)[number]
        for engine in others:
            engine.follow_loss_scale(scale)
        expected = step(engines, grads)
        assert (step(others, grads * np.float32(scale)) == expected * np.float32(scale)).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="nesterov"):
        get_scheme("fft", nesterov=True)
    with pytest.raises(ValueError, match=r"momentum must lie in \[0, 1\), got 1.0"):
        get_scheme("fft", momentum=1.0)
    with pytest.raises(UnsupportedError, match="ranks_per_node"):
        make_policy("fft", momentum=0.9, ranks_per_node=2).at(0)
    with pytest.raises(UnsupportedError, match="differences of weights"):
        get_scheme("fft", momentum=0.9).check_differences("LocalSteps")


def test_the_exchange_is_decided_as_without_it():
    large = [Tensor("w", (1 << 20,))]
    for momentum in (0.0, 0.9):
        policy = make_policy("fft", momentum=momentum)
        assert policy.decided(large, 2).in_force()["exchange"] == "gather"
        assert policy.decided(large, 16).in_force()["exchange"] == "sharded"


@pytest.mark.parametrize("recipe", ["topk", "fft", "auto", "powersgd", "scalecom"])
def test_bytes_and_growth_are_those_of_the_exchange_of_velocities(recipe):
    """A velocity takes the place of the gradient, so the residual's alarm is no laxer."""
    plain, ours = get_scheme(recipe), get_scheme(recipe, momentum=0.9)
    tensor = Tensor("w", (300, 200))
    assert ours.traits.accumulation == plain.traits.accumulation == 1
    assert ours.sent_nbytes(tensor) == plain.sent_nbytes(tensor)
    assert ours.received_nbytes(tensor, 8) == plain.received_nbytes(tensor, 8)
