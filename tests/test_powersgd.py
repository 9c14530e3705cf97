"""PowerSGD: what its factors recover, what is carried on, and that all ranks hold the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, simulate
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once
from horovod_fftcomp.wire import counter_rng
from tests import reference

SHAPE = (30, 40)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def of_rank(rank, seed=0, shape=SHAPE):
    return normal(shape[0], rank, seed=seed) @ normal(rank, shape[1], seed=seed + 100)


def engines_of(ranks, shape=SHAPE, **options):
    bucket = Bucket((Tensor("w", shape),), always(get_scheme("powersgd", **options)))
    return [Engine([bucket], rank, ranks) for rank in range(ranks)]


def mean_of(engines, grads):
    """Return the mean that all ranks compute of one step, in the shape of the gradients."""
    exchange_once(engines, [[[grad.reshape(-1)]] for grad in grads], random.Random(0))
    sums = [engine.sums(0)[0] for engine in engines]
    assert all(total.tobytes() == sums[0].tobytes() for total in sums)
    for engine in engines:
        engine.settle()
    return sums[0].reshape(grads[0].shape) / len(engines)


def by_the_paper(step_grads, rank, right):
    """Yield (mean, sum of residuals) of each step by NumPy's own QR, in float64."""
    residual = np.zeros((len(step_grads[0]), *SHAPE))
    for grads in step_grads:
        whole = grads.astype(np.float64) + residual
        left, _ = np.linalg.qr(whole.sum(0) @ right)
        rights = np.swapaxes(whole, 1, 2) @ left
        right = rights.sum(0)
        residual = whole - left @ np.swapaxes(rights, 1, 2)
        yield left @ right.T / len(grads), residual


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rank", [1, 4, 10])
def test_steps_are_those_of_the_paper(ranks, rank):
    grads = normal(5, ranks, *SHAPE)
    right = (
        counter_rng.uniform(0, 0, "w", SHAPE[1] * rank).reshape(SHAPE[1], rank).astype(np.float64)
    )
    engines = engines_of(ranks, rank=rank)
    for step, (mean, residual) in zip(grads, by_the_paper(grads, rank, right), strict=True):
        np.testing.assert_allclose(mean_of(engines, step), mean, atol=2e-4)
        left = np.stack([engine.residual("w") for engine in engines])
        np.testing.assert_allclose(left, residual, atol=5e-4)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_mean_of_low_rank_is_exact_after_one_step(ranks, rank):
    """The ranks' own gradients need not be of low rank; their differences cancel."""
    wanted = of_rank(rank)
    apart = normal(ranks, *SHAPE, seed=5)
    grads = wanted + apart - apart.mean(0)
    found = mean_of(engines_of(ranks, rank=4), grads)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


def test_a_warm_start_finds_the_largest_directions():
    """Of a matrix that stays, each step is one more power iteration."""
    matrix = of_rank(4) + 0.05 * normal(*SHAPE, seed=9)
    values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    best = np.linalg.norm(values[4:])
    engines = engines_of(1, rank=4, error_feedback=False)
    for _ in range(6):
        found = mean_of(engines, matrix[None])
    assert np.linalg.norm(found - matrix) <= 1.001 * best


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_sent_and_what_is_left_make_up_the_gradients(ranks):
    grads = normal(20, ranks, *SHAPE)
    engines = engines_of(ranks)
    sent = sum(mean_of(engines, step).astype(np.float64) for step in grads)
    left = np.mean([engine.residual("w") for engine in engines], 0)
    np.testing.assert_allclose(sent + left, grads.sum(0).mean(0), atol=2e-4)


def test_a_constant_gradient_arrives_whole_in_the_long_run():
    engines, matrix = engines_of(2, rank=2), normal(*SHAPE)
    sent = [mean_of(engines, np.stack([matrix, matrix])) for _ in range(400)]
    np.testing.assert_allclose(np.mean(sent, 0), matrix, atol=0.1)


@pytest.mark.parametrize("shape", [(1000,), (3, 3), (1, 50), (50, 1), (5, 0)])
def test_what_factors_would_not_make_smaller_travels_as_it_is(shape):
    grads = normal(2, *shape)
    engines = engines_of(2, shape)
    np.testing.assert_allclose(mean_of(engines, grads), grads.mean(0), rtol=1e-6)
    assert not engines[0].residual("w").any()
    n = int(np.prod(shape))
    assert engines[0].costs.sent_nbytes == 4 * n + 4


def test_vectors_travel_in_the_rounds_of_the_matrices():
    tensors = (Tensor("w", (30, 4, 10)), Tensor("bias", (30,)))
    bucket = Bucket(tensors, always(get_scheme("powersgd", rank=2)))
    engines = [Engine([bucket], rank, 2) for rank in range(2)]
    grads = [[[normal(1200, seed=rank), normal(30, seed=rank + 9)]] for rank in range(2)]
    exchange_once(engines, grads, random.Random(0))
    assert engines[0].costs.collectives == 2
    assert engines[0].costs.sent_nbytes == 4 * (2 * (30 + 40) + 30 + 1)
    np.testing.assert_allclose(engines[0].sums(0)[1], grads[0][0][1] + grads[1][0][1], rtol=1e-6)


def test_ratio_is_that_of_the_formula():
    scheme = get_scheme("powersgd", rank=4)
    assert scheme.sent_nbytes(Tensor("w", (1000, 1000))) == 4 * 4 * 2000
    assert scheme.sent_nbytes(Tensor("w", (512, 256, 3, 3))) == 4 * 4 * (512 + 256 * 9)


def test_a_zero_gradient_does_not_lose_the_directions():
    engines, zero = engines_of(2), np.zeros((2, *SHAPE), np.float32)
    assert not mean_of(engines, zero).any()
    mean_of(engines, np.stack([of_rank(1)] * 2))
    wanted = of_rank(4, seed=7)
    first = np.linalg.norm(mean_of(engines, np.stack([wanted] * 2)) - wanted)
    assert first <= 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_bad_value_on_one_rank_makes_the_step_vanish(bad):
    engines = engines_of(3)
    grads = normal(3, 3, *SHAPE)
    mean_of(engines, grads[0])
    before = [engine.state_dict()["state"] for engine in engines]
    grads[1, 2, 7:9, 3:9] = bad  # 3e38 overflows in the products alone
    assert np.isnan(mean_of(engines, grads[1])).all()
    for engine, state in zip(engines, before, strict=True):
        assert engine.costs.skipped_steps == 1
        after = engine.state_dict()["state"]
        for kind in ("factor", "residual"):
            assert after[kind]["w"].tobytes() == state[kind]["w"].tobytes()
    assert np.isfinite(mean_of(engines, grads[2])).all()


def test_two_runs_are_equal_bit_for_bit():
    gradients = normal(4, 3, *SHAPE)
    runs = []
    for _ in range(2):
        engines = engines_of(3)
        runs.append([mean_of(engines, step).tobytes() for step in gradients])
    assert runs[0] == runs[1]
    other = engines_of(3, seed=1)
    assert mean_of(other, gradients[0]).tobytes() != runs[0][0]


def test_simulated_vectors_are_dense():
    gradients = normal(2, 3, 500)
    for ours, dense in zip(
        simulate("powersgd", gradients), simulate("none", gradients), strict=True
    ):
        assert ours.average.tobytes() == dense.average.tobytes()


@pytest.mark.parametrize("rank", [0, -1, 5000])
def test_other_ranks_are_refused(rank):
    with pytest.raises(ValueError, match="rank must"):
        get_scheme("powersgd", rank=rank)
    for other in (2.0, True, "4"):
        with pytest.raises(TypeError, match=f"rank must be a whole number, got {other!r}"):
            get_scheme("powersgd", rank=other)


def test_a_state_of_another_rank_is_refused():
    [two], [four] = engines_of(1, rank=2), engines_of(1, rank=4)
    mean_of([two], normal(1, *SHAPE))
    with pytest.raises(ValueError, match=r"factor of rank 2, expected a .* factor of rank 4"):
        four.load_state_dict(two.state_dict())


@pytest.mark.parametrize("round_", [0, 1])
def test_a_sum_of_another_size_is_refused(round_):
    [engine] = engines_of(1)
    sent = engine.resume(0, [normal(*SHAPE).reshape(-1)])
    if round_:
        sent = engine.resume(0, sent.data)
    n = sent.data.size
    with pytest.raises(PayloadError, match=f"{n - 1} values arrived, {n} were expected"):
        engine.resume(0, sent.data[1:])


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (1, 5000), (300, 2049), (5000, 9)])
@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.usefixtures("n_threads")
def test_kernels_are_the_reference(shape, rank):
    left, right = normal(shape[0], rank), normal(shape[1], rank, seed=1)
    whole = normal(*shape, seed=2)
    expected = reference.low_rank(left, right, None)
    assert cpu.low_rank(left, right, None).tobytes() == expected.tobytes()
    rest = cpu.low_rank(left, right, whole.copy())
    assert rest.tobytes() == reference.low_rank(left, right, whole.copy()).tobytes()
    np.testing.assert_allclose(expected, left @ right.T, atol=1e-4)
    assert cpu.orthonormal(left).tobytes() == reference.orthonormal(left).tobytes()


def test_columns_are_orthonormal_even_where_they_depend():
    matrix = normal(200, 5)
    matrix[:, 2] = matrix[:, 0] - 2 * matrix[:, 1]
    matrix[:, 3] = 0
    found = cpu.orthonormal(matrix).astype(np.float64)
    expected = np.diag([1, 1, 1, 0, 1])
    np.testing.assert_allclose(found.T @ found, expected, atol=1e-6)


def test_draws_are_even_and_the_same_everywhere():
    found = counter_rng.uniform(42, 0, "layer1.weight", 4)
    numbers = [counter_rng.draw(42, 0, "layer1.weight", place) for place in range(4)]
    assert found.tolist() == [(number >> 40) * 2.0**-23 - 1 for number in numbers]
    many = counter_rng.uniform(1, 2, "w", 100_000)
    assert -1 <= many.min() < -0.999 < 0.999 < many.max() < 1
    assert abs(many.mean()) < 4 * (1 / 3 / 100_000) ** 0.5


@pytest.mark.parametrize("power", [-90, -80, 57, 90])
def test_gradients_of_any_magnitude_arrive(power):
    """Multiplied by a power of two, with the same bits: the next step's start has no magnitude."""
    plain, scaled = engines_of(2), engines_of(2)
    for grads in normal(4, 2, *SHAPE):
        wanted = np.ldexp(mean_of(plain, grads), power)
        assert np.isfinite(wanted).all()
        assert mean_of(scaled, np.ldexp(grads, power)).tobytes() == wanted.tobytes()
