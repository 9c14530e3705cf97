"""An exchange whose result is thrown away: ``discard`` makes it one that never was."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once
from tests.loops import each

TENSORS = (Tensor("a", (64, 48)), Tensor("b", (1500,)))
NEEDED = {"hard_threshold": {"threshold": 0.5}, "strom": {"threshold": 0.5}, "auto": {"ratio": 8}}


def engines_of(recipe, **options):
    policy = make_policy(recipe, **NEEDED.get(recipe, {}), **options)
    policy = policy.decided(TENSORS, 2)
    return [Engine([Bucket(TENSORS, policy)], rank, 2) for rank in range(2)]


def step(engines, seed):
    rng = np.random.default_rng(seed)
    grads = [[[rng.standard_normal(np.prod(t.shape)).astype(np.float32) for t in TENSORS]]
             for _ in engines]  # fmt: skip
    exchange_once(engines, grads, random.Random(0))
    sums = [engine.sums(0) for engine in engines]
    sums = [total.copy() for total in sums[0]]
    for engine in engines:
        engine.settle()
    return sums


def counts(engine):
    return {k: v for k, v in vars(engine.costs).items() if not k.endswith("_s")}


@each("recipe, options", [
    *((recipe, {}) for recipe in RECIPES),
    *((recipe, {"exchange": "sharded"}) for recipe in ("topk", "fft", "signum", "hard_threshold")),
    ("topk", {"warmup_steps": 2, "dense_every": 3}),
    ("auto", {"every": 2}),
])  # fmt: skip
def test_a_discarded_step_never_was(recipe, options):
    plain, other = (engines_of(recipe, **options) for _ in range(2))
    for number in range(5):
        if number in (0, 2, 3):  # the first measures, too
            step(other, 100 + number)
            for engine in other:
                engine.discard()
        wanted, found = step(plain, number), step(other, number)
        assert [a.tobytes() for a in found] == [a.tobytes() for a in wanted]
    for one, another in zip(plain, other, strict=True):
        assert counts(one) == counts(another)
        assert one.alarm.ratios() == another.alarm.ratios()
        assert one.errors == another.errors
        assert one.n_exchanges == another.n_exchanges
        saved, expected = another.state_dict(), one.state_dict()
        assert saved["step"] == expected["step"]
        assert saved["state"].keys() == expected["state"].keys()
        for kind, arrays in expected["state"].items():
            for name, array in arrays.items():
                assert saved["state"][kind][name].tobytes() == array.tobytes()


def test_a_step_is_discarded_once_and_only_before_its_averages_are_used():
    engines = engines_of("topk")
    for engine in engines:
        with pytest.raises(ValueError, match="no exchange to discard"):
            engine.discard()
    step(engines, 0)
    for engine in engines:
        engine.discard()
        with pytest.raises(ValueError, match="no exchange to discard"):
            engine.discard()
    step(engines, 0)
    for engine in engines:
        engine.note_used()
        with pytest.raises(ValueError, match="an optimizer has taken a step"):
            engine.discard()
