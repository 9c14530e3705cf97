"""DGC: momentum before compression, what is masked, clipped and kept, and its kernels."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, simulate
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always, make_policy
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once
from tests import reference
from tests.loops import each

SIZES = [0, 1, 63, 64, 65, 4095, 4097, 70_001]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def momentum_sgd(gradients, momentum=0.9, nesterov=False):
    """Yield what an optimizer with momentum would step by, given gradients ``[steps, n]``."""
    velocity = np.zeros(gradients.shape[1])
    for grad in gradients.astype(np.float64):
        if nesterov:
            velocity = momentum * (velocity + grad)
            yield velocity + grad
        else:
            velocity = momentum * velocity + grad
            yield velocity


def by_the_paper(gradients, k, momentum=0.9, nesterov=False, masking=True, max_norm=None):
    """Yield (mean of what is sent, residuals ``[ranks, n]``) by the equations, in float64."""
    u, v = np.zeros((2, *gradients.shape[1:]))
    for grads in gradients.astype(np.float64):
        if max_norm is not None:
            norms = np.linalg.norm(grads, axis=1, keepdims=True)
            grads = grads * np.minimum(1, max_norm / np.sqrt(len(grads)) / norms)
        if nesterov:
            u = momentum * (u + grads)
            v = v + u + grads
        else:
            u = momentum * u + grads
            v = v + u
        sent = np.zeros_like(v)
        for rank in range(len(grads)):
            chosen = np.lexsort((np.arange(v.shape[1]), -np.abs(v[rank])))[:k]
            sent[rank, chosen] = v[rank, chosen]
            v[rank, chosen] = 0
            if masking:
                u[rank, chosen] = 0
        yield sent.mean(0), v


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True},
        {"masking": False},
        {"momentum": 0.0},
        {"max_norm": 3.0},
        {"momentum": 0.5, "nesterov": True, "masking": False, "max_norm": 20.0},
    ],
    ids=str,
)
def test_steps_are_those_of_the_paper(options, ranks):
    gradients = normal(8, ranks, 500)
    steps = simulate("dgc", gradients, density=0.02, **options)
    for ours, (mean, residual) in zip(steps, by_the_paper(gradients, 10, **options), strict=True):
        np.testing.assert_allclose(ours.average, mean, atol=1e-4)
        np.testing.assert_allclose(ours.residual, residual, atol=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
def test_density_one_is_sgd_with_momentum(nesterov, masking):
    gradients = normal(12, 3, 800)
    options = {"density": 1.0, "nesterov": nesterov, "masking": masking}
    expected = momentum_sgd(gradients.mean(1), nesterov=nesterov)
    for step, mean in zip(simulate("dgc", gradients, **options), expected, strict=True):
        np.testing.assert_allclose(step.average, mean, atol=1e-5)
        assert not step.residual.any()


def test_a_warm_up_has_the_momentum_and_hands_it_on():
    gradients = normal(6, 2, 3000)
    options = {"density": 0.01, "masking": False}
    warm = list(simulate("dgc", gradients, warmup_steps=4, **options))
    for step, mean in zip(warm[:4], momentum_sgd(gradients.mean(1)), strict=False):
        np.testing.assert_allclose(step.average, mean, atol=1e-5)
        assert step.sent_bytes == [4 * 3000] * 2
    *_, (whole, velocity) = zip(range(5), momentum_sgd(gradients.mean(1)), strict=False)
    assert whole == 4
    arrives_and_stays = warm[4].average + warm[4].residual.mean(0)
    np.testing.assert_allclose(arrives_and_stays, velocity, atol=1e-5)


def test_a_density_schedule_warms_up_as_published():
    schedule = {0: 0.25, 2: 0.0625, 4: 0.015625, 6: 0.004, 8: 0.001}
    gradients = normal(10, 1, 8000)
    sent = [np.count_nonzero(step.average)
            for step in simulate("dgc", gradients, density_schedule=schedule)]  # fmt: skip
    assert sent == [2000, 2000, 500, 500, 125, 125, 32, 32, 8, 8]


@pytest.mark.parametrize("bits", [3, 8, 16, 32])
def test_without_momentum_and_masking_it_is_topk(bits):
    gradients = normal(5, 2, 2000)
    options = {"density": 0.01, "bits": bits}
    ours = simulate("dgc", gradients, momentum=0.0, masking=False, **options)
    for dgc, topk in zip(ours, simulate("topk", gradients, **options), strict=True):
        assert dgc.average.tobytes() == topk.average.tobytes()
        assert dgc.residual.tobytes() == topk.residual.tobytes()
        assert dgc.sent_bytes == topk.sent_bytes


def test_clipping_follows_the_loss_scale():
    """The same gradients under a scale of 1024 leave 1024 times the state."""
    scheme, grads = get_scheme("dgc", density=0.01, max_norm=2.0), normal(4, 2000)
    states = []
    for scale in (1.0, 1024.0):
        engine = Engine([Bucket((Tensor("w", (2000,)),), always(scheme))], 0, 1)
        engine.follow_loss_scale(scale)
        for grad in grads:
            exchange_once([engine], [[[grad * np.float32(scale)]]], random.Random(0))
            engine.settle()
        engine.follow_loss_scale(1.0)
        states.append(engine.state_dict()["state"])
    for kind in ("velocity", "residual"):
        np.testing.assert_allclose(states[1][kind]["w"], states[0][kind]["w"], atol=1e-6)
        assert states[0][kind]["w"].any()


def test_clipping_an_empty_tensor_does_nothing():
    gradients = np.zeros((2, 2, 0), np.float32)
    for step in simulate("dgc", gradients, density=0.1, max_norm=1.0):
        assert step.average.size == 0


def test_clipping_a_huge_gradient_does_not_overflow():
    gradients = np.full((1, 1, 2000), 1e30, np.float32)
    [step] = simulate("dgc", gradients, density=1.0, max_norm=1.0)
    assert np.linalg.norm(step.average) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(("n", "density"), [(0, 0.1), (1, 0.001), (2, 1.0), (5, 0.99)])
def test_a_tensor_that_travels_whole_keeps_its_velocity(n, density):
    gradients = normal(3, 2, n)
    expected = momentum_sgd(gradients.mean(1))
    for step, mean in zip(simulate("dgc", gradients, density=density), expected, strict=True):
        np.testing.assert_allclose(step.average, mean, atol=1e-5)
        assert not step.residual.any()


def test_velocities_are_summed_when_ranks_become_fewer():
    from horovod_fftcomp.engine import checkpoint

    bucket = Bucket((Tensor("w", (2000,)),), make_policy("dgc", density=0.01))
    engines = [Engine([bucket], rank, 3) for rank in range(3)]
    for step in range(3):
        exchange_once(engines, [[[g]] for g in normal(3, 2000, seed=step)], random.Random(0))
        for engine in engines:
            engine.settle()
    states = [engine.state_dict() for engine in engines]
    alone = Engine([bucket], 0, 1)
    alone.load_state_dict(checkpoint.part_of(checkpoint.gathered(states), 0, 1))
    for kind in ("velocity", "residual"):
        total = sum(state["state"][kind]["w"].astype(np.float64) for state in states)
        np.testing.assert_allclose(alone.state_dict()["state"][kind]["w"], total, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"momentum": 1.0}, ValueError, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"momentum": "0.9"}, TypeError, "momentum must be a number, got '0.9'"),
        ({"nesterov": 1}, TypeError, "nesterov must be True or False, got 1"),
        ({"masking": None}, TypeError, "masking must be True or False, got None"),
        ({"max_norm": 0}, ValueError, "max_norm must be above 0 or None, got 0"),
        ({"bits": 1}, ValueError, "bits must be a whole number from 2 to 16"),
    ],
)
def test_wrong_options_are_told_by_name(options, error, message):
    with pytest.raises(error, match=message):
        get_scheme("dgc", **options)


@pytest.mark.parametrize("kind", ["velocity", "residual"])
def test_a_state_of_another_size_is_refused(kind):
    exchange = get_scheme("dgc").exchange(
        [Tensor("w", (2000,))], [normal(2000)], {kind: {"w": normal(1999)}}, _context()
    )
    with pytest.raises(ValueError, match=f"the {kind} is .* expected"):
        next(exchange)


def _context():
    from horovod_fftcomp.schemes import Context

    return Context(1, 0, 1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.usefixtures("n_threads")
def test_kernels_are_the_reference(n, nesterov):
    grad, velocity, residual = normal(n), normal(n, seed=1), normal(n, seed=2)
    for carried in ((None, None), (velocity, None), (velocity, residual)):
        options = (*carried, 0.9, nesterov, 0.37)
        coeffs, moved = cpu.momentum_accumulate(grad, *options)
        expected, expected_moved = reference.momentum_accumulate(grad, *options)
        assert coeffs.array.tobytes() == expected.array.tobytes()
        assert coeffs[1:] == expected[1:]
        assert moved.tobytes() == expected_moved.tobytes()
    bitmap = reference.bitmap_of(np.flatnonzero(grad > 0.5), n)
    cleared, expected = velocity.copy(), velocity.copy()
    cpu.zero_at(cleared, bitmap)
    reference.zero_at(expected, bitmap)
    assert cleared.tobytes() == expected.tobytes()
    assert np.count_nonzero(cleared) == np.count_nonzero(grad <= 0.5)


@each("bad", [np.nan, np.inf])
@each("at", [0, 5000, 70_000])
def test_a_bad_value_is_seen_wherever_it_lies(bad, at):
    grad = normal(70_001)
    grad[at] = bad
    assert cpu.momentum_accumulate(grad, None, None, 0.9, False, 1.0)[0].peak >= 0x7F800000
