"""The collectives that a recipe declares are those that its exchanges consist of, at every step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes import Round, Tensor
from horovod_fftcomp.schemes.auto import TRIAL_STEPS
from horovod_fftcomp.simulation import exchange_once

TENSORS = (Tensor("a", (40, 30)), Tensor("b", (50, 40)))
EVERY = TRIAL_STEPS + 3


class Observed(Engine):
    """An engine that notes the collectives in which its rank takes part, of each step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = []

    def resume(self, bucket, data):
        if isinstance(data, list):  # gradients
            self.seen.append([])
        made = super().resume(bucket, data)
        if isinstance(made, Round):
            self.seen[-1].append(made.collective if made.among != () else None)
        return made


def yielded(policy, n_steps, state=None):
    """Return the lists of collectives of ``n_steps`` steps of two ranks, and a rank's state."""
    engines = [Observed([Bucket(TENSORS, policy)], rank, 2) for rank in range(2)]
    for rank, engine in enumerate(engines):
        if state is not None:
            engine.load_state_dict({**state, "rank": rank})
    draw = np.random.default_rng(0).standard_normal
    for _ in range(n_steps):
        grads = [
            [[draw(tensor.shape).astype(np.float32).reshape(-1) for tensor in TENSORS]]
            for _ in engines
        ]
        exchange_once(engines, grads, random.Random(0))
        for engine in engines:
            engine.settle()
    seen = {  # a round in which a rank has no part is another one's
        tuple(a or b for a, b in zip(*step, strict=True))
        for step in zip(*(engine.seen for engine in engines), strict=True)
    }
    return seen, engines[0].state_dict()


def warms(recipe):
    """Return whether a recipe may have dense steps first."""
    return not get_scheme(recipe).traits.sends_signs


def make(recipe, **keywords):
    """Return a policy of a recipe that does all that it may do in ``EVERY`` steps."""
    return make_policy(recipe, **({"every": EVERY} if recipe == "auto" else {}), **keywords)


@pytest.mark.parametrize(
    ("recipe", "warmup_steps"),
    [(name, n) for name in RECIPES for n in (0, 3) if not n or warms(name)],
)
def test_a_policy_declares_exactly_the_rounds_of_its_steps(recipe, warmup_steps):
    policy = make(recipe, warmup_steps=warmup_steps)
    seen, _ = yielded(policy, warmup_steps + 2 * EVERY)
    assert policy.possible_rounds() == seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_so_does_one_between_nodes(recipe):
    try:
        policy = make(recipe, warmup_steps=2 if warms(recipe) else 0, ranks_per_node=2)
    except UnsupportedError:
        pytest.skip("not for nodes")
    engines = [Observed([Bucket(TENSORS, policy)], rank, 4) for rank in range(4)]
    for step in range(2 + EVERY):
        grads = [
            [[np.random.default_rng((step, r)).random(1200, np.float32),
              np.random.default_rng((step, r)).random(2000, np.float32)]]
            for r in range(4)
        ]  # fmt: skip
        exchange_once(engines, grads, random.Random(0))
        for engine in engines:
            engine.settle()
    seen = {
        tuple(next(c for c in each if c) for each in zip(*step, strict=True))
        for step in zip(*(engine.seen for engine in engines), strict=True)
    }
    assert policy.possible_rounds() == seen


def test_densities_do_not_change_the_rounds():
    plain = make_policy("gtopk", warmup_steps=3)
    scheduled = make_policy("gtopk", warmup_steps=3, density_schedule={0: 0.5, 4: 0.01})
    assert plain.possible_rounds() == scheduled.possible_rounds() == yielded(scheduled, 10)[0]
