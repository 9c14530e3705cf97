"""Schedules, warm-up and rules choose schemes by step and by name; state can be dealt out anew."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest

from horovod_fftcomp import get_scheme, schedules, simulate
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.buckets import Bucket, make_buckets
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always, check_rules, make_policy, policy_of
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.simulation import exchange_once


def test_warm_up_is_dense_and_the_schedule_starts_after_it():
    schedule = schedules.Linear(0.5, 0.1, 4)
    policy = make_policy("fft", warmup_steps=3, density_schedule=schedule, bits=8)
    assert [policy.at(step) for step in range(3)] == [Dense("float32")] * 3
    densities = [policy.at(step).codec.sparsifier.density for step in range(3, 9)]
    assert densities == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1])
    assert policy.at(3).codec.quantizer.bits == 8
    assert policy.at(3) is policy.at(3)


def test_a_changed_density_holds_from_then_on():
    policy = make_policy("topk", density=0.01, warmup_steps=2).with_density(0.2)
    assert policy.at(1) == Dense("float32")
    assert policy.at(500) == get_scheme("topk", density=0.2)
    assert policy.density(7) == 0.2


def test_recipes_with_residuals_begin_with_dense_steps(monkeypatch):
    monkeypatch.setattr("horovod_fftcomp.engine.policy.WARMUP_STEPS", 7)
    found = {name: make_policy(name).warmup_steps for name in RECIPES}
    without = "none fp16 bf16 qsgd dither terngrad natural dorefa wangni signsgd signum".split()
    assert found == {name: 0 if name in without else 7 for name in RECIPES}
    assert make_policy("fft", error_feedback=False).warmup_steps == 0
    assert make_policy("qsgd", error_feedback=True).warmup_steps == 7
    assert make_policy("fft", warmup_steps=0).at(0) == get_scheme("fft")
    assert make_policy("fft").at(6) == Dense("float32")
    assert make_policy("fft").at(7) == make_policy("fft").after_warmup == get_scheme("fft")


def test_a_rule_inherits_the_warm_up_only_if_it_was_given(monkeypatch):
    monkeypatch.setattr("horovod_fftcomp.engine.policy.WARMUP_STEPS", 7)

    def of_rule(given, action):
        return policy_of(action, make_policy(**given)).warmup_steps

    assert of_rule({"recipe": "fft", "warmup_steps": 0}, {"recipe": "topk"}) == 0
    assert of_rule({"recipe": "fft", "warmup_steps": 3}, {"bits": 8}) == 3
    assert of_rule({"recipe": "dither"}, {"recipe": "topk"}) == 7
    assert of_rule({"recipe": "dither", "warmup_steps": 0}, {"recipe": "topk"}) == 0
    assert of_rule({"recipe": "topk", "warmup_steps": 7}, {"recipe": "qsgd"}) == 7
    assert of_rule({"recipe": "fft"}, {"recipe": "signsgd"}) == 0


def test_the_usual_warm_up_is_100_steps_and_shown_if_another_is_given():
    code = (
        "from horovod_fftcomp.engine.policy import make_policy as make\n"
        "import json, sys\n"
        "given = [{}, {'warmup_steps': 0}, {'warmup_steps': 100}]\n"
        "found = [make('topk', **each) for each in given]\n"
        "json.dump([[p.warmup_steps, 'warmup' in p.written()] for p in found], sys.stdout)"
    )
    printed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert json.loads(printed.stdout) == [[100, False], [0, True], [100, True]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "topk", "warmup_steps": -1}, "warmup_steps must be a whole number"),
        ({"recipe": "bf16", "density_schedule": 0.5}, "recipe 'bf16' has no density; these have"),
        ({"recipe": "topk", "density": 0.1, "density_schedule": 0.5}, "either density or density_"),
        ({"recipe": "topk", "density_schedule": {5: 0.5}}, "step 0"),
        ({"recipe": "nothing"}, "unknown recipe"),
    ],
)
def test_wrong_policies_are_told_by_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_policy(**arguments)
    with pytest.raises(TypeError, match=r"warmup_steps must be a whole number, got 1\.5"):
        make_policy("topk", warmup_steps=1.5)


def test_simulation_follows_schedule_and_warm_up():
    gradients = np.random.default_rng(0).standard_normal((6, 2, 4000)).astype(np.float32)
    schedule = schedules.Steps({0: 0.1, 2: 0.01})
    steps = list(simulate("topk", gradients, warmup_steps=2, density_schedule=schedule, bits=32))
    sent = [step.sent_bytes[0] for step in steps]
    assert sent[0] == sent[1] == 16000
    assert sent[2] == sent[3] > 5 * sent[4] == 5 * sent[5]
    assert not steps[1].residual.any()
    total = sum(step.average for step in steps) + steps[-1].residual.mean(0)
    np.testing.assert_allclose(total, gradients.sum(0).mean(0), atol=1e-5)


TENSORS = [Tensor("conv1.weight", (64, 32)), Tensor("head.weight", (64, 64)),
           Tensor("emb.weight", (100, 64)), Tensor("head.bias", (2000,))]  # fmt: skip


def _by_name(rules, recipe="topk"):
    buckets = make_buckets(TENSORS, make_policy(recipe), rules)
    return {t.name: bucket.policy.at(0) for bucket in buckets for t in bucket.tensors}


def test_rules_by_pattern_and_predicate():
    rules = [
        ("conv1.*", "dense"),
        ("head.*", 0.25),
        (lambda tensor: tensor.shape[0] == 100, {"recipe": "fft", "bits": 6}),
        ("*", "dense"),
    ]
    assert _by_name(rules) == {
        "head.weight": get_scheme("topk", density=0.25),
        "head.bias": get_scheme("topk", density=0.25),
        "emb.weight": get_scheme("fft", bits=6),
    }
    plain = get_scheme("topk")
    assert _by_name([]) == dict.fromkeys(["conv1.weight", "head.weight", "emb.weight"], plain)
    assert set(_by_name([("emb.*", {"recipe": "none"})])) == {"conv1.weight", "head.weight"}
    assert set(_by_name([("emb.*", {"recipe": "topk"})], recipe="none")) == {"emb.weight"}


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (("conv1.*", "sparse"), ValueError, "'dense', a density or a dict"),
        (("conv1.*", 2.0), ValueError, "lie in"),
        (("conv1.*", {"recipe": "nothing"}), ValueError, "unknown recipe"),
        (("conv1.*", {"theta": 1}), TypeError, "no option theta"),
        ((3, "dense"), TypeError, "pattern or a function"),
        ("conv1.*", TypeError, "a rule is a pair"),
    ],
)
def test_wrong_rules_are_refused_before_training(rule, error, message):
    with pytest.raises(error, match=message):
        check_rules([rule], make_policy("topk"))


def _run(engines, steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        grads = [[[rng.standard_normal(3000).astype(np.float32)]] for _ in engines]
        exchange_once(engines, grads, random.Random(0))
        for engine in engines:
            engine.settle()


def _engines(recipe, ranks):
    bucket = Bucket((Tensor("w", (3000,)),), always(get_scheme(recipe)))
    return [Engine([bucket], rank, ranks) for rank in range(ranks)]


def _mass(engines):
    return sum(engine.residual("w").astype(np.float64) for engine in engines)


@pytest.mark.parametrize("recipe", ["topk", "fft", "dct"])
def test_a_resize_keeps_the_sum_of_the_residuals(recipe):
    engines = _engines(recipe, 4)
    _run(engines, 5, seed=1)
    for ranks in (2, 4, 3, 1, 4):
        before = _mass(engines)
        saved = checkpoint.gathered([engine.state_dict() for engine in engines])
        step = engines[0].step
        engines = _engines(recipe, ranks)
        for engine in engines:
            engine.load_state_dict(saved)
            assert engine.step == step
        assert np.abs(_mass(engines) - before).max() <= 1e-6 * np.abs(before).max()
        _run(engines, 3, seed=ranks)


def test_a_gathered_state_resumes_bit_for_bit():
    straight, first = _engines("fft", 3), _engines("fft", 3)
    _run(straight, 4, seed=7)
    _run(first, 4, seed=7)
    saved = checkpoint.gathered([engine.state_dict() for engine in first])
    second = _engines("fft", 3)
    for engine in second:
        engine.load_state_dict(saved)
    _run(straight, 4, seed=8)
    _run(second, 4, seed=8)
    for a, b in zip(straight, second, strict=True):
        assert a.residual("w").tobytes() == b.residual("w").tobytes()


@pytest.mark.parametrize("bits", [10, 32])
@pytest.mark.parametrize("recipe", ["topk", "fft", "dct"])
def test_mass_is_kept_when_a_density_makes_a_tensor_travel_as_it_is(recipe, bits):
    """At density 1 in float32 nothing is smaller than the tensor itself, transformed or not."""
    gradients = np.random.default_rng(0).standard_normal((8, 2, 1000)).astype(np.float32)
    schedule = schedules.Steps({0: 0.3, 3: 1.0, 5: 0.1})
    total = np.zeros(1000)
    for step in simulate(recipe, gradients, bits=bits, density_schedule=schedule):
        total += step.average
    owed = gradients.astype(np.float64).sum(0).mean(0)
    np.testing.assert_allclose(total + step.residual.mean(0), owed, atol=2e-5)


@pytest.mark.parametrize("recipe", ["topk", "fft", "dct"])
def test_state_follows_the_loss_scale_exactly(recipe):
    plain, scaled = _engines(recipe, 2), _engines(recipe, 2)
    rng = np.random.default_rng(3)
    for step in range(12):
        scale = 2.0 ** [0, 0, 4, 4, -3, 10, 10, 9, 16, 0, 0, -8][step]
        grads = [rng.standard_normal(3000).astype(np.float32) for _ in range(2)]
        for engine in scaled:
            engine.follow_loss_scale(scale)
        exchange_once(plain, [[[g]] for g in grads], random.Random(0))
        exchange_once(scaled, [[[g * np.float32(scale)]] for g in grads], random.Random(0))
        left, right = plain[0].sums(0)[0], scaled[0].sums(0)[0] / np.float32(scale)
        np.testing.assert_allclose(right, left, rtol=1e-6, atol=1e-6)
        for engine in (*plain, *scaled):
            engine.settle()


@pytest.mark.parametrize("recipe", ["none", "topk", "fft", "bf16"])
def test_a_frozen_tensor_sends_zeros_and_keeps_its_residual(recipe):
    engines = _engines(recipe, 2)
    _run(engines, 3, seed=4)
    before = [engine.residual("w").tobytes() for engine in engines]
    exchange_once(engines, [[[None]], [[None]]], random.Random(0))
    for engine, residual in zip(engines, before, strict=True):
        assert not engine.sums(0)[0].any()
        engine.settle()
        assert engine.residual("w").tobytes() == residual


def test_a_residual_that_keeps_growing_is_told_by_name():
    bucket = Bucket((Tensor("w", (20_000,)),), always(get_scheme("topk", density=1e-4)))
    engine = Engine([bucket], 0, 1)
    grad = np.ones(20_000, np.float32)

    def train():
        for _ in range(600):
            exchange_once([engine], [[[grad]]], random.Random(0))
            engine.settle()

    with pytest.warns(RuntimeWarning, match="'w'"):
        train()
    assert engine.alarm.ratios()["w"] > 10


def test_a_policy_is_written_as_it_would_be_given():
    policy = make_policy("fft", bits=8, warmup_steps=3)
    written = "fft(density=0.33, bits=8, block=64, error_feedback=True, warmup_steps=3)"
    assert policy.written() == written
    assert make_policy("fft", **policy.in_force()).facts() == policy.facts()
    assert policy.with_density(0.1).written() == written.replace("0.33", "0.1")
    scheduled = make_policy("wangni", density_schedule={0: 0.5, 9: 0.1}, ranks_per_node=2)
    assert make_policy("wangni", **scheduled.in_force()).facts() == scheduled.facts()
    assert make_policy("none").written() == "none()"
