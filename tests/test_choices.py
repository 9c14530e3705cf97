"""What the methods that choose some elements promise: formulas, conservation, means, sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from horovod_fftcomp import Codec, PayloadError, get_codec, get_scheme, simulate, wire
from horovod_fftcomp.codec.adaptive import Adaptive, Selection, bitmap_of
from horovod_fftcomp.codec.quantizers import Float32, float_of
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.schemes.allgather import Allgather
from tests.backends import BACKENDS, given, load_backend
from tests.contracts import ADAPTIVE_RECIPES, CASES, CODECS, case_of, make_codec
from tests.loops import each

N_DRAWS = 400


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _sent_by_strom(method, values, shape, arrived):
    levels = np.minimum(np.abs(values) // method.threshold, method.quanta)
    return np.sign(values) * levels * method.threshold


def _sent_by_adacomp(method, values, shape, arrived):
    length = method.length(shape)
    rows = np.zeros(-(-values.size // length) * length)
    rows[: values.size] = np.abs(values)
    maxima = rows.reshape(-1, length).max(1)
    reached = np.repeat(maxima, length)[: values.size]
    sent = (2 * np.abs(values) >= reached) & (reached > 0)
    scale = maxima.mean() if maxima.size else 0.0
    return sent * np.where(values < 0, -scale, scale)


def _sent_by_wangni(method, values, shape, arrived):
    """Of a draw, one of the two values that it can be."""
    largest = np.finfo(arrived.dtype).max if arrived.dtype.name == "float16" else np.inf
    below = partial(load_backend("reference").sums_below, np.float32(values))
    limit = method.limit(values.size, below) if values.any() else 0.0
    expected = np.sign(values) * np.minimum(np.maximum(np.abs(values), limit), largest)
    expected[(arrived == 0) & (np.abs(values) < limit)] = 0
    return expected


FORMULAS = {"strom": _sent_by_strom, "adacomp": _sent_by_adacomp, "wangni": _sent_by_wangni}


def test_every_adaptive_recipe_has_its_formula():
    assert set(FORMULAS) == set(ADAPTIVE_RECIPES)


@each("case", CASES)
@each("key", [key for key, (recipe, _) in CODECS.items() if recipe in FORMULAS])
def test_what_arrives_is_what_the_formulas_say(key, case):
    codec, x = make_codec(key), case_of(case)
    rounding = 1e-2 if x.dtype.name in ("float16", "bfloat16") else 1e-6
    with np.errstate(over="ignore"):
        values = x.astype(np.float32).astype(np.float64).ravel()
    for backend in BACKENDS:
        payload = codec.encode(x, step=3, name="w", **given(backend))
        arrived = codec.decode(payload, **given(backend)).ravel()
        expected = FORMULAS[CODECS[key][0]](codec.sparsifier, values, x.shape, arrived)
        np.testing.assert_allclose(arrived.astype(np.float64), expected, rtol=rounding, atol=1e-44)


@dataclass(frozen=True)
class _EverySecond(Adaptive):
    """Send every second element, from the first in even steps, from the second in odd ones."""

    spec_name = "EverySecond"

    def coding(self, scale):
        return Float32().coding(scale)

    def choose(self, coeffs, how):
        array = coeffs.array
        bitmap = bitmap_of(np.arange(how.step % 2, array.size, 2), array.size)
        scale = float_of(coeffs.peak)
        k, codes = how.kernels.take_chosen(array, bitmap, 0.0, self.coding(scale), how.keep)
        return Selection(k, bitmap, codes, scale)

    def expected_count(self, shape):
        return math.prod(shape) // 2


def test_the_step_reaches_a_stage():
    tensor, grad = Tensor("w", (1000,)), _normal(1000)
    scheme = Allgather(Codec(Identity(), _EverySecond()), error_feedback=True)
    engine = Engine([Bucket((tensor,), always(scheme))], 0, 1)
    for step in range(4):
        engine.resume(0, engine.resume(0, [grad]).data)
        expected = np.zeros_like(grad)
        expected[step % 2 :: 2] = grad[step % 2 :: 2] * np.float32(2 if step else 1)
        np.testing.assert_allclose(engine.sums(0)[0], expected)
        engine.settle()


@pytest.mark.parametrize("quanta", [1, 3])
@pytest.mark.parametrize("threshold", [0.25, 2.0])
def test_every_step_of_strom_is_that_of_the_formulas(threshold, quanta):
    gradients = _normal(20, 3, 1000)
    residual = np.zeros((3, 1000), np.float32)
    steps = simulate("strom", gradients, threshold=threshold, quanta=quanta)
    for grads, step in zip(gradients, steps, strict=True):
        due = residual + grads
        levels = np.minimum(np.abs(due) // threshold, quanta)
        sent = (np.sign(due) * levels * threshold).astype(np.float32)
        residual = due - sent
        np.testing.assert_allclose(step.average, sent.mean(0), rtol=1e-6)
        np.testing.assert_array_equal(step.residual, residual)


@pytest.mark.parametrize("recipe", ["strom", "adacomp"])
def test_sent_plus_residual_is_gradient_plus_old_residual(recipe):
    options = {"threshold": 0.7} if recipe == "strom" else {"bin": 64}
    gradients, old = _normal(12, 1, 5000), 0.0
    for grads, step in zip(gradients, simulate(recipe, gradients, **options), strict=True):
        due = np.float32(old) + grads
        np.testing.assert_allclose(step.average + step.residual[0], due[0], rtol=1e-6, atol=1e-6)
        old = step.residual


def test_one_quantum_is_one_bit_and_more_are_a_few():
    x = _normal(1_000_000)
    for quanta, bits in ((1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (1 << 15, 16)):
        codec = get_codec("strom", threshold=1.0, quanta=quanta)
        assert codec.sparsifier.bits == bits
        payload = codec.encode(x)
        k = np.count_nonzero(np.abs(x) >= 1)
        plan = codec.plan(x.shape, k)
        assert payload.nbytes == plan.values_offset + -(-k * bits // 8)
    sparse = get_codec("strom", threshold=3.0).encode(x)
    n_sent = np.count_nonzero(np.abs(x) >= 3)
    assert sparse.nbytes * 8 < 12 * n_sent  # with the position, where a plain list has 32


def test_quanta_end_where_the_values_or_the_option_do():
    below = np.nextafter(np.float32(0.3), np.float32(0))
    x = np.array([0.3, below, -0.3, 0.6, -0.75, 90, -3e38, 0, -0.0, 1e-45] * 9, np.float32)
    codec = get_codec("strom", threshold=0.3, quanta=4)
    found = codec.decode(codec.encode(x))[:10] / np.float32(0.3)
    np.testing.assert_allclose(found, [1, 0, -1, 2, -2, 4, -4, 0, 0, 0], rtol=1e-6)
    huge = np.full(100, np.finfo(np.float32).max, np.float32)
    most = get_codec("strom", threshold=1.1e34, quanta=1 << 15)
    assert np.isfinite(most.decode(most.encode(huge))).all()


def test_a_loss_scale_changes_the_threshold_of_strom():
    tensor, scheme = Tensor("w", (1000,)), get_scheme("strom", threshold=1.5, quanta=2)
    plain, scaled = (Engine([Bucket((tensor,), always(scheme))], 0, 1) for _ in range(2))
    for number in range(8):
        scale = 2.0 ** (number % 3)
        scaled.follow_loss_scale(scale)
        grad = _normal(1000, seed=number)
        plain.resume(0, plain.resume(0, [grad]).data)
        scaled.resume(0, scaled.resume(0, [grad * np.float32(scale)]).data)
        assert plain.sums(0)[0].any()
        assert scaled.sums(0)[0].tobytes() == (plain.sums(0)[0] * np.float32(scale)).tobytes()
        plain.settle()
        scaled.settle()


@pytest.mark.parametrize(("threshold", "scale"), [(1e30, 2.0**40), (1e-37, 2.0**-20)])
def test_a_loss_scale_brings_no_threshold_beyond_float32(threshold, scale):
    tensor = Tensor("w", (1000,))
    for recipe in ("strom", "hard_threshold"):
        scheme = get_scheme(recipe, threshold=threshold)
        engine = Engine([Bucket((tensor,), always(scheme))], 0, 1)
        engine.follow_loss_scale(scale)
        engine.resume(0, engine.resume(0, [_normal(1000)]).data)
        assert np.isfinite(engine.sums(0)[0]).all()


@pytest.mark.parametrize("length", [7, 64, 500])
def test_every_step_of_adacomp_is_that_of_the_formulas(length):
    gradients = _normal(15, 2, 1999)
    residual = np.zeros((2, 1999), np.float32)
    for grads, step in zip(gradients, simulate("adacomp", gradients, bin=length), strict=True):
        expected = []
        for rank, grad in enumerate(grads):
            due = residual[rank] + grad
            starts = np.arange(0, due.size, length)
            maxima = np.maximum.reduceat(np.abs(due), starts)
            sent = np.abs(due + grad) >= np.repeat(maxima, length)[: due.size]
            scale = np.float32(maxima.mean(dtype=np.float64))
            expected.append(np.where(sent, np.where(due < 0, -scale, scale), np.float32(0)))
            residual[rank] = due - expected[-1]
        np.testing.assert_allclose(step.average, np.mean(expected, 0), rtol=1e-6)
        np.testing.assert_array_equal(step.residual, residual)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_gradient_adacomp_sends_the_largest_of_each_bin_alone(backend):
    codec, kernels = get_codec("adacomp", bin=50), load_backend(backend)
    residual = _normal(4000, seed=1)
    residual[1000:1050] = 0  # of a bin of zeros nothing
    zeros = np.zeros(4000, np.float32)
    coeffs = codec.coeffs_of(zeros, (4000,), kernels, residual)
    sent = codec.decode(codec.encode_coeffs(coeffs, (4000,), kernels=kernels).payload)
    rows = np.abs(residual).reshape(80, 50)
    largest = (rows == rows.max(1, keepdims=True)) & (rows > 0)
    np.testing.assert_array_equal(sent != 0, largest.ravel())
    assert np.count_nonzero(sent) == 79
    assert np.unique(np.abs(sent[sent != 0])).tolist() == [np.float32(rows.max(1).mean())]


def test_bins_of_adacomp_follow_the_shape():
    method = get_codec("adacomp").sparsifier
    lengths = [method.length(shape) for shape in ((9,), (3, 4), (2, 3, 4), (8, 4, 3, 3))]
    assert lengths == [500, 500, 50, 50]
    assert get_codec("adacomp", bin=7).sparsifier.length((8, 4, 3, 3)) == 7


def test_adacomp_sends_a_few_of_each_bin_once_residuals_have_grown():
    """What the forecast of its size says, within a factor of two."""
    gradients = (_normal(1, 20_000, seed=i) for i in range(100))
    *_, last = simulate("adacomp", gradients)
    expected = get_scheme("adacomp").sent_nbytes(Tensor("g", (20_000,)))
    assert 0.5 * expected < last.sent_bytes[0] < 2 * expected


@pytest.mark.parametrize("density", [0.05, 0.5])
@pytest.mark.parametrize("heavy", [False, True])
def test_the_mean_over_draws_of_wangni_is_the_gradient(density, heavy):
    """As of the other unbiased recipes: of the errors of the means, in their own deviations."""
    x = np.random.default_rng(0).standard_t(2, 2000).astype(np.float32) if heavy else _normal(2000)
    x *= np.float32(0.01)
    codec = get_codec("wangni", density=density)
    draws = np.stack([codec.decode(codec.encode(x, step, "w")) for step in range(N_DRAWS)])
    limit = codec.sparsifier.limit(x.size, partial(load_backend("cpu").sums_below, x))
    chance = np.minimum(np.abs(x.astype(np.float64)) / limit, 1)
    assert chance.sum() == pytest.approx(density * x.size, rel=1e-5)
    sure = chance == 1
    assert (draws[:, sure] == x[sure]).all()
    spread = np.abs(x) * np.sqrt((1 / np.maximum(chance, 1e-30) - 1) / N_DRAWS)
    usual = ~sure & (chance * N_DRAWS > 25)  # what is hardly ever drawn is not normal
    error = draws.mean(0, dtype=np.float64) - x
    scores = error[usual] / spread[usual]
    assert scores.size > 100
    assert np.abs(scores).max() < 5.5
    assert abs(scores.mean()) < 5 / np.sqrt(scores.size)
    assert 0.85 < scores.std() < 1.15
    assert abs(error.sum()) < 5 * np.sqrt((spread[~sure] ** 2).sum())
    counts = np.count_nonzero(draws, axis=1)
    wanted, deviation = chance.sum(), np.sqrt((chance * (1 - chance)).sum() / N_DRAWS)
    assert abs(counts.mean() - wanted) < 5 * deviation


def test_wangni_sends_all_that_is_not_zero_where_that_is_less_than_its_density():
    x = np.zeros(5000, np.float32)
    x[::100] = _normal(50)
    codec = get_codec("wangni", density=0.02)
    assert codec.decode(codec.encode(x)).tobytes() == x.tobytes()
    few = get_codec("wangni", density=0.001)
    for step in range(20):
        assert not few.decode(few.encode(x, step))[x == 0].any()


def test_ranks_and_steps_of_wangni_draw_different_elements():
    codec, x = get_codec("wangni", density=0.1), _normal(20_000)
    places = [(0, "w", 0), (0, "w", 1), (1, "w", 0), (0, "v", 0)]
    errors = [codec.decode(codec.encode(x, s, n, rank=r)).astype(np.float64) - x
              for s, n, r in places]  # fmt: skip
    assert np.abs(np.corrcoef(errors) - np.eye(4)).max() < 5 / np.sqrt(x.size)


def test_what_travels_as_float32_is_what_positions_and_codes_would_say():
    """Else a draw of many elements would be sent otherwise than one of few: not unbiased."""
    codec, x = get_codec("wangni", density=0.999), _normal(3000)
    payload = codec.encode(x)
    assert wire.read_header(payload).layout == 0
    sent = codec.decode(payload)
    limit = codec.sparsifier.limit(x.size, partial(load_backend("cpu").sums_below, x))
    larger = np.copysign(np.maximum(np.abs(x), np.float32(limit)), x)
    assert (sent == 0).any()
    assert (sent[sent != 0] == larger[sent != 0]).all()
    small = get_codec("strom", threshold=0.5)
    for pair in ([2.0, 0.1], [2.0, -2.0], [0.1, 0.2]):
        decoded = small.decode(small.encode(np.array(pair, np.float32)))
        assert decoded.tolist() == [np.sign(v) * 0.5 * (abs(v) >= 0.5) for v in pair]


@pytest.mark.parametrize("recipe", ["strom", "adacomp", "wangni"])
def test_payloads_of_all_sizes_add_up(recipe):
    options = {"strom": {"threshold": 0.5}, "adacomp": {}, "wangni": {"density": 0.9}}[recipe]
    codec, rng = get_codec(recipe, **options), np.random.default_rng(1)
    xs = [((rng.random(5000) < share) * rng.standard_normal(5000)).astype(np.float32)
          for share in (0, 0.001, 0.3, 1)]  # fmt: skip
    payloads = [codec.encode(x) for x in xs]
    assert len({payload.nbytes for payload in payloads}) == 4
    for backend in BACKENDS:
        total = sum(codec.decode(payload, **given(backend)) for payload in payloads)
        np.testing.assert_allclose(codec.decode_sum(payloads, **given(backend)), total, rtol=1e-5)


def test_bodies_that_no_method_writes_are_refused():
    codec = get_codec("strom", threshold=1.0, quanta=5)
    good = codec.encode(np.full(4000, 3.5, np.float32))
    damaged = good.copy()
    damaged[-1] = 0xFF  # two codes of 4 bits: seven more steps than the largest
    with pytest.raises(PayloadError, match="body"):
        codec.decode(damaged)
    values = get_codec("wangni", density=0.1)
    damaged = values.encode(_normal(4000))
    damaged[-4:] = np.frombuffer(np.float32(1e30).tobytes(), np.uint8)
    with pytest.raises(PayloadError, match="body"):
        values.decode(damaged)


def test_sizes_cannot_be_known_before_the_data():
    for recipe in ADAPTIVE_RECIPES:
        with pytest.raises(ValueError, match="depends on the values"):
            get_codec(recipe).payload_nbytes(1000)
