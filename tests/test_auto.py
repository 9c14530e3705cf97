"""Auto: that it chooses the best, that all ranks choose alike, and what it carries over."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, simulate, wire
from horovod_fftcomp.codec.transforms import BlockDCT, BlockFFT, Identity
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always, make_policy
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.schemes.auto import (
    CANDIDATES,
    EVEN,
    SHARES,
    TRIAL_STEPS,
    TRIED,
    _Point,
    allocated,
    sample_of,
)
from horovod_fftcomp.simulation import exchange_once

N = 20_000
TRIED_NBYTES = 4 * (sum(map(len, TRIED)) * len(SHARES) + 1)  # that a trial sends for a tensor


def smooth(seed=0, n=N):
    """A slow wave of random phases: few coefficients hold nearly all of it."""
    walk = np.cumsum(np.random.default_rng(seed).standard_normal(n + 1000))
    return (walk[1000:] - walk[:-1000]).astype(np.float32)


def spiky(seed=0, n=N):
    """A few large elements: no transform gains anything."""
    return np.random.default_rng(seed).standard_t(1.1, n).astype(np.float32)


def engines_of(ranks=2, tensors=None, **options):
    scheme = get_scheme("auto", **{"ratio": 40, "every": 10, **options})
    bucket = Bucket(tensors or (Tensor("w", (N,)),), always(scheme))
    return [Engine([bucket], rank, ranks) for rank in range(ranks)]


def squared(x):
    return float(np.square(x, dtype=np.float64).sum())


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
    [choice] = {engine.choices()["w"].words for engine in engines}
    assert choice.startswith(tuple(domain.__name__ for domain in domains))


@pytest.mark.parametrize("gradient", [smooth, spiky])
@pytest.mark.parametrize(("n", "ratio"), [(N, 10), (N, 50), (N, 200), (1_000_000, 50)])
def test_no_candidate_leaves_less_at_the_bytes_allowed(gradient, n, ratio):
    """Errors are estimated, of the larger tensor from a sample."""
    scheme, x = get_scheme("auto", ratio=ratio), gradient(3, n)
    errors = []
    for choice in range(1, len(CANDIDATES) + 1):
        codec = scheme.codec((n,), choice)
        assert wire.align(codec.payload_nbytes(n)) <= 4 * n / ratio
        errors.append(squared(x - codec.decode(codec.encode(x))))
    [engine] = engines_of(1, (Tensor("w", (n,)),), ratio=ratio, error_feedback=False)
    step([engine], x)
    assert squared(x - step([engine], x)) <= min(errors) * 1.03


@pytest.mark.sampled
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
        seen.add(engines[0].choices()["w"].words)
        residual = sum(engine.residual("w").astype(np.float64) for engine in engines)
        scale = np.abs(owed).max()
        np.testing.assert_allclose(sent + residual, owed, atol=3e-6 * scale)
    assert len(seen) >= 2


@pytest.mark.parametrize("old", range(1, len(CANDIDATES) + 1, 4))
@pytest.mark.parametrize("new", [1, 6, 11, 16, 21])
def test_a_residual_is_the_same_in_any_domain(old, new):
    scheme, tensor, x = get_scheme("auto"), Tensor("w", (5003,)), spiky(n=5003)
    transform = scheme.codec((5003,), old).transform
    before = {"residual": {"w": transform.forward(x, None, 0, cpu).array}}
    before["choice"] = {"w": np.array([old], np.uint8)}
    moved = scheme.moved_to(before, tensor, _Point(0, 0.0, EVEN, new))
    assert moved["choice"]["w"] == [new]
    after = scheme.codec((5003,), new).transform.inverse(moved["residual"]["w"], 5003, cpu)
    assert np.abs(after - x).max() <= 1e-6 * np.abs(x).max()


def test_all_ranks_gradients_of_all_trials_count():
    """The first rank alone would leave its gradients as they are; the sum of losses decides."""
    engines, kinds = engines_of(3, every=10), []
    for number in range(20):
        others = smooth if number < 10 else spiky
        grads = [spiky(3 * number), others(3 * number + 1), others(3 * number + 2)]
        step(engines, *(grad / np.linalg.norm(grad) for grad in grads))
        assert engines[0].choices() == engines[1].choices() == engines[2].choices()
        kinds.append(engines[0].choices()["w"].words.split("(")[0])
    assert kinds[3:10] == [kinds[3]] * 7  # only the steps that try may change it
    assert "Identity" not in kinds[:10]
    assert kinds[13:] == ["Identity"] * 7
    errors = engines[0].state_dict()["state"]["errors"]["w"]
    assert errors[-2] == 3 * TRIAL_STEPS


def test_only_steps_that_decide_have_a_round_more():
    policy = make_policy("auto", every=10, warmup_steps=2)
    rounds = [policy.at(number).rounds for number in range(13)]
    trying = [number for number, names in enumerate(rounds) if len(names) == 2]
    assert trying == [2, 3, 4, 5, 12]
    assert rounds[0] == rounds[1] == ("allreduce",)
    assert rounds[6] == ("allgather",)
    steps = list(simulate("auto", np.ones((6, 2, 5000), np.float32), every=5, ratio=20))
    sent = [step.sent_bytes[0] for step in steps]
    most = 4 * 5000 // 20 + 8  # a multiple of 16
    assert [nbytes > most for nbytes in sent] == [True] * 4 + [False, True]
    assert max(sent) <= TRIED_NBYTES + most


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
    [choice] = {engine.choices()["w"].words for engine in engines}
    assert choice.startswith("Identity(), 4 bits")
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
    assert other.choices() == engine.choices()
    assert not engine.choices()["w"].words.startswith("Identity(), 4 bits")
    assert other.costs.relative_error == pytest.approx(engine.costs.relative_error)


def test_a_choice_that_cannot_be_is_refused():
    [engine] = engines_of(1)
    step([engine], smooth())
    for kind, most in (("choice", 30), ("share", 12)):
        saved = engine.state_dict()
        saved["state"][kind]["w"][0] = 99
        message = f"the saved {kind} of 'w' is 99; auto has 0 to {most}"
        with pytest.raises(ValueError, match=message):
            engine.load_state_dict(saved)


def test_the_bytes_go_where_they_save_most():
    """Two tensors in buckets of their own: one with 30 times the gradient of the other."""
    names, scheme = ("large", "small"), get_scheme("auto", ratio=40, error_feedback=False)
    buckets = [Bucket((Tensor(name, (N,)),), always(scheme)) for name in names]
    engines = [Engine(buckets, rank, 2) for rank in range(2)]
    grads = [[30 * smooth(rank), smooth(rank + 5)] for rank in range(2)]
    for number in range(TRIAL_STEPS + 1):
        sent = engines[0].costs.sent_nbytes
        exchange_once(engines, [[[grad] for grad in own] for own in grads], random.Random(number))
        sums = [engines[0].sums(bucket)[0].copy() for bucket in range(2)]
        for engine in engines:
            engine.settle()
    sent = engines[0].costs.sent_nbytes - sent
    assert sent <= 2 * 4 * N / 40
    assert engines[0].choices() == engines[1].choices()
    assert sum(choice.sent_nbytes for choice in engines[0].choices().values()) == sent
    shares = engines[0].state_dict()["state"]["share"]
    assert shares["large"] > EVEN > shares["small"]
    wanted = [np.sum([own[n] for own in grads], axis=0, dtype=np.float64) for n in range(2)]
    codecs = [
        scheme.codec((N,), int(choice[0]))
        for choice in engines[0].state_dict()["state"]["choice"].values()
    ]
    alike = [
        squared(total - sum(codec.decode(codec.encode(own[n])) for own in grads))
        for n, (codec, total) in enumerate(zip(codecs, wanted, strict=True))
    ]
    assert sum(map(squared, np.subtract(wanted, sums))) < 0.8 * sum(alike)


@pytest.mark.parametrize("seed", range(20))
def test_the_allocation_is_the_best_of_all_where_steps_are_equal(seed):
    """Errors fall by less and less, so that what saves most comes first; else it is within."""
    rng = np.random.default_rng(seed)
    curves = []
    for _ in range(4):
        gains = np.sort(rng.exponential(size=4))[::-1]
        errors = gains.sum() - np.concatenate([[0], np.cumsum(gains)])
        curves.append([_Point(16 * (n + 1), float(e), n, 1) for n, e in enumerate(errors)])
    for budget in (64, 100, 160, 10_000):
        best = min(
            sum(point.error for point in points)
            for points in itertools.product(*curves)
            if sum(point.nbytes for point in points) <= budget
        )
        found = allocated(curves, budget)
        assert sum(point.nbytes for point in found) <= budget
        assert sum(point.error for point in found) == pytest.approx(best)


def test_a_state_of_a_version_without_shares_goes_on():
    [engine] = engines_of(1)
    step([engine], smooth())
    saved = engine.state_dict()
    for kind in ("share", "errors"):
        del saved["state"][kind]
    saved["state"]["trials"] = {"w": np.zeros(51, np.float32)}
    engine.load_state_dict(saved)
    step([engine], smooth())
    assert "trials" not in engine.state_dict()["state"]


def test_a_loss_scale_leaves_choices_alone():
    engines = engines_of()
    step(engines, smooth(0), smooth(1))
    before = engines[0].choices(), engines[0].state_dict()["state"]["errors"]["w"].tobytes()
    residual = engines[0].residual("w")
    for engine in engines:
        engine.follow_loss_scale(65536.0)
    now = engines[0].choices(), engines[0].state_dict()["state"]["errors"]["w"].tobytes()
    assert now == before
    assert np.array_equal(engines[0].residual("w"), 65536 * residual)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.5}, r"ratio must lie in \[1, 10000\]"),
        ({"every": 0}, "every must be a whole number from 1 up, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        get_scheme("auto", **options)
    with pytest.raises(TypeError, match="ratio must"):
        get_scheme("auto", ratio="50")
    with pytest.raises(TypeError, match="gbit_per_s"):
        get_scheme("auto", gbit_per_s=10)


def test_buckets_that_begin_in_different_steps_keep_to_the_bytes_of_all():
    tensors = [Tensor(name, (N,)) for name in ("early", "late")]
    policies = [make_policy("auto", ratio=40, every=8, warmup_steps=n) for n in (0, 3)]
    buckets = [Bucket((tensor,), policy) for tensor, policy in zip(tensors, policies, strict=True)]
    engines, sent = [Engine(buckets, rank, 2) for rank in range(2)], []
    for number in range(16):
        before = engines[0].costs.sent_nbytes
        louder = 30 if number < 8 else 1 / 30
        grads = [[[louder * smooth(rank)], [smooth(rank + 5)]] for rank in range(2)]
        exchange_once(engines, grads, random.Random(number))
        for engine in engines:
            engine.settle()
        tried = sum("allreduce" in policy.at(number).rounds for policy in policies)
        sent.append(engines[0].costs.sent_nbytes - before - tried * TRIED_NBYTES)
        assert engines[0].choices() == engines[1].choices()
    assert max(sent[3:]) <= 2 * 4 * N / 40
    shares = engines[0].state_dict()["state"]["share"]
    assert shares["early"] < EVEN < shares["late"]


def test_a_series_whose_first_trial_is_dropped_has_no_errors_of_the_one_before():
    engines = engines_of(every=6)
    for number in range(6 + TRIAL_STEPS):
        grads = [smooth(number), smooth(number + 50)]
        if number == 6:
            grads[1][7] = np.nan
        step(engines, *grads)
        if number >= 6:
            errors = engines[0].state_dict()["state"]["errors"]["w"]
            assert errors[-2] == 2 * (TRIAL_STEPS if number == 6 else number - 6)


def shares_of(grads_of, *, warmup_steps=0, n_steps=2 * TRIAL_STEPS, scales=None):
    """Return the shares of two tensors; ``grads_of(step)``: the gradients of both.

    The second one begins after ``warmup_steps``. ``scales``: loss scales from steps on.
    """
    tensors = [Tensor(name, (N,)) for name in ("a", "b")]
    policies = [make_policy("auto", ratio=40, warmup_steps=n) for n in (0, warmup_steps)]
    buckets = [Bucket((tensor,), policy) for tensor, policy in zip(tensors, policies, strict=True)]
    [engine], scale = [Engine(buckets, 0, 1)], 1.0
    for number in range(n_steps):
        scale = (scales or {}).get(number, scale)
        engine.follow_loss_scale(scale)
        with np.errstate(invalid="ignore"):
            grads = [None if g is None else g * np.float32(scale) for g in grads_of(number)]
            exchange_once([engine], [[[grad] for grad in grads]], random.Random(number))
        engine.settle()
    shares = engine.state_dict()["state"]["share"]
    return int(shares["a"][0]), int(shares["b"][0])


def both(step):
    return [smooth(2 * step), smooth(2 * step + 1)]


def test_a_series_that_lost_trials_counts_as_much_as_another():
    def grads_of(step):
        first, second = both(step)
        return [np.full(N, np.nan, np.float32) if step in (1, 2, 3) else first, second]

    assert shares_of(grads_of, warmup_steps=6, n_steps=10) == (EVEN, EVEN)


def test_a_series_under_another_loss_scale_counts_as_much():
    scales = {0: 65536.0, 5: 1024.0}
    assert shares_of(both, warmup_steps=6, n_steps=10, scales=scales) == (EVEN, EVEN)


def test_a_tensor_that_is_not_in_every_step_counts_by_what_it_brings():
    def grads_of(step):
        first, second = np.random.default_rng(step).standard_normal((2, N), np.float32)
        return [first, 4 * second if step % 4 == 3 else None]

    assert shares_of(grads_of) == (EVEN, EVEN)


def test_every_step_tries_another_sample():
    flat = np.arange(400_000, dtype=np.float32)
    samples = [sample_of(flat, step) for step in range(TRIAL_STEPS)]
    assert all(60_000 < sample.size < 75_000 for sample in samples)
    assert np.unique(np.concatenate(samples)).size > 0.95 * sum(sample.size for sample in samples)
    starts = samples[1].reshape(-1)[:: 1 << 12]
    assert not (starts % (1 << 12)).any()  # blocks stay blocks


@pytest.mark.parametrize("large", [False, True])
def test_a_sample_of_denormal_values_is_tried(large):
    """A transform of denormal values may be all zeros."""
    n = 400_000 if large else N
    engines = engines_of(2, (Tensor("w", (n,)),))
    grads = np.zeros((2, n), np.float32)
    grads[:, 7] = 1e-43
    grads[1, -7] = 1.0 if large else 0.0
    step(engines, *grads)
    assert engines[0].choices() == engines[1].choices()
    assert np.isfinite(engines[0].state_dict()["state"]["errors"]["w"]).all()
