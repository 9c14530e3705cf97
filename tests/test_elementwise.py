"""What the methods that send every element promise: bits, means, exact cases, what is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_codec, get_scheme, list_compressors, simulate
from horovod_fftcomp.codec.methods.natural import Natural
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.kernels.cpu import bucket
from horovod_fftcomp.kernels.cpu.bucket import BucketCodec
from horovod_fftcomp.kernels.cpu.dense import read_words, write_words
from horovod_fftcomp.kernels.cpu.jit import kernel_of
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once
from horovod_fftcomp.wire.counter_rng import draw
from horovod_fftcomp.wire.radix import GROUP, count_words, digits_of, pack_words, unpack_words
from tests.backends import load_backend
from tests.contracts import ELEMENT_RECIPES, HOST_ONLY
from tests.loops import each

N_DRAWS = 400


def _normal(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def _decoded(recipe: str, x: np.ndarray, step: int = 0, **options) -> np.ndarray:
    codec = get_codec(recipe, **options)
    return codec.decode(codec.encode(x, step=step, name="w"))


@pytest.mark.parametrize(
    ("recipe", "options", "least"),
    [
        ("terngrad", {}, 15.9),
        ("terngrad", {"packing": "bits"}, 15.9),
        ("onebit", {}, 31.5),
        ("efsignsgd", {}, 31.5),
        ("signsgd", {}, 31.5),
        ("qsgd", {}, 7.9),
        ("dither", {}, 19.9),
        ("natural", {}, 3.99),
    ],
)
def test_ratios_on_the_wire_with_the_header(recipe, options, least):
    scheme = get_scheme(recipe, **options)
    assert 4e6 / scheme.sent_nbytes(Tensor("w", (1000, 1000))) >= least
    assert scheme.codec.encode(_normal(10**6)).nbytes <= scheme.sent_nbytes(Tensor("w", (10**6,)))


@pytest.mark.more
@each("radix", [2, 3, 4, 5, 7, 15, 16, 255, 65535])
def test_words_hold_any_numbers_below_the_radix(radix):
    for n in (0, 1, 31, 33, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 5):
        codes = np.random.default_rng(n).integers(0, radix, n).astype(np.uint32)
        words = pack_words(codes, radix)
        assert words.size == count_words(n, radix)
        assert unpack_words(words, n, radix).tolist() == codes.tolist()
        assert radix ** digits_of(radix) <= 2**32
        _check_compiled(codes, np.uint32(radix), words)


WRITE_WORDS, READ_WORDS = kernel_of(write_words), kernel_of(read_words)


def _check_compiled(codes, radix, words):
    """Assert that the CPU kernels pack each group into the same words, and unpack these."""
    digits, at = digits_of(int(radix)), 0
    for begin in range(0, codes.size, GROUP):
        group, m = np.full(GROUP + 32, 99, np.uint32), min(GROUP, codes.size - begin)
        group[:m] = codes[begin : begin + m]
        packed = np.empty(count_words(m, int(radix)), np.uint32)
        WRITE_WORDS(group, m, radix, digits, packed)
        assert packed.tobytes() == words[at : (at := at + packed.size)].tobytes()
        assert READ_WORDS(packed, m, radix, digits, group) == codes[begin : begin + m].max()
        assert group[:m].tolist() == codes[begin : begin + m].tolist()


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((name, {}) for name in ELEMENT_RECIPES if get_scheme(name).codec.method.unbiased),
        ("qsgd", {"levels": 1, "norm": "l2", "bucket": 64}),
        ("qsgd", {"levels": 127, "norm": "l2"}),
        *(("dither", {"ratio": ratio}) for ratio in (16, 100)),
        ("terngrad", {"clip": 0}),
        ("dorefa", {"bits": 1}),
    ],
)
def test_the_mean_over_draws_is_the_gradient(recipe, options):
    """Of the errors of the means, in their own deviations, none is large and all are normal."""
    x = _normal(2000) * np.float32(0.01)
    draws = np.stack([_decoded(recipe, x, step, **options) for step in range(N_DRAWS)])
    error = draws.mean(0, dtype=np.float64) - x
    spread = draws.std(0, dtype=np.float64) / np.sqrt(N_DRAWS)
    usual = spread >= np.median(spread)  # what is hardly ever drawn is not normal yet
    scores = error[usual] / spread[usual]
    assert np.abs(scores).max() < 5.5  # by chance once in 20,000 runs
    assert abs(scores.mean()) < 5 / np.sqrt(scores.size)
    assert 0.9 < scores.std() < 1.1
    assert np.abs(error.sum()) < 5 * np.sqrt((spread**2).sum())


def test_a_kernel_that_is_not_compiled_is_computed_in_numpy(monkeypatch):
    codec, x = get_codec("natural"), _normal(5000)
    payload = codec.encode(x)
    decoded = codec.decode(payload)
    monkeypatch.setattr(Natural, "cuda", None)
    monkeypatch.setattr(bucket, "table_of", lambda codec, shape, _: BucketCodec([codec], [shape]))
    assert not BucketCodec([codec], [(5000,)]).members
    assert codec.encode(x).tobytes() == payload.tobytes()
    assert codec.decode(payload).tobytes() == decoded.tobytes()


def test_ranks_and_steps_draw_different_numbers():
    codec, x = get_codec("qsgd"), _normal(50_000)
    errors = [
        codec.decode(codec.encode(x, step, name, rank=rank)).astype(np.float64) - x
        for step, name, rank in [(0, "w", 0), (0, "w", 1), (1, "w", 0), (0, "v", 0)]
    ]
    correlation = np.corrcoef(errors) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(x.size)
    assert draw(0, 0, "w", 0) != draw(0, 0, "w", 1)
    one = np.tile(x[:GROUP], 8)  # groups draw different numbers too
    rows = (codec.decode(codec.encode(one)) - one).reshape(8, GROUP)
    assert np.abs(np.corrcoef(rows) - np.eye(8)).max() < 6 / np.sqrt(GROUP)


@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("levels", [1, 7, 127, 2047])
def test_one_element_that_holds_the_norm_has_the_highest_level(levels, norm):
    x = np.zeros(5000, np.float32)
    x[[3, 1500, 4999]] = 0.3, -7e-20, 1.1e30  # each in a bucket of its own
    found = _decoded("qsgd", x, levels=levels, norm=norm)
    assert found.tobytes() == x.tobytes()


def test_a_corrupt_tensor_in_float32_is_refused():
    codec = get_codec("qsgd")
    raw = codec.encode(np.ones(1, np.float32))
    for value in (np.nan, 3e38, np.inf):
        damaged = raw.copy()
        damaged[-4:] = np.array([value], np.float32).view(np.uint8)
        for payloads in ([damaged], [damaged, raw], [raw, damaged]):
            with pytest.raises(PayloadError, match="a value lies beyond the scale"):
                codec.decode_sum(payloads)


def test_clipping_limits_the_scale_of_terngrad():
    x = _normal(100_000)
    x[7] = 1000
    deviation = x.astype(np.float64).std()
    scales = {clip: np.abs(_decoded("terngrad", x, clip=clip)).max() for clip in (0, 2.5, 1)}
    assert scales[0] == 1000
    assert scales[2.5] == np.float32(2.5 * deviation)
    assert scales[1] == np.float32(deviation)
    for value in (0.125, 0.3, -0.7, 1e-20):  # no deviation but by rounding
        same = np.full(3000, value, np.float32)
        assert _decoded("terngrad", same).tobytes() == same.tobytes()


def test_two_values_are_exact_under_onebit():
    rng = np.random.default_rng(0)
    x = np.where(rng.random(70_001) < 0.3, np.float32(-1.7), np.float32(0.1))
    assert _decoded("onebit", x).tobytes() == x.tobytes()
    columns = rng.standard_normal((50, 2)).astype(np.float32)
    columns = np.sort(columns, axis=1) * np.float32([1, 1])
    columns[:, 0], columns[:, 1] = -np.abs(columns[:, 0]), np.abs(columns[:, 1])
    matrix = np.take_along_axis(columns, (rng.random((50, 333)) < 0.5).astype(int), 1)
    assert _decoded("onebit", matrix, group="column").tobytes() == matrix.tobytes()


@pytest.mark.parametrize("group", ["tensor", "column"])
def test_either_side_of_onebit_loses_nothing_in_sum(group):
    x = _normal(120_000).reshape(60, 2000)
    error = x.astype(np.float64) - _decoded("onebit", x, group=group)
    rows = range(60) if group == "column" else [slice(None)]
    for row in rows:
        for side in (x[row] < 0, x[row] >= 0):
            assert abs(error[row][side].sum()) < 1e-6 * np.abs(x[row]).sum()


def test_the_error_of_scaled_signs_is_what_the_mean_magnitude_leaves():
    x = _normal(30_000)
    x[::7] = 0
    x[1::7] = -0.0
    wide = x.astype(np.float64)
    error = ((wide - _decoded("efsignsgd", x)) ** 2).sum()
    left = (wide**2).sum() - np.abs(wide).sum() ** 2 / x.size
    assert error == pytest.approx(left, rel=1e-6)


def test_the_majority_decides_and_a_tie_is_zero():
    votes = np.array([[1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, -1], [0, -1, -1, 1]], np.float32)
    gradients = np.repeat(votes, 100, axis=1)[None]
    step = next(simulate("signsgd", gradients))
    assert step.average.reshape(4, 100)[:, 0].tolist() == [1, -1, -1, -1]
    tie = next(simulate("signsgd", np.stack([gradients[0, 0], -gradients[0, 0]])[None]))
    assert not tie.average.any()
    nobody = next(simulate("signsgd", np.zeros((1, 3, 100), np.float32)))
    assert not nobody.average.any()
    one = next(simulate("signsgd", np.stack([np.zeros(100), -np.ones(100)])[None]))
    assert (one.average == -1).all()


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("recipe", ["signsgd", "signum"])
@pytest.mark.parametrize(("n", "n_steps"), [(1000, 300), (300_000, 20)])
def test_zeros_and_ties_have_no_sign_on_average(recipe, exchange, n_ranks, n, n_steps):
    shape = n_steps, n_ranks, n
    gradients = np.random.default_rng(n).standard_normal(shape).astype(np.float32)
    gradients[:, :, ::3] = 0.0  # rows of an embedding that nobody used
    gradients[::2, :, 1] = 0.0  # used in every second step
    steps = np.array([s.average for s in simulate(recipe, gradients, exchange=exchange)])
    unused, half = steps[:, ::3], steps[::2, 1]
    assert abs(unused.mean()) < 4 / n_steps**0.5
    assert not unused.any() or n_ranks % 2 or exchange == "sharded"
    assert abs(half.mean()) < 4 / half.size**0.5 or recipe == "signum"
    others = np.delete(steps, np.s_[::3], 1)
    assert abs(others.mean()) < 5 / (others.size / (20 if recipe == "signum" else 1)) ** 0.5


def test_zeros_are_sent_alike_where_denormal_numbers_are_zeros():
    torch = pytest.importorskip("torch")
    values = np.zeros((2, 2, 9000), np.float32)
    values[:, :, 1] = 1
    torch.set_flush_denormal(True)
    try:
        steps = [step.average for step in simulate("signsgd", values)]
    finally:
        torch.set_flush_denormal(False)
    assert not np.delete(steps, 1, 1).any()


def test_signs_are_kept_as_the_reference_keeps_them():
    special = [0.0, -0.0, 1e-45, -1e-45, np.inf, -np.inf, np.nan, 2.5, -7.0]
    values = np.tile(np.array(special, np.float32), 3000)
    expected, actual = values.copy(), values.copy()
    load_backend("reference").majority_sign(expected, 3)
    load_backend("cpu").majority_sign(actual, 3)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual[:9], [0, 0, 3, -3, 3, -3, np.nan, 3, -3])


def test_signum_votes_with_a_momentum_of_all_gradients():
    gradients = np.random.default_rng(3).standard_normal((6, 3, 2000)).astype(np.float32)
    velocity = np.zeros((3, 2000), np.float32)
    for step, grads in zip(simulate("signum", gradients, decay=0.9), gradients, strict=True):
        velocity = grads + np.float32(0.9) * velocity
        sums = np.where(velocity < 0, -1, 1).sum(0)
        np.testing.assert_array_equal(step.average, np.where(sums < 0, -1, 1))
    np.testing.assert_array_equal(step.residual, velocity)


@pytest.mark.parametrize(
    ("recipe", "options"), [("signsgd", {}), ("signum", {}), ("demo", {"sign": True})]
)
def test_signs_are_multiplied_by_the_loss_scale(recipe, options):
    tensor = Tensor("w", (60, 60))
    bucket, found = Bucket((tensor,), make_policy(recipe, **options)), []
    for scale in (1.0, 1024.0):
        engines = [Engine([bucket], rank, 2) for rank in range(2)]
        rng = np.random.default_rng(2)
        for _ in range(2):
            for engine in engines:
                engine.follow_loss_scale(scale)
            grads = [[[rng.standard_normal(3600, np.float32) * np.float32(scale)]] for _ in engines]
            exchange_once(engines, grads, random.Random(0))
            sums = engines[0].sums(0)[0].copy()
            for engine in engines:
                engine.settle()
        found.append(sums / np.float32(scale))
    assert set(np.abs(found[0]).tolist()) <= {0.0, 2.0}
    np.testing.assert_array_equal(*found)


def test_powers_of_two_are_exact_and_others_one_of_two():
    powers = np.float32(2.0) ** np.arange(-60, 60, dtype=np.float32)
    powers[::2] *= -1
    assert _decoded("natural", powers).tobytes() == powers.tobytes()
    x = np.full(40_000, 4 / 3, np.float32)  # where the variance is largest
    found = _decoded("natural", x)
    assert set(found.tolist()) == {1.0, 2.0}
    assert ((found - x) ** 2).mean() / x[0] ** 2 == pytest.approx(1 / 8, rel=0.02)


@pytest.mark.parametrize("recipe", ["qsgd", "terngrad", "natural", "onebit"])
def test_bodies_that_no_method_writes_are_refused(recipe):
    codec = get_codec(recipe)
    good = codec.encode(_normal(5000))
    for at, value in ((good.nbytes - 4, 0xFFFFFFFF), (48, 0xFFFFFFFF), (48, 0x7F800000)):
        damaged = good.copy()
        damaged[at : at + 4] = np.frombuffer(np.uint32(value).tobytes(), np.uint8)
        if recipe == "onebit" and at != 48:
            continue  # any bits are signs
        if recipe in ("terngrad", "natural") and value != 0xFFFFFFFF:
            continue
        if recipe == "terngrad" and at != 48:
            continue  # the last digits of the last words belong to no element
        with pytest.raises(PayloadError, match="body"):
            codec.decode(damaged)


def test_a_gpu_serves_all_recipes_with_kernels_but_not_with_all_options():
    tensors = [Tensor("w", (100, 100))]
    for recipe in list_compressors():
        assert get_scheme(recipe).runs_on_device(tensors) == (recipe not in HOST_ONLY)
    as_it_is = [Tensor("w", (2000, 1))]  # a residual from before would be lost there
    assert not get_scheme("onebit", group="column").runs_on_device(as_it_is)
    for recipe, options in (
        ("scalecom", {"bits": 16}),
        ("scalecom", {"selector": "exact"}),
    ):
        assert not get_scheme(recipe, **options).runs_on_device(tensors)


@pytest.mark.parametrize(
    ("name", "coarse", "fine"),
    [
        ("qsgd", {"norm": "l2"}, {"norm": "l2", "levels": 63}),
        ("qsgd", {"levels": 1}, {"levels": 7}),
        ("dorefa", {"bits": 2}, {"bits": 4}),
    ],
)
def test_feedback_that_would_make_residuals_grow_is_refused(name, coarse, fine):
    get_scheme(name, **coarse)
    with pytest.raises(ValueError, match=r"error_feedback=True makes the residuals of \w+.* grow"):
        get_scheme(name, **coarse, error_feedback=True)
    gradients = np.random.default_rng(0).standard_normal((30, 1, 4096)).astype(np.float32)
    norms = [
        np.linalg.norm(step.residual[0]) / np.linalg.norm(gradients[0])
        for step in simulate(name, gradients, **fine, error_feedback=True)
    ]
    assert max(norms[20:]) < 2.0
