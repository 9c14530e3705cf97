"""Auto: that it chooses the best, that all ranks choose alike, and what it carries over."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, simulate
from horovod_fftcomp.codec.transforms import BlockDCT, BlockFFT, Identity
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import Always, make_policy
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.schemes.auto import CANDIDATES, TRIAL_STEPS
from horovod_fftcomp.simulation import exchange_once

N = 20_000


def smooth(seed=0, n=N):
    """A slow wave of random phases: few coefficients hold nearly all of it."""
    walk = np.cumsum(np.random.default_rng(seed).standard_normal(n + 1000))
    return (walk[1000:] - walk[:-1000]).astype(np.float32)


def spiky(seed=0, n=N):
    """A few large elements: no transform gains anything."""
    return np.random.default_rng(seed).standard_t(1.1, n).astype(np.float32)


def engines_of(ranks=2, tensors=None, **options):
    scheme = get_scheme("auto", **{"ratio": 40, "every": 10, **options})
    bucket = Bucket(tensors or (Tensor("w", (N,)),), Always(scheme))
    return [Engine([bucket], rank, ranks) for rank in range(ranks)]


def step(engines, *grads):
    exchange_once(engines, [[[grad]] for grad in grads], random.Random(0))
    total = engines[0].sums(0)[0]
    assert all(engine.sums(0)[0].tobytes() == total.tobytes() for engine in engines)
    for engine in engines:
        engine.settle()
    return total


@pytest.mark.parametrize(
    ("gradient", "domains"), [(smooth, (BlockFFT, BlockDCT)), (spiky, (Identity,))]
)
def test_the_domain_fits_the_gradient(gradient, domains):
    engines = engines_of()
    step(engines, gradient(0), gradient(1))
    [choice] = {engine.choices()["w"] for engine in engines}
    assert choice.startswith(tuple(domain.__name__ for domain in domains))


@pytest.mark.parametrize("gradient", [smooth, spiky])
@pytest.mark.parametrize("ratio", [10, 50, 200])
def test_no_candidate_leaves_less_at_the_bytes_allowed(gradient, ratio):
    """Of a tensor that is tried as a whole; 1 % is what a change has to gain."""
    scheme, x = get_scheme("auto", ratio=ratio), gradient(3)
    errors = []
    for choice in range(1, len(CANDIDATES) + 1):
        codec = scheme.codec((N,), choice)
        assert codec.payload_nbytes(N) <= 4 * N / ratio
        errors.append(float(np.square(x - codec.decode(codec.encode(x)), dtype=np.float64).sum()))
    [engine] = engines_of(1, ratio=ratio)
    left = float(np.square(x - step([engine], x), dtype=np.float64).sum())
    assert left <= min(errors) * 1.011


def test_a_large_tensor_is_tried_in_part_and_chosen_as_if_whole():
    x = smooth(n=1_000_000)
    scheme = get_scheme("auto", ratio=50)
    errors = []
    for choice in range(1, len(CANDIDATES) + 1):
        codec = scheme.codec((x.size,), choice)
        errors.append(float(np.square(x - codec.decode(codec.encode(x)), dtype=np.float64).sum()))
    [engine] = engines_of(1, tensors=(Tensor("w", (x.size,)),), ratio=50)
    left = float(np.square(x - step([engine], x), dtype=np.float64).sum())
    assert left <= min(errors) * 1.02


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_residuals_move_with_the_domain(ranks, exchange):
    engines = engines_of(ranks, every=4, exchange=exchange)
    owed, sent, seen = np.zeros(N), np.zeros(N), set()
    for number in range(16):
        gradient = smooth if number % 8 < 4 else spiky
        grads = [gradient(10 * number + rank) for rank in range(ranks)]
        owed += np.sum(grads, axis=0, dtype=np.float64)
        sent += step(engines, *grads)
        seen.add(engines[0].choices()["w"])
        residual = sum(engine.residual("w").astype(np.float64) for engine in engines)
        scale = np.abs(owed).max()
        np.testing.assert_allclose(sent + residual, owed, atol=3e-6 * scale)
    assert len(seen) >= 2


@pytest.mark.parametrize("old", range(1, len(CANDIDATES) + 1, 4))
@pytest.mark.parametrize("new", [1, 6, 11, 16, 21])
def test_a_residual_is_the_same_in_any_domain(old, new):
    scheme, tensor, x = get_scheme("auto"), Tensor("w", (5003,)), spiky(n=5003)
    transform = scheme.codec((5003,), old).transform
    before = transform.forward(x, None, 0, cpu).array
    moved = scheme._moved({"residual": {"w": before}}, tensor, old, new)["residual"]["w"]
    after = scheme.codec((5003,), new).transform.inverse(moved, 5003, cpu)
    assert np.abs(after - x).max() <= 1e-6 * np.abs(x).max()


def test_all_ranks_gradients_of_all_trials_count():
    """The first rank alone would leave its gradients as they are; the sum of losses decides."""
    engines, kinds = engines_of(3, every=10), []
    for number in range(20):
        others = smooth if number < 10 else spiky
        grads = [spiky(3 * number), others(3 * number + 1), others(3 * number + 2)]
        step(engines, *(grad / np.linalg.norm(grad) for grad in grads))
        assert engines[0].choices() == engines[1].choices() == engines[2].choices()
        kinds.append(engines[0].choices()["w"].split("(")[0])
    assert kinds[3:10] == [kinds[3]] * 7  # only the steps that try may change it
    assert "Identity" not in kinds[:10]
    assert kinds[13:] == ["Identity"] * 7
    trials = engines[0].state_dict()["state"]["trials"]["w"]
    assert trials[-1] == 3 * TRIAL_STEPS


def test_only_steps_that_decide_have_a_round_more():
    policy = make_policy("auto", every=10, warmup_steps=2)
    rounds = [policy.at(number).rounds for number in range(13)]
    trying = [number for number, names in enumerate(rounds) if len(names) == 2]
    assert trying == [2, 3, 4, 5, 12]
    assert rounds[0] == rounds[1] == ("allreduce",)
    assert rounds[6] == ("allgather",)
    steps = list(simulate("auto", np.ones((6, 2, 5000), np.float32), every=5, ratio=20))
    sent = [step.sent_bytes[0] for step in steps]
    assert sent[0] - sent[4] == 4 * (2 * len(CANDIDATES) + 1)
    assert sent == [sent[0]] * 4 + [sent[4], sent[0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_step_that_decides_leaves_no_trace(bad):
    engines = engines_of()
    for number in range(3):
        step(engines, smooth(number), smooth(number + 50))
    before = [(engine.residual("w").tobytes(), engine.choices()) for engine in engines]
    broken = spiky(1)
    broken[7] = bad
    with np.errstate(invalid="ignore"):
        assert np.isnan(step(engines, smooth(1), broken)).all()
    assert [(e.residual("w").tobytes(), e.choices()) for e in engines] == before


def test_a_saved_choice_to_send_dense_goes_on_compressed_until_the_next_trial():
    """Choice 0 is of versions with ``gbit_per_s``, which a fast network made dense."""
    engines = engines_of(2)
    step(engines, smooth(0), smooth(50))
    state = engines[0].state_dict()
    state["state"]["choice"]["w"][0] = 0
    state["state"]["residual"] = {}
    state["step"] = TRIAL_STEPS
    for engine in engines:
        engine.load_state_dict({**state, "rank": engine.rank})
    before = engines[0].costs.sent_nbytes
    total = step(engines, smooth(9), smooth(59))
    assert {engine.choices()["w"] for engine in engines} == {"Identity(), 4 bits"}
    assert engines[0].costs.sent_nbytes - before < 4 * N / 40 + 16
    owed = smooth(9).astype(np.float64) + smooth(59)
    left = sum(engine.residual("w").astype(np.float64) for engine in engines)
    np.testing.assert_allclose(total + left, owed, atol=1e-5 * np.abs(owed).max())


@pytest.mark.parametrize("power", [-90, -72, 64, 83])
def test_gradients_of_any_magnitude_choose_as_others(power):
    """Though no float32 holds the squares of their errors."""
    [engine], [other] = engines_of(1), engines_of(1)
    for number in range(4):
        total = step([engine], smooth(number))
        scaled = step([other], np.ldexp(smooth(number), power))
        assert scaled.tobytes() == np.ldexp(total, power).tobytes()
    assert other.choices() == engine.choices() != {"w": "Identity(), 4 bits"}
    assert other.costs.relative_error == pytest.approx(engine.costs.relative_error)


def test_a_choice_that_cannot_be_is_refused():
    [engine] = engines_of(1)
    step([engine], smooth())
    saved = engine.state_dict()
    saved["state"]["choice"]["w"][0] = 99
    with pytest.raises(ValueError, match="the saved choice of 'w' is 99; auto has 0 to 25"):
        engine.load_state_dict(saved)


def test_a_loss_scale_leaves_choices_alone():
    engines = engines_of()
    step(engines, smooth(0), smooth(1))
    before = engines[0].choices(), engines[0].state_dict()["state"]["trials"]["w"].tobytes()
    residual = engines[0].residual("w")
    for engine in engines:
        engine.follow_loss_scale(65536.0)
    now = engines[0].choices(), engines[0].state_dict()["state"]["trials"]["w"].tobytes()
    assert now == before
    assert np.array_equal(engines[0].residual("w"), 65536 * residual)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.5}, r"ratio must lie in \[1, 10000\]"),
        ({"every": 0}, "every must be a whole number of steps from 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        get_scheme("auto", **options)
    with pytest.raises(TypeError, match="ratio must be a number, got '50'"):
        get_scheme("auto", ratio="50")
    with pytest.raises(TypeError, match="'auto' has no option gbit_per_s; it has: ratio, every"):
        get_scheme("auto", gbit_per_s=10)
