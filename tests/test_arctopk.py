"""ARC-Top-K: which rows the sketch of the sum selects, what travels, and what is carried on."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_scheme, simulate
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.kernels.host.ops import HOST
from horovod_fftcomp.kernels.index_plan import IndexPlan
from horovod_fftcomp.schemes import Context, Tensor
from horovod_fftcomp.schemes.arc_topk import LargestRows
from horovod_fftcomp.simulation import exchange_once
from horovod_fftcomp.wire import counter_rng
from tests.loops import each
from tests.reference_ops import ReferenceOps


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows_scheme(**options):
    """Return the scheme, of single tensors and in float32 unless ``options`` say otherwise."""
    return get_scheme("arctopk", **{"density": 0.01, "bits": 32, "scope": "tensor", **options})


def simulate_rows(gradients, **options):
    return simulate(rows_scheme(**options), gradients)


def whole_numbers(*shape, seed=0):
    """Return float32 whose sums of a few thousand are exact in any order."""
    return np.random.default_rng(seed).integers(-99, 100, shape).astype(np.float32)


def signs_of(step, block, seed=0):
    return np.where(np.signbit(counter_rng.uniform(seed, step, "", block)), -1.0, 1.0)


def chosen_by_the_paper(due, density, block, step, seed=0):
    """Return the positions that the formulas select of ``due``, ``[ranks, n]``, in float64."""
    n = due.shape[1]
    n_rows = n // block
    k = max(1, int(density * n_rows + 1e-9))
    rows = due[:, : n_rows * block].reshape(len(due), n_rows, block)
    sketch = (rows @ signs_of(step, block, seed)).sum(0)  # P = sum over ranks of G V
    best = np.sort(np.argsort(-np.abs(sketch), kind="stable")[:k])
    in_rows = (best[:, None] * block + np.arange(block)).reshape(-1)
    return np.concatenate([in_rows, np.arange(n_rows * block, n)])


@each("ranks", [1, 2, 3, 5])
@each("beta", [1.0, 0.1])
@each("block", [8, 64, 128])
def test_every_step_is_that_of_the_formulas(ranks, beta, block):
    """A float64 model of the whole method, from the definition."""
    gradients, density = normal(10, ranks, 3011), 0.1
    memory = np.zeros((ranks, 3011))
    steps = simulate_rows(gradients, density=density, beta=beta, block=block)
    for number, (grads, step) in enumerate(zip(gradients, steps, strict=True)):
        due = memory + grads
        chosen = chosen_by_the_paper(due, density, block, number)
        sent = np.zeros_like(due)
        sent[:, chosen] = due[:, chosen]
        np.testing.assert_allclose(step.average, sent.mean(0), atol=1e-5)
        memory = (1 - beta) * memory + beta * (due - sent)
        np.testing.assert_allclose(step.residual, memory, atol=1e-5)


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_residual_is_beta_times_what_was_not_sent(bits, beta):
    gradients, sent = normal(20, 4, 5000), np.zeros(5000)
    for step in simulate_rows(gradients, density=0.05, block=32, beta=beta, bits=bits):
        sent += 4 * step.average.astype(np.float64)
    owed = beta * (gradients.astype(np.float64).sum((0, 1)) - sent)
    tolerance = 1e-4 if bits == 32 else 0.1  # what float16 rounds off in the sum is lost
    np.testing.assert_allclose(step.residual.astype(np.float64).sum(0), owed, atol=tolerance)


def test_what_is_large_in_the_sum_alone_is_found():
    """No rank would choose it: each has larger values, which cancel in the sum."""
    gradients = 0.01 * normal(1, 4, 6400)
    gradients[0, :, 640] = 1.0
    gradients[0, :2, 1280] = 3.0
    gradients[0, 2:, 1280] = -3.0
    [step] = simulate_rows(gradients, density=0.01, block=64)
    assert set(np.flatnonzero(step.average)) == set(range(640, 704))
    np.testing.assert_allclose(step.average[640], 1.0)
    [topk] = simulate("topk", gradients, density=1 / 6400, bits=32)
    assert not topk.average[640]


def test_equal_sums_go_to_the_lower_rows():
    gradients = np.zeros((1, 3, 1000), np.float32)
    gradients[0, :, [70, 300, 500, 800]] = 1.0
    [step] = simulate_rows(gradients, density=0.09, block=32)  # 2 of 31 rows
    assert np.flatnonzero(step.average).tolist() == [70, 300]
    gradients[:] = 0
    gradients[0, :, 999] = 1.0  # after the last whole row
    [step] = simulate_rows(gradients, density=0.09, block=32)
    assert np.flatnonzero(step.average).tolist() == [999]


def test_signs_are_new_in_each_step_and_for_each_seed():
    """Values that cancel in one step do not in another, so nothing is overlooked for ever."""
    found = {tuple(signs_of(step, 128, seed)) for step in range(10) for seed in range(3)}
    assert len(found) == 30
    signs = np.concatenate([signs_of(step, 128) for step in range(200)])
    assert abs(signs.mean()) < 5 / len(signs) ** 0.5
    gradients = np.zeros((60, 2, 6400), np.float32)
    gradients[:, :, [128, 129]] = 1.0  # signs differ in half of the steps
    gradients += 1e-3 * normal(60, 2, 6400)
    steps = simulate_rows(gradients, density=0.01, block=64)
    hits = sum(step.average[128] > 0.5 for step in steps)
    assert 15 <= hits <= 45


def engines_of(scheme, tensors, ranks):
    return [Engine([Bucket(tuple(tensors), always(scheme))], rank, ranks) for rank in range(ranks)]


def sums_of_a_step(engines, grads, rng):
    exchange_once(engines, [[own] for own in grads], rng)
    sums = [[total.tobytes() for total in engine.sums(0)] for engine in engines]
    residuals = [engine.state_dict() for engine in engines]
    for engine in engines:
        engine.settle()
    return sums, residuals


@pytest.mark.parametrize("options", [{}, {"bits": 16}, {"scope": "bucket"}, {"block": 8}])
def test_ranks_hold_the_same_bits_and_runs_repeat(options):
    tensors = [Tensor("a", (50, 70)), Tensor("b", (13,)), Tensor("c", (3000,))]
    scheme = rows_scheme(density=0.1, **options)
    runs = []
    for _ in range(2):
        engines, found = engines_of(scheme, tensors, 3), []
        for step in range(4):
            grads = [
                [normal(n, seed=[step, rank, n]) for n in (3500, 13, 3000)] for rank in range(3)
            ]
            sums, _ = sums_of_a_step(engines, grads, random.Random(step))
            assert sums[0] == sums[1] == sums[2]
            found.append(sums[0])
        runs.append(found)
    assert runs[0] == runs[1]


def test_selection_does_not_depend_on_buckets():
    """The signs are those of the step, not of a tensor or a bucket."""
    tensors, scheme = [Tensor("a", (2000,)), Tensor("b", (3000,))], rows_scheme(block=32)
    grads = [[normal(n, seed=[rank, n]) for n in (2000, 3000)] for rank in range(2)]
    together, _ = sums_of_a_step(engines_of(scheme, tensors, 2), grads, random.Random(0))
    for number, tensor in enumerate(tensors):
        alone = engines_of(scheme, [tensor], 2)
        sums, _ = sums_of_a_step(alone, [[own[number]] for own in grads], random.Random(0))
        assert sums[0][0] == together[0][number]


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_bytes_are_those_of_sketch_and_rows_on_any_number_of_ranks(ranks, bits):
    n, block, density = 20_011, 64, 0.02
    options = {"density": density, "block": block, "bits": bits}
    scheme, tensor = rows_scheme(**options), Tensor("gradient", (n,))
    expected = bits // 8 * (312 + 6 * 64 + 20_011 % 64)  # 312 rows, of which 6 are sent
    assert scheme.rounds == ("allreduce", "allreduce")
    assert scheme.sent_nbytes(tensor) == expected
    assert scheme.received_nbytes(tensor, ranks) == 2 * (ranks - 1) / ranks * expected
    for step in simulate(scheme, normal(2, ranks, n)):
        assert step.sent_bytes == [expected] * ranks


@each("n", [0, 1, 7, 127, 128, 129, 255, 256, 1024, 100_003])
@each("block", [8, 128, 4096])
@each("density", [0.001, 0.1, 0.9, 1.0])
def test_counts_are_those_of_whole_rows_and_the_rest(n, block, density):
    rows = LargestRows(density, block)
    n_rows, count = n // block, rows.count(n)
    if rows.rows(n):
        assert rows.rows(n) == rows.sketch_numel(n) == n_rows
        assert count == max(1, int(density * n_rows + 1e-9)) * block + n % block
        assert count + n_rows < n
    else:
        assert count == n
        assert rows.sketch_numel(n) == 1
        assert max(1, int(density * n_rows + 1e-9)) * block + n_rows + n % block >= n


@pytest.mark.parametrize("n", [0, 1, 100, 130])
def test_a_tensor_that_a_sketch_would_not_make_smaller_is_sent_whole(n):
    gradients = normal(3, 2, n)
    for ours, dense in zip(simulate_rows(gradients), simulate("none", gradients), strict=True):
        assert ours.average.tobytes() == dense.average.tobytes()
        assert not ours.residual.any()
        assert ours.sent_bytes == [4 * n + 4] * 2


@each("bits", [16, 32])
@each("bad_rank", [0, 1, 2])
@each("bad", [np.nan, np.inf, -np.inf])
@each("at", [0, 700, 1504])  # the last one lies in no row
def test_a_bad_value_on_any_rank_makes_the_step_vanish(bits, bad_rank, bad, at):
    gradients = normal(7, 3, 1505)
    gradients[4, bad_rank, at] = bad
    steps = list(simulate_rows(gradients, density=0.1, block=32, bits=bits))
    assert np.isnan(steps[4].average).all()
    assert steps[4].residual.tobytes() == steps[3].residual.tobytes()
    assert np.isfinite(steps[5].average).all()


@each("options", [{}, {"scope": "bucket"}, {"bits": 16, "scope": "bucket"}])
@each("bad_tensor, at", [(0, 700), (0, 1504), (1, 3)])  # in a row, after the last, without rows
def test_the_rank_of_origin_knows_that_its_gradients_are_not_finite(options, bad_tensor, at):
    tensors = [Tensor("a", (1505,)), Tensor("b", (7,))]
    engines = engines_of(rows_scheme(density=0.1, block=32, **options), tensors, 3)
    grads = [[normal(1505, seed=rank), normal(7, seed=rank)] for rank in range(3)]
    grads[1][bad_tensor][at] = np.nan
    exchange_once(engines, [[own] for own in grads], random.Random(0))
    assert [any(engine.bad.values()) for engine in engines] == [False, True, False]


@each("options", [{}, {"scope": "bucket"}])
@each("loss_scale", [1.0, 1024.0, 4096.0, 8192.0])
def test_under_a_loss_scale_values_overflow_before_what_selects_them(options, loss_scale):
    gradients = 0.1 * normal(2, 6400)
    gradients[:, -256:] = 5 * np.sign(gradients[:, -256:])  # the last two rows
    scheme = rows_scheme(density=0.04, block=128, bits=16, **options)
    engines = engines_of(scheme, [Tensor("w", (6400,))], 2)
    for engine in engines:
        engine.follow_loss_scale(loss_scale)
    scaled = gradients * np.float32(loss_scale)
    exchange_once(engines, [[[own]] for own in scaled], random.Random(0))
    is_finite = bool(np.abs(scaled).max() <= 65504 / 2)
    assert [engine.is_finite() for engine in engines] == [is_finite] * 2
    if is_finite:
        [total] = engines[0].sums(0)
        assert set(np.flatnonzero(total)) <= set(range(6400 - 256, 6400))


def test_a_sketch_that_overflows_selects_what_is_finite():
    gradients = np.full((1, 2, 1280), 3e38, np.float32)
    gradients[:, 1] *= -1
    [step] = simulate_rows(gradients, density=0.1, block=128)
    assert not step.average.any()
    assert np.count_nonzero(step.residual[0] == 0) == 128


def test_float16_values_saturate_and_the_rest_is_carried_on():
    gradients = np.full((1, 4, 1000), 1e5, np.float32)
    [step] = simulate_rows(gradients, density=1.0, bits=16, beta=1.0)
    np.testing.assert_array_equal(step.average, np.float32(16376))
    np.testing.assert_array_equal(step.residual, np.float32(1e5 - 16376))


def test_a_saved_state_goes_on_with_the_same_bits():
    tensors, scheme = [Tensor("w", (40, 50))], rows_scheme(density=0.1, block=32)

    def step(engines, number):
        grads = [[normal(2000, seed=[number, rank])] for rank in range(2)]
        return sums_of_a_step(engines, grads, random.Random(number))[0]

    straight, first = engines_of(scheme, tensors, 2), engines_of(scheme, tensors, 2)
    for number in range(3):
        assert step(straight, number) == step(first, number)
    resumed = engines_of(scheme, tensors, 2)
    for old, new in zip(first, resumed, strict=True):
        new.load_state_dict(old.state_dict())
    for number in range(3, 6):
        assert step(straight, number) == step(resumed, number)


def test_a_sketch_of_another_size_is_refused():
    scheme = rows_scheme(density=0.1, block=32)
    exchange = scheme.exchange([Tensor("w", (1003,))], [normal(1003)], {}, Context(4, 0, 3))
    sketch = next(exchange).data
    assert sketch.shape == (31,)
    with pytest.raises(PayloadError, match="30 sums"):
        exchange.send(sketch[:-1])


def test_it_sends_more_of_the_sum_than_random_rows_do():
    """Of rows of many scales; nearly as much as the rows that are largest in truth."""
    rng = np.random.default_rng(5)
    scales = np.exp(1.5 * rng.standard_normal((200, 1)))
    gradients = (scales * rng.standard_normal((3, 4, 200, 64))).astype(np.float32)
    for step, grads in zip(
        simulate_rows(gradients.reshape(3, 4, -1), density=0.1, block=64, error_feedback=False),
        gradients.astype(np.float64).mean(1),
        strict=True,
    ):
        energies = np.square(grads).sum(1)
        sent = np.square(step.average.astype(np.float64)).sum()
        best = np.sort(energies)[-20:].sum()
        assert 0.7 * best < sent <= 1.0001 * best
        assert sent > 4 * energies.sum() * 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block must be a power of two from 8 to 4096, got 0"),
        ({"block": 100}, "block must be a power of two from 8 to 4096, got 100"),
        ({"block": 8192}, "block must be a power of two from 8 to 4096, got 8192"),
        ({"bits": 8}, "bits must be 16 or 32"),
        ({"beta": 0}, r"beta must lie in \(0, 1\]"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"density": 0}, "density must lie in"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        rows_scheme(**options)
    with pytest.raises(TypeError, match=r"block must be a whole number, got 128\.0"):
        rows_scheme(block=128.0)


def bucket_of(ops, grads, residuals, rows):
    numels = [901 if grad is None else grad.size for grad in grads]
    names, counts = tuple(f"t{i}" for i in range(len(numels))), [rows.count(n) for n in numels]
    begins = np.cumsum([0, *map(rows.sketch_numel, numels)])
    plan = IndexPlan(names, numels, counts, 1, 1.0, False, True, 0, 0, begins)
    return ops.common_index(plan, grads, residuals, False)


@each("block", [8, 128, 4096])
@each("density", [0.001, 0.1, 0.6])
@each("numbers", [normal, whole_numbers])  # of the latter many sums are equal
@pytest.mark.usefixtures("n_threads")
def test_kernels_are_the_reference(block, density, numbers):
    rows, sizes = LargestRows(density, block), (0, 1, 4095, 70_001, 300_000, 5 * block)
    grads = [numbers(n, seed=n) for n in sizes] + [None, np.zeros(50_000, np.float32)]
    residuals = [numbers(n, seed=n + 1) if n % 2 else None for n in sizes] + [None, None]
    signs = signs_of(3, block).astype(np.float32)
    found = []
    for ops in (HOST, ReferenceOps()):
        bucket = bucket_of(ops, grads, residuals, rows)
        sums = ops.sketch(bucket, signs)
        largest = ops.largest_rows(bucket, sums, block)
        assert (largest.dtype, largest.size) == (np.int64, bucket.plan.total)
        found.append((sums.tobytes(), largest.tobytes()))
    assert found[0] == found[1]
