"""Error feedback conserves; a step commits or vanishes; state can be saved and loaded."""

from __future__ import annotations

import math
import random
import warnings

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, list_compressors, simulate
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always, make_policy
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Context, Tensor
from horovod_fftcomp.schemes.bucket_scope import BucketScope
from horovod_fftcomp.simulation import exchange_once
from tests.contracts import (
    ADAPTIVE_RECIPES,
    CODECS,
    DRAWN_RECIPES,
    GATHER_RECIPES,
    SHARED_RECIPES,
    make_codec,
)
from tests.loops import each

# Of those that do without error feedback by default, the ones that contract can be given it.
CONTRACTIONS = [
    key
    for key, (recipe, _) in CODECS.items()
    if RECIPES[recipe].options.get("error_feedback") is False and make_codec(key).method.contraction
]
FEEDBACK = {
    key: case
    for key, case in CODECS.items()
    if getattr(get_scheme(case[0]), "error_feedback", False)
} | {
    key: (CODECS[key][0], {**CODECS[key][1], "error_feedback": True}) for key in CONTRACTIONS
} | {
    f"{name}-{density}": (name, {"density": density, "beta": 1})
    for name in DRAWN_RECIPES for density in (0.001, 0.3, 1.0)
} | {
    f"scalecom-{selector}-{density}": ("scalecom", {**options, "density": density, "beta": 1})
    for selector, options in {
        "chunk": {}, "exact": {"selector": "exact"},
    }.items()
    for density in (0.001, 0.3, 1.0)
}  # fmt: skip
VARIANTS = {
    "topk-bucket": ("topk", {"scope": "bucket"}),
    "topk-model": ("topk", {"scope": "model", "bits": 32}),
    "random_k-gather": ("random_k", {"exchange": "gather", "beta": 1}),
    "random_k-gather-bucket": ("random_k", {"exchange": "gather", "scope": "bucket", "beta": 1}),
    "random_block-gather": ("random_block", {"exchange": "gather", "beta": 1}),
    "random_block-model": ("random_block", {"scope": "model", "beta": 1}),
    "scalecom-exact": ("scalecom", {"selector": "exact"}),
    "scalecom-float16": ("scalecom", {"bits": 16}),
    "scalecom-bucket": ("scalecom", {"scope": "bucket", "beta": 1}),
    "arctopk-bucket": ("arctopk", {"block": 8, "bits": 32, "beta": 1}),
}
FEEDBACK |= {key: case for key, case in VARIANTS.items() if "scalecom" not in key}
FEEDBACK |= {
    f"arctopk-{density}": (
        "arctopk",
        {"density": density, "block": 32, "bits": 32, "beta": 1, "scope": "tensor"},
    )
    for density in (0.001, 0.3, 1.0)
}
FEEDBACK["sketchsgd"] = ("sketchsgd", {"density": 0.01, "momentum": 0.0})
FEEDBACK |= {
    f"{recipe}-{density}": (recipe, {"density": density})
    for recipe in ("gtopk", "sparcml")
    for density in (0.001, 0.3, 1.0)
}
SCHEMES = {name: (name, {}) for name in [*GATHER_RECIPES, *SHARED_RECIPES]} | VARIANTS
SCHEMES |= {
    "threshold": ("hard_threshold", {"threshold": 1.0}),
    "strom-quanta": ("strom", {"threshold": 0.3, "quanta": 4}),
    "auto": ("auto", {"ratio": 10, "every": 2}),
    "dgc": ("dgc", {"density": 0.01}),
    "dgc-options": (
        "dgc",
        {"density": 0.05, "bits": 6, "nesterov": True, "masking": False, "max_norm": 1.0},
    ),
    "powersgd": ("powersgd", {}),
    "powersgd-1": ("powersgd", {"rank": 1, "seed": 3}),
    "gtopk": ("gtopk", {}),
    "gtopk-many": ("gtopk", {"density": 0.5}),
    "sparcml": ("sparcml", {}),
    "sparcml-many": ("sparcml", {"density": 0.5}),
    "sketchsgd": ("sketchsgd", {"density": 0.01}),
    "sketchsgd-options": (
        "sketchsgd",
        {"density": 0.02, "momentum": 0.5, "masking": False, "rows": 3, "candidates": 2},
    ),
    "threshold-calibrated": ("hard_threshold", {"density": 0.1, "calibrate_steps": 3}),
}
TENSORS = [[Tensor("a", (40, 50)), Tensor("b", (3,))], [Tensor("c", (7, 11, 13))]]
SIZES = [[2000, 3], [1001]]


def _may_forget(recipe):
    sends_all = recipe == "powersgd"  # of a vector
    return recipe == "bf16" or ("error_feedback" in RECIPES[recipe].options and not sends_all)


def _scheme(key):
    recipe, options = SCHEMES.get(key, (key, {}))
    return get_scheme(recipe, **options)


def _engines(scheme, ranks=2):
    return _engines_of(scheme, TENSORS, ranks)


def _engines_of(scheme, tensors, ranks):
    buckets = [Bucket(tuple(group), always(scheme)) for group in tensors]
    return [Engine(buckets, rank, ranks) for rank in range(ranks)]


def _grads(rng, ranks=2):
    return [
        [[rng.standard_normal(n).astype(np.float32) for n in bucket] for bucket in SIZES]
        for _ in range(ranks)
    ]


def _run(engines, grads, seed=0):
    exchange_once(engines, grads, random.Random(seed))
    sums = [[engine.sums(bucket) for bucket in range(2)] for engine in engines]
    for engine in engines:
        engine.settle()
    return sums


def _bytes(sums):
    return [[array.tobytes() for array in bucket] for bucket in sums]


@pytest.mark.parametrize("key", FEEDBACK)
def test_what_is_sent_and_what_is_left_make_up_the_gradients(key):
    recipe, options = FEEDBACK[key]
    gradients = np.random.default_rng(0).standard_normal((20, 3, 1500)).astype(np.float32)
    total = np.zeros(1500)
    for step in simulate(recipe, gradients, **options):
        total += step.average
    owed = gradients.astype(np.float64).sum(0).mean(0)
    np.testing.assert_allclose(total + step.residual.mean(0), owed, atol=2e-4)


@pytest.mark.parametrize(
    "key", [key for key in SCHEMES if _may_forget(SCHEMES[key][0]) and key != "signum"]
)
def test_one_step_with_feedback_is_one_step_without(key):
    recipe, options = SCHEMES[key]
    gradients = np.random.default_rng(1).standard_normal((1, 2, 3000)).astype(np.float32)
    with_feedback = next(simulate(recipe, gradients, **options))
    has_feedback = RECIPES[recipe].options.get("error_feedback", False)
    off = {"error_feedback": False} if has_feedback else {}
    without = next(simulate(recipe, gradients, **options, **off))
    assert with_feedback.average.tobytes() == without.average.tobytes()
    if off:
        assert not without.residual.any()
        assert with_feedback.residual.any()


def test_without_feedback_a_small_coordinate_never_moves():
    gradients = np.tile(np.array([1.0, 0.5] + [0.0] * 30, np.float32), (40, 1, 1))
    options = {"density": 1 / 32}
    moved = {
        feedback: sum(
            s.average for s in simulate("topk", gradients, error_feedback=feedback, **options)
        )
        for feedback in (True, False)
    }
    assert moved[False][1] == 0
    assert moved[True][1] == pytest.approx(20, abs=2)


@pytest.mark.parametrize("key", ["fp16", *SCHEMES])
def test_ranks_agree_bit_for_bit_whatever_their_order(key):
    engines = _engines(_scheme(key), ranks=3)
    rng = np.random.default_rng(2)
    for step in range(5):
        sums = _run(engines, _grads(rng, 3), seed=step)
        assert all(_bytes(other) == _bytes(sums[0]) for other in sums)


@each("bad", [np.nan, np.inf])
@each("where", ["a", "c", "dense"])
@pytest.mark.parametrize("key", ["fp16", *SCHEMES])
def test_a_bad_step_vanishes_on_all_ranks(key, where, bad):
    engines = _engines(_scheme(key))
    rng = np.random.default_rng(3)
    for _ in range(3):
        _run(engines, _grads(rng))
    before = [engine.state_dict()["state"] for engine in engines]
    grads = _grads(rng)
    if where == "a":
        grads[1][0][0][17] = bad
    elif where == "c":
        grads[1][1][0][17] = bad
    else:
        for engine in engines:
            engine.observe(False)
    sums = _run(engines, grads)
    if where == "c":
        assert all(np.isnan(rank_sums[1][0]).any() for rank_sums in sums)
    for engine, state in zip(engines, before, strict=True):
        after = engine.state_dict()["state"]
        assert after.keys() == state.keys()
        for kind in state:
            for name, array in state[kind].items():
                assert after[kind][name].tobytes() == array.tobytes()
        assert engine.costs.skipped_steps == 1
    assert all(
        np.isfinite(total).all() for bucket in _run(engines, _grads(rng))[0] for total in bucket
    )


def test_a_sum_that_overflows_is_a_bad_step():
    gradients = np.full((1, 2, 5000), 3e38, np.float32)
    gradients[0, :, 1000:] = 1.0
    engines = _engines_of(get_scheme("topk", density=0.5), [[Tensor("g", (5000,))]], 2)
    with np.errstate(over="ignore"):
        exchange_once(engines, [[[g]] for g in gradients[0]], random.Random(0))
    for engine in engines:
        engine.settle()
        assert engine.costs.skipped_steps == 1
        assert not engine.residual("g").any()


def test_fp16_saturates_instead_of_overflowing():
    gradients = np.full((1, 3, 2000), 60000, np.float32)
    average = next(simulate("fp16", gradients)).average
    assert np.isfinite(average).all()
    assert average[0] == pytest.approx(65504 / 3, rel=1e-3)
    small = next(simulate("fp16", np.full((1, 3, 2000), 1.5, np.float32))).average
    assert (small == 1.5).all()


@pytest.mark.parametrize("key", SCHEMES)
def test_a_resumed_run_equals_an_uninterrupted_one(key):
    scheme = _scheme(key)
    straight, resumed = _engines(scheme), _engines(scheme)
    for half in range(2):
        rng = np.random.default_rng(10 + half)
        for _ in range(4):
            sums = _run(straight, _grads(rng))
        rng = np.random.default_rng(10 + half)
        if half:
            saved = [engine.state_dict() for engine in resumed]
            resumed = _engines(scheme)
            for engine, state in zip(resumed, saved, strict=True):
                engine.load_state_dict(state)
                assert engine.step == 4
        for _ in range(4):
            again = _run(resumed, _grads(rng))
        assert _bytes(again[0]) == _bytes(sums[0])


@pytest.mark.parametrize("recipe", ["topk", "fft", "random_k", "scalecom"])
def test_a_state_does_not_depend_on_how_tensors_lie_in_buckets(recipe):
    scheme = get_scheme(recipe)
    [straight] = _engines(scheme, ranks=1)
    rng = np.random.default_rng(11)
    for _ in range(3):
        _run([straight], _grads(rng, 1))
    (a, b), (c,) = TENSORS
    [resumed] = _engines_of(scheme, [[a], [b, c]], 1)
    resumed.load_state_dict(straight.state_dict())
    [[[grad_a, grad_b], [grad_c]]] = _grads(rng, 1)
    exchange_once([straight], [[[grad_a, grad_b], [grad_c]]], random.Random(0))
    exchange_once([resumed], [[[grad_a], [grad_b, grad_c]]], random.Random(0))
    expected = [*straight.sums(0), *straight.sums(1)]
    actual = [*resumed.sums(0), *resumed.sums(1)]
    assert [x.tobytes() for x in actual] == [x.tobytes() for x in expected]


def test_tensors_of_one_scope_compete_for_one_k():
    """The largest of all, wherever they lie: 1 % of 4000 elements are 40."""
    tensors = [[Tensor("small", (2000,)), Tensor("large", (40, 50))]]
    small = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    grads = [[[small, 100 + small]]]
    sent = {}
    for scope in ("tensor", "bucket", "model"):
        scheme = get_scheme("topk", density=0.01, bits=32, scope=scope)
        [engine] = _engines_of(scheme, tensors, 1)
        exchange_once([engine], grads, random.Random(0))
        sent[scope] = [np.count_nonzero(total) for total in engine.sums(0)]
    assert sent == {"tensor": [20, 20], "bucket": [0, 40], "model": [0, 40]}


WITH_STATE = [key for key in SCHEMES if getattr(_scheme(key), "error_feedback", True)]


@pytest.mark.parametrize("key", WITH_STATE)
def test_a_frozen_tensor_sends_zeros_and_keeps_its_residual(key):
    engines = _engines(_scheme(key))
    rng = np.random.default_rng(12)
    for _ in range(3):
        _run(engines, _grads(rng))
    before = [engine.residual("b").tobytes() for engine in engines]
    others = [engine.residual("a").tobytes() for engine in engines]
    grads = _grads(rng)
    for rank in grads:
        rank[0][1] = None
    sums = _run(engines, grads)
    assert not any(rank_sums[0][1].any() for rank_sums in sums)
    assert [engine.residual("b").tobytes() for engine in engines] == before
    assert [engine.residual("a").tobytes() for engine in engines] != others


@pytest.mark.parametrize("recipe", ["signsgd", "dgc", "sketchsgd"])
def test_no_alarm_for_what_has_no_residual_or_is_a_momentums(recipe):
    """Signs of fading gradients, and residuals of velocities that grow to 1 / (1 - momentum)."""
    buckets = [Bucket(tuple(group), make_policy(recipe)) for group in TENSORS]
    engine, grads = Engine(buckets, 0, 1), _grads(np.random.default_rng(3), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(54 * 6):
            fading = np.float32(0.99**step if recipe == "signsgd" else 1)
            _run([engine], [[[fading * g for g in bucket] for bucket in rank] for rank in grads])


def test_a_scope_keeps_the_state_of_the_tensors():
    """A run may go on in another scope: residuals are those of elements."""
    rng = np.random.default_rng(13)
    [one] = _engines(get_scheme("topk", scope="bucket"), ranks=1)
    [other] = _engines(get_scheme("topk"), ranks=1)
    _run([one], _grads(rng, 1))
    other.load_state_dict(one.state_dict())
    for name in "abc":
        assert other.residual(name).tobytes() == one.residual(name).tobytes()


def test_fp16_reports_its_rounding_error():
    [engine] = _engines_of(get_scheme("fp16"), [[Tensor("g", (2000,)), Tensor("f", (3,))]], 1)
    grad = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    exchange_once([engine], [[[grad, None]]], random.Random(0))
    engine.settle()
    error = np.linalg.norm(grad - grad.astype(np.float16).astype(np.float32).astype(np.float64))
    expected = error / np.linalg.norm(grad.astype(np.float64))
    assert engine.costs.relative_error == pytest.approx(expected, rel=1e-5)


def test_fp16_tells_a_loss_scaler_of_saturation():
    engines = _engines_of(get_scheme("fp16"), [[Tensor("g", (2000,))]], 2)
    for scale, skipped in ((1.0, 0), (1024.0, 1)):
        for engine in engines:
            engine.follow_loss_scale(scale)
        grads = [[[np.full(2000, 60000, np.float32)]]] * 2
        exchange_once(engines, grads, random.Random(0))
        assert np.isnan(engines[0].sums(0)[0]).all() == bool(skipped)
        for engine in engines:
            engine.settle()
            assert engine.costs.skipped_steps == skipped


def test_residuals_handed_out_are_copies():
    for key in ("topk", "fft", "scalecom", "topk-bucket"):
        engine = _engines(_scheme(key), ranks=1)[0]
        _run([engine], _grads(np.random.default_rng(0), 1))
        before = engine.residual("a").copy()
        engine.residual("a")[:] = 0
        assert before.any()
        assert engine.residual("a").tobytes() == before.tobytes()


@pytest.mark.parametrize("recipe", ["topk", "fft", "random_block", "scalecom"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:16], r"of shape \[16\], expected .* was the file cut"),
        (lambda x: x.real.astype(np.float16), "float16"),
        (lambda x: x.astype(np.result_type(x, np.float64)), "128|float64"),
    ],
)
def test_residuals_that_do_not_fit_are_refused(recipe, change, message):
    engine = _engines(get_scheme(recipe), ranks=1)[0]
    _run([engine], _grads(np.random.default_rng(0), 1))
    saved, before = engine.state_dict(), engine.residual("a")
    saved["state"]["residual"]["a"] = change(saved["state"]["residual"]["a"])
    with pytest.raises(ValueError, match=f"the residual of 'a' is .*({message})"):
        engine.load_state_dict(saved)
    assert engine.residual("a").tobytes() == before.tobytes()
    grads, context = _grads(np.random.default_rng(0))[0][0], Context(1, 0, 1)
    tensors, state = engine.buckets[0].tensors, saved["state"]
    with pytest.raises(ValueError, match="the residual is"):
        next(engine.scheme(0).exchange(tensors, grads, state, context))


def test_state_of_another_model_is_refused():
    engine = _engines(get_scheme("topk"))[0]
    saved = engine.state_dict()
    with pytest.raises(ValueError, match=r"unknown tensors.*other"):
        engine.load_state_dict(saved | {"state": {"residual": {"other": np.zeros(3)}}})
    with pytest.raises(ValueError, match=r"rank 1 of 4, but this is rank 0 of 2"):
        engine.load_state_dict(saved | {"rank": 1, "world_size": 4})
    other = _engines(get_scheme("fft"), ranks=1)[0]
    _run([other], _grads(np.random.default_rng(0), 1))
    with pytest.raises(
        ValueError,
        match=r"state of 'a' at step 1 is a residual .* by BlockFFT.*expected .* by Identity",
    ):
        engine.load_state_dict(other.state_dict() | {"world_size": 2})
    with pytest.raises(ValueError, match="version"):
        engine.load_state_dict({"version": 99})
    with pytest.raises(ValueError, match="no bucket"):
        engine.residual("other")


def test_gradients_are_left_alone():
    for key in ("fp16", *SCHEMES):
        engines = _engines(_scheme(key))
        grads = _grads(np.random.default_rng(4))
        before = [[array.tobytes() for bucket in rank for array in bucket] for rank in grads]
        for _ in range(2):
            _run(engines, grads)
        assert before == [
            [array.tobytes() for bucket in rank for array in bucket] for rank in grads
        ]


def test_relative_error_is_that_of_the_measured_step():
    gradients = np.random.default_rng(5).standard_normal((1, 1, 4096)).astype(np.float32)
    engine = _engines_of(get_scheme("fft", density=0.2), [[Tensor("g", (4096,))]], 1)[0]
    exchange_once([engine], [[[gradients[0, 0]]]], random.Random(0))
    sent = engine.sums(0)[0]
    engine.settle()
    error = np.linalg.norm(gradients - sent) / np.linalg.norm(gradients)
    assert engine.costs.relative_error == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize("recipe", list_compressors())
def test_bytes_sent_are_the_bytes_predicted(recipe):
    engine = _engines(get_scheme(recipe), ranks=1)[0]
    engine.step = 5  # a usual one
    _run([engine], _grads(np.random.default_rng(7), ranks=1))
    tensors = [tensor for bucket in TENSORS for tensor in bucket]
    scheme = get_scheme(recipe)
    if recipe not in ADAPTIVE_RECIPES:
        # Offsets of a bucket take whole words, of which a tensor fills what it needs.
        rounded = 4 * len(tensors) if recipe == "scalecom" else 0
        if isinstance(scheme, BucketScope):
            tensors = [
                Tensor("joined", (sum(math.prod(t.shape) for t in bucket),)) for bucket in TENSORS
            ]
        predicted = sum(scheme.sent_nbytes(t) for t in tensors)
        assert abs(engine.costs.sent_nbytes - predicted) <= rounded
    assert engine.costs.collectives == len(TENSORS) * len(scheme.rounds)


def test_a_bucket_starts_once_a_step():
    engine = _engines(get_scheme("topk"), ranks=1)[0]
    engine.resume(1, [np.ones(1001, np.float32)])
    with pytest.raises(ValueError, match="already"):
        engine.resume(1, [np.ones(1001, np.float32)])
    with pytest.raises(ValueError, match="under way"):
        engine.settle()
    engine.abandon()
    engine.settle()


@pytest.mark.parametrize(
    ("recipe", "options", "distance"),
    [("none", {}, 1e-3)]
    + [(name, {"density": 0.1}, 2e-2) for name in ("topk", "fft", "dct")]
    + [(name, {"density": 0.3}, 2e-2) for name in SHARED_RECIPES],
)
def test_compressed_descent_reaches_the_optimum_of_a_convex_problem(recipe, options, distance):
    rng = np.random.default_rng(6)
    matrix, best = rng.standard_normal((2, 300, 100)) / 10, rng.standard_normal(100)
    target = matrix @ best  # all ranks share the optimum, so no noise keeps them from it
    weights = np.zeros(100, np.float32)

    def gradients():
        for _ in range(600):
            yield np.stack([m.T @ (m @ weights - t) for m, t in zip(matrix, target, strict=True)])

    for step in simulate(recipe, gradients(), **options):
        weights -= np.float32(0.05) * step.average
    assert np.linalg.norm(weights - best) <= distance * np.linalg.norm(best)
