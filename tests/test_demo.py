"""DeMo: a momentum in the spectrum, of which what is sent is taken out."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import get_codec, get_scheme, simulate
from horovod_fftcomp.schemes import Context, Tensor


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("recipe", ["demo", "topk"])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.5])
def test_every_step_is_that_of_the_formulas(decay, recipe):
    gradients = normal(8, 2, 640)
    codec = get_codec(recipe, density=0.1, bits=32)
    momentum = np.zeros((2, 640))
    steps = simulate(recipe, gradients, density=0.1, bits=32, decay=decay)
    for grads, step in zip(gradients, steps, strict=True):
        due = decay * momentum + grads
        sent = np.stack([codec.decode(codec.encode(row.astype(np.float32))) for row in due])
        momentum = due - sent
        np.testing.assert_allclose(step.average, sent.mean(0), atol=1e-4)
        np.testing.assert_allclose(step.residual, momentum, atol=1e-4)


@pytest.mark.parametrize("decay", [1.0, 0.99])
def test_momentum_forgets_at_the_stated_rate(decay):
    """sum over t of decay^(T - t) (gradient - sent) is the momentum after step T."""
    gradients = normal(25, 3, 1000)
    expected = np.zeros(1000)
    for grads, step in zip(gradients, simulate("demo", gradients, decay=decay), strict=True):
        expected = decay * expected + grads.mean(0) - step.average
        np.testing.assert_allclose(step.residual.mean(0), expected, atol=2e-4)


def test_signs_alone_arrive():
    gradients = normal(4, 3, 500)
    plain = simulate("demo", gradients)
    for step, other in zip(simulate("demo", gradients, sign=True), plain, strict=True):
        assert set(np.unique(step.average)) <= {-1.0, 0.0, 1.0}
        np.testing.assert_array_equal(step.average, np.sign(other.average))
        assert step.residual.tobytes() == other.residual.tobytes()


@pytest.mark.parametrize("shape", [(3,), (64, 64), (7, 11, 13), (5, 3, 3, 3), (1,)])
def test_any_shape_is_taken(shape):
    scheme, tensor = get_scheme("demo", decay=0.5), Tensor("w", shape)
    grad = normal(int(np.prod(shape)))
    exchange = scheme.exchange([tensor], [grad], {}, Context(1, 0, 1))
    message = next(exchange).data
    with pytest.raises(StopIteration) as stopped:
        exchange.send(message)
    outcome = stopped.value.value
    left = scheme.residual(outcome.state, tensor)
    assert left.shape == shape
    np.testing.assert_allclose(outcome.sums[0] + left.reshape(-1), grad, atol=1e-5)


def test_the_momentum_that_is_carried_on_stays_as_it_was_until_the_step_is_settled():
    scheme, tensor = get_scheme("demo", decay=0.5), Tensor("w", (640,))
    momentum = {"residual": {"w": normal(640, seed=1)}}
    before = momentum["residual"]["w"].tobytes()
    next(scheme.exchange([tensor], [normal(640)], momentum, Context(1, 0, 1)))
    assert momentum["residual"]["w"].tobytes() == before


@pytest.mark.parametrize("decay", [0, -0.1, 1.1])
def test_other_decays_are_refused(decay):
    with pytest.raises(ValueError, match=r"decay must lie in \(0, 1\]"):
        get_scheme("demo", decay=decay)
    with pytest.raises(TypeError, match=r"decay must be a number, got '0\.9'"):
        get_scheme("demo", decay="0.9")
    with pytest.raises(ValueError, match="it needs error_feedback=True"):
        get_scheme("topk", decay=0.9, error_feedback=False)
    with pytest.raises(TypeError, match="sign must"):
        get_scheme("demo", sign="yes")
