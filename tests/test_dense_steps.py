"""Steps that are exchanged uncompressed between compressed ones (``dense_every``)."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from horovod_fftcomp import RECIPES, get_scheme, simulate
from horovod_fftcomp.engine.policy import make_policy, policy_of
from horovod_fftcomp.schemes.uncompressed import Uncompressed
from tests.gpu.steps import make_engines, random_grads, run_step
from tests.loops import each

OPTIONS = {"hard_threshold": {"threshold": 0.5}, "strom": {"threshold": 0.5}}
KEEPING = [
    name
    for name in RECIPES
    if (scheme := get_scheme(name, **OPTIONS.get(name, {}))).traits.compresses
    and not scheme.traits.sends_signs
    and not scheme.traits.momentum
]


def states(engines):
    """Return the state arrays of all ranks."""
    return [engine.state_dict()["state"] for engine in engines]


def same(one, other):
    """Return whether nested dicts have the same arrays, to the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return np.array_equal(one, other)


@each("recipe", KEEPING)
def test_dense_steps_send_this_steps_gradients_and_keep_the_state(recipe):
    rng = np.random.default_rng(1)
    engines = make_engines(None, recipe, dense_every=2, **OPTIONS.get(recipe, {}))
    run_step(engines, random_grads(rng))
    before, grads = states(engines), random_grads(rng)
    sums = run_step(engines, grads)
    assert all(map(same, states(engines), before))
    exact = [sum(parts) for parts in zip(*(chain(*own) for own in grads), strict=True)]
    for found, expected in zip(sums, exact, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * np.abs(expected).max())
    after = run_step(engines, random_grads(rng))  # what was held back comes now
    assert not all(map(same, states(engines), before)) or not any(map(len, before[0].values()))
    assert np.isfinite(after[0]).all()


def test_between_nodes_dense_steps_are_dense():
    grads = np.random.default_rng(3).standard_normal((4, 4, 6000)).astype(np.float32)
    options = {"dense_every": 2, "dense_by": "none", "density": 0.05}
    found = list(simulate("topk", grads, ranks_per_node=2, **options))
    for step in (1, 3):
        np.testing.assert_allclose(found[step].average, grads[step].mean(0), atol=1e-6)
    assert np.count_nonzero(found[2].average) < 1000


def test_trials_of_auto_are_its_compressed_steps():
    """It decides in the same order as without dense steps, whatever lies between."""
    plain, dense = make_policy("auto"), make_policy("auto", warmup_steps=3, dense_every=4)
    steps = [step for step in range(60) if not isinstance(dense.at(step), Uncompressed)]
    found = [dense.at(step) for step in steps if step >= 3]
    assert found == [plain.at(number) for number in range(len(found))]
    assert len(steps) == 3 + 57 - 57 // 4


def test_a_rule_may_leave_dense_steps_out():
    policy = make_policy("topk", dense_every=10)
    inherited = policy_of({"recipe": "fft"}, policy)
    assert (inherited.dense_every, inherited.dense) == (10, policy.dense)
    assert policy_of({"recipe": "signsgd", "dense_every": 0}, policy).dense is None
    with pytest.raises(ValueError, match='"dense_every": 0'):
        policy_of({"recipe": "signsgd"}, policy)
