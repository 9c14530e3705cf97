"""SketchSGD: sketches add up, heavy hitters are found, and what is sent is not carried on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, simulate
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.wire import counter_rng
from tests import reference
from tests.test_dgc import momentum_sgd


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def whole_numbers(n, seed=0):
    return np.random.default_rng(seed).integers(-99, 100, n).astype(np.float32)


def hashes(rows=5, step=0):
    drawn = [counter_rng.draw(0, step, "w", place) for place in range(2 * rows)]
    return np.array(drawn, np.uint64).reshape(rows, 2)


def sketch_of(values, drawn, columns, kernels=cpu):
    return kernels.sketch(values, drawn, columns, cpu.max_abs_bits(values))


def test_sketches_add_up():
    """Exactly, of whole numbers: sums of which float32 does not round."""
    a, b = whole_numbers(20_000), whole_numbers(20_000, 1)
    total = sketch_of(a, hashes(), 300) + sketch_of(b, hashes(), 300)
    assert total.tobytes() == sketch_of(a + b, hashes(), 300).tobytes()


def test_a_sketch_does_not_depend_on_the_order():
    """Of elements whose hashes are alike."""
    values, same = 1e4 * normal(50_000), np.array([[0, 5], [0, 1 << 32]], np.uint64)
    table = sketch_of(values, same, 3)
    assert table.tobytes() == sketch_of(values[::-1].copy(), same, 3).tobytes()
    exact = math.fsum(values.tolist())
    assert abs(table.sum(1)).tolist() == pytest.approx([abs(exact)] * 2, rel=1e-7)


@pytest.mark.parametrize("peak", [3e38, 1.0, 1e-38, 1e-45])
def test_a_sketch_of_any_scale_is_exact_where_float32_is(peak):
    values = np.zeros(1000, np.float32)
    values[[3, 700]] = peak, -peak
    table = sketch_of(values, np.array([[0, 0]], np.uint64), 1)
    assert table.tolist() == [[0.0]]
    values[700] = 0
    assert sketch_of(values, np.array([[0, 0]], np.uint64), 1).tolist() == [[values[3]]]
    values[:] = np.float32(peak)
    with np.errstate(over="ignore"):
        expected = np.float32(1000 * float(np.float32(peak)))
    assert sketch_of(values, np.array([[0, 0]], np.uint64), 1).tolist() == [[expected]]


def test_a_single_entry_is_recovered_exactly():
    for place in (0, 17, 9999):
        values = np.zeros(10_000, np.float32)
        values[place] = -3.25
        estimates = cpu.estimate(sketch_of(values, hashes(), 40), hashes(), 10_000)
        assert estimates[place] == -3.25
        assert np.count_nonzero(estimates) < 20


def test_hashes_are_even_and_signs_too():
    n, columns = 100_000, 64
    at, signs = reference.columns_and_signs(n, hashes(), columns)
    for row, sign in zip(at, signs, strict=True):
        counts = np.bincount(row, minlength=columns)
        assert len(counts) == columns
        assert np.abs(counts - n / columns).max() < 6 * (n / columns) ** 0.5
        assert abs(sign.sum()) < 6 * n**0.5


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_planted_heavy_hitters_are_recovered(ranks):
    n, planted = 50_000, 20
    gradients = 0.02 * normal(3, ranks, n)
    places = np.random.default_rng(3).choice(n, planted, replace=False)
    gradients[:, :, places] += 5 * np.sign(normal(3, 1, planted, seed=4))
    options = {"density": 0.001, "momentum": 0.0}
    for step, grads in zip(simulate("sketchsgd", gradients, **options), gradients, strict=True):
        assert np.count_nonzero(step.average) == 50
        assert set(np.flatnonzero(np.abs(step.average) > 1)) == set(places)
        np.testing.assert_allclose(step.average[places], grads[:, places].mean(0), rtol=1e-5)
        assert not step.residual[:, places].any()


def test_as_many_heavy_hitters_as_places_are_nearly_all_found():
    n, k = 50_000, 50
    gradients = 0.02 * normal(5, 1, n)
    places = np.random.default_rng(3).choice(n, k, replace=False)
    gradients[:, :, places] += 5
    steps = simulate("sketchsgd", gradients, density=0.001, momentum=0.0)
    assert np.mean([(step.average[places] > 1).mean() for step in steps]) > 0.9


def test_values_that_arrive_are_exact():
    gradients = normal(1, 3, 20_000)
    [step] = simulate("sketchsgd", gradients, density=0.001)
    sent = np.flatnonzero(step.average)
    assert sent.size == 20
    np.testing.assert_allclose(step.average[sent], gradients[0][:, sent].mean(0), rtol=1e-6)
    left = gradients[0].copy()
    left[:, sent] = 0
    assert step.residual.tobytes() == left.tobytes()


def test_momentum_accumulates_where_nothing_is_sent():
    """Of zeros but one entry, what is sent is that entry's velocity; masking forgets it."""
    gradients = np.zeros((4, 2, 5000), np.float32)
    gradients[:, :, 77] = 1.0
    for masking, expected in ((True, [1, 1, 1, 1]), (False, [1, 1.5, 1.75, 1.875])):
        options = {"density": 0.001, "momentum": 0.5, "masking": masking}
        steps = simulate("sketchsgd", gradients, **options)
        assert [float(step.average[77]) for step in steps] == expected


@pytest.mark.parametrize("n", [0, 1, 5, 20])
def test_a_tensor_that_travels_as_it_is_keeps_its_velocity(n):
    gradients = normal(3, 2, n)
    expected = momentum_sgd(gradients.mean(1))
    for step, mean in zip(simulate("sketchsgd", gradients), expected, strict=True):
        np.testing.assert_allclose(step.average, mean, atol=1e-5)
        assert not step.residual.any()
        assert step.sent_bytes == [4 * n + 4] * 2


def test_a_warm_up_has_the_momentum():
    gradients = normal(3, 2, 3000)
    steps = simulate("sketchsgd", gradients, warmup_steps=3)
    for step, mean in zip(steps, momentum_sgd(gradients.mean(1)), strict=True):
        np.testing.assert_allclose(step.average, mean, atol=1e-5)


def test_bytes_are_those_of_table_and_candidates():
    scheme = get_scheme("sketchsgd", density=0.001, rows=5, columns=4, candidates=4)
    assert scheme.sent_nbytes(Tensor("w", (1000, 1000))) == 4 * (5 * 4000 + 4000)
    gradients = normal(2, 3, 20_000)
    for step in simulate(scheme, gradients):
        assert step.sent_bytes == [scheme.sent_nbytes(Tensor("w", (20_000,)))] * 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_a_bad_value_on_any_rank_makes_the_step_vanish(bad, bad_rank):
    gradients = normal(4, 3, 5000)
    gradients[2, bad_rank, 1234] = bad
    steps = list(simulate("sketchsgd", gradients))
    assert np.isnan(steps[2].average).all()
    assert steps[2].residual.tobytes() == steps[1].residual.tobytes()
    assert np.isfinite(steps[3].average).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 4}, "rows must be 1, 3, 5, 7 or 9"),
        ({"columns": 0}, "columns must be a whole number from 1 to 64, got 0"),
        ({"candidates": 65}, "candidates must be a whole number from 1 to 64, got 65"),
        ({"momentum": -1}, r"momentum must lie in \[0, 1\)"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"density": 0}, "density must lie in"),
    ],
)
def test_wrong_options_are_told_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        get_scheme("sketchsgd", **options)
    with pytest.raises(TypeError, match=r"candidates must be a whole number, got 2\.0"):
        get_scheme("sketchsgd", candidates=2.0)


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 70_001])
@pytest.mark.parametrize(("rows", "columns"), [(1, 7), (3, 100), (5, 1000), (9, 64)])
@pytest.mark.usefixtures("n_threads")
def test_kernels_are_the_reference(n, rows, columns):
    drawn = hashes(rows)
    for values in (normal(n), np.zeros(n, np.float32)):
        table = sketch_of(values, drawn, columns)
        assert table.tobytes() == sketch_of(values, drawn, columns, reference).tobytes()
        found = cpu.estimate(table, drawn, n)
        np.testing.assert_array_equal(found, reference.estimate(table, drawn, n))
