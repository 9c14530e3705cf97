"""The in-process world raises where a real job would hang; ``simulate`` is the public face."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import ConfigMismatchError, get_scheme, simulate
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.simulation import InProcessWorld


def _world(*rounds):
    world = InProcessWorld(len(rounds))
    for rank, round_ in enumerate(rounds):
        if round_ is not None:
            world.submit(rank, "x", round_)
    return world


def test_collectives():
    a, b = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
    assert _world(Round("allreduce", a), Round("allreduce", b)).complete("x")[1].tolist() == [
        11,
        22,
    ]
    gathered = _world(Round("allgather", a), Round("allgather", b[:1])).complete("x")
    assert [output.tolist() for output in gathered] == 2 * [[1, 2, 10]]
    assert a.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, r"ranks \[1\] did not submit 'x'"),
        (Round("allgather", np.ones(2, np.float32)), "collectives differ"),
        (Round("allreduce", np.ones(2, np.float64)), "dtypes differ"),
        (Round("allreduce", np.ones(3, np.float32)), "shapes differ"),
        (Round("allreduce", np.ones(2, np.float32), 1), "roots differ"),
    ],
)
def test_what_would_hang_raises(second, message):
    with pytest.raises(ConfigMismatchError, match=message):
        _world(Round("allreduce", np.ones(2, np.float32)), second).complete("x")


def test_a_name_is_submitted_once():
    world = _world(Round("allreduce", np.ones(2, np.float32)), None)
    with pytest.raises(ConfigMismatchError, match="twice"):
        world.submit(0, "x", Round("allreduce", np.ones(2, np.float32)))


def test_simulate_takes_arrays_iterators_and_schemes():
    gradients = np.random.default_rng(0).standard_normal((4, 3, 500)).astype(np.float32)
    by_name = list(simulate("topk", gradients, density=0.1))
    by_scheme = list(simulate(get_scheme("topk", density=0.1), iter(gradients)))
    assert len(by_name) == 4
    for left, right in zip(by_name, by_scheme, strict=True):
        assert left.average.tobytes() == right.average.tobytes()
        assert left.residual.shape == (3, 500)
        assert left.sent_bytes == right.sent_bytes
        assert len(left.sent_bytes) == 3


def test_none_is_the_exact_average():
    gradients = np.random.default_rng(0).standard_normal((2, 4, 100)).astype(np.float32)
    for step, grads in zip(simulate("none", gradients), gradients, strict=True):
        np.testing.assert_allclose(step.average, grads.mean(0), rtol=1e-5, atol=1e-7)
        assert step.sent_bytes == [400] * 4
        assert not step.residual.any()


def test_a_ranks_own_messages_are_not_received():
    gradients = np.random.default_rng(0).standard_normal((1, 4, 2000)).astype(np.float32)
    [gathered] = simulate("topk", gradients)
    assert gathered.received_bytes == [3 * nbytes for nbytes in gathered.sent_bytes]
    [shared] = simulate("scalecom", gradients, selector="exact", density=0.01)
    values, positions = 20 * 4, set(shared.sent_bytes).pop() - 20 * 4
    assert sorted(shared.received_bytes) == [values] + 3 * [values + positions]  # one rank chooses


def test_wrong_gradients_are_refused():
    with pytest.raises(ValueError, match=r"\[ranks, n\]"):
        list(simulate("topk", np.ones((3, 5), np.float32)))
    with pytest.raises(ValueError, match=r"after \(2, 5\)"):
        list(simulate("topk", [np.ones((2, 5)), np.ones((2, 6))]))
    with pytest.raises(TypeError, match="options belong"):
        simulate(get_scheme("topk"), np.ones((1, 2, 5)), density=0.1)
    with pytest.raises(ValueError, match="unknown recipe"):
        simulate("nothing", np.ones((1, 2, 5)))
