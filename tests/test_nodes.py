"""Two levels: sums within nodes, compressed exchange between them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from horovod_fftcomp import UnsupportedError, get_scheme, simulate
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.schemes.hierarchical import NodeLayout
from horovod_fftcomp.simulation import exchange_once
from tests import payloads
from tests.loops import each

OPTIONS = {**payloads.TOGETHER, **{name: {} for name in payloads.EACH}}
OPTIONS |= {name: {**OPTIONS[name], "momentum": 0.0} for name in ("dgc", "sketchsgd")}
SCHEMES = {name: get_scheme(name, **OPTIONS[name]) for name in OPTIONS}
REFUSED = [n for n, s in SCHEMES.items() if s.traits.momentum or not s.traits.fits_differences]
SERVED = [name for name in OPTIONS if name not in REFUSED]
SHAPE = (40, 50)


def gradients(ranks, steps=6, seed=0):
    """Return float32 ``[steps, ranks, 2000]`` whose sums of few are exact in any order."""
    numbers = np.random.default_rng(seed).integers(-512, 512, (steps, ranks, 2000))
    return (numbers / 64).astype(np.float32)


def engines(ranks, ranks_per_node, recipe="topk", names=("a",), **options):
    policy = make_policy(recipe, ranks_per_node=ranks_per_node, **options)
    buckets = [Bucket((Tensor(name, SHAPE),), policy) for name in names]
    return [Engine(buckets, rank, ranks) for rank in range(ranks)]


def step(those, grads):
    """Run a step; return the sums of each bucket, which all ranks have alike."""
    exchange_once(those, [[[g] for g in grad] for grad in grads], random.Random(0))
    found = [[engine.sums(number)[0].copy() for number in range(len(grads[0]))] for engine in those]
    for sums in found[1:]:
        assert [total.tobytes() for total in sums] == [total.tobytes() for total in found[0]]
    for engine in those:
        engine.settle()
    return found[0]


@pytest.mark.parametrize("recipe", SERVED)
@pytest.mark.parametrize("ranks_per_node", [2, 3])
def test_a_recipe_takes_nodes_for_ranks(recipe, ranks_per_node):
    options, grads = OPTIONS[recipe], gradients(2 * ranks_per_node)
    sums_of_nodes = grads.reshape(6, 2, ranks_per_node, -1).sum(2)
    found = simulate(recipe, grads, ranks_per_node=ranks_per_node, **options)
    for ours, flat in zip(found, simulate(recipe, sums_of_nodes, **options), strict=True):
        total, expected = (
            s.average.astype(np.float64) * n for s, n in ((ours, 2 * ranks_per_node), (flat, 2))
        )
        np.testing.assert_allclose(total, expected, rtol=2e-7)
        if ranks_per_node == 2:
            assert ours.average.tobytes() == (flat.average / np.float32(2)).tobytes()
        leaders = [rank for rank, sent in enumerate(ours.sent_bytes) if sent]
        assert [ours.sent_bytes[rank] for rank in leaders] == flat.sent_bytes
        assert [ours.received_bytes[rank] for rank in leaders] == flat.received_bytes
        assert ours.residual[leaders].tobytes() == flat.residual.tobytes()
        assert not np.delete(ours.residual, leaders, 0).any()


@each("ranks, ranks_per_node", [(5, 2), (5, 3), (7, 4), (4, 3)])
@each("recipe", ["topk", "random_block", "gtopk", "sparcml"])
def test_nothing_is_lost_where_the_last_node_is_smaller(recipe, ranks, ranks_per_node):
    grads, arrived = gradients(ranks), np.zeros(2000)
    for found in simulate(recipe, grads, ranks_per_node=ranks_per_node, beta=1.0):
        arrived += found.average.astype(np.float64) * ranks
    left = found.residual.sum(0, dtype=np.float64)
    np.testing.assert_allclose(arrived + left, grads.sum((0, 1)), rtol=0, atol=1e-4)


def test_within_one_node_nothing_is_compressed():
    grads = gradients(3)
    for found, grad in zip(simulate("topk", grads, ranks_per_node=4), grads, strict=True):
        assert found.average.tobytes() == (grad.sum(0) / np.float32(3)).tobytes()
        assert found.sent_bytes == [0, 0, 0]
        assert not found.residual.any()


def test_buckets_have_leaders_of_their_own_and_groups_are_told_once():
    names = [f"layer{number}" for number in range(12)]
    those = engines(6, 3, names=names)
    step(those, [[g] * 12 for g in gradients(6)[0]])
    sent = [engine.costs.sent_nbytes for engine in those]
    assert min(sent) > 0
    assert sent[:3] == sent[3:]  # by the leaders of the same buckets
    one = engines(2, 2)[0].buckets[0].policy.at(0).sent_nbytes(Tensor("a", SHAPE))
    assert sum(sent) == 2 * 12 * one
    inside = [engine.costs.inside_nbytes for engine in those]
    assert sum(inside) == 12 * (6 * 8000 + 2 * 8000)
    layout = NodeLayout(3, 7)
    assert list(layout.groups()) == [(0, 1, 2), (3, 4, 5), (0, 3, 6)]
    assert list(NodeLayout(4, 3).groups()) == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("recipe", "bad"),
    [*(("topk", rank) for rank in range(4)), *zip(SERVED, [0, 1, 2, 3] * 9, strict=False)],
)
def test_a_bad_value_on_any_rank_is_a_step_that_never_was(recipe, bad):
    those = engines(4, 2, recipe, **OPTIONS[recipe])
    grads = gradients(4)
    step(those, grads[0][:, None])
    before = [engine.residual("a").tobytes() for engine in those]
    broken = grads[1].copy()
    broken[bad, 7] = np.nan
    step(those, broken[:, None])
    assert [engine.costs.skipped_steps for engine in those] == [1] * 4
    assert [engine.residual("a").tobytes() for engine in those] == before


def test_a_sum_within_a_node_that_overflows_is_a_step_that_never_was():
    those = engines(4, 2)
    grads = np.full((4, 1, 2000), 3e38, np.float32)
    step(those, grads)
    assert [engine.costs.skipped_steps for engine in those] == [1] * 4
    alone = engines(2, 2)
    step(alone, grads[:2])
    assert [engine.costs.skipped_steps for engine in alone] == [1, 1]


def test_a_tensor_that_is_frozen_everywhere_keeps_its_residual():
    those, grads = engines(4, 2), gradients(4)
    step(those, grads[0][:, None])
    before = [engine.residual("a").tobytes() for engine in those]
    [total] = step(those, [[None]] * 4)
    assert not total.any()
    assert [engine.residual("a").tobytes() for engine in those] == before


def test_a_gradient_counts_where_the_leaders_is_frozen():
    those = engines(4, 2, density=1.0, bits=32)
    leaders = NodeLayout(2, 4).leaders([Tensor("a", SHAPE)])
    grads = gradients(4)[0]
    [total] = step(those, [[None if rank in leaders else grads[rank]] for rank in range(4)])
    rest = [rank for rank in range(4) if rank not in leaders]
    assert total.tobytes() == grads[rest].sum(0).tobytes()


@each("then", [(2, 1), (4, 1), (4, 2), (6, 3), (6, 2)])
@each("before", [(4, 2), (4, 1), (3, 1)])
@each("recipe", ["topk", "fft", "gtopk"])
def test_residuals_survive_other_numbers_of_ranks_and_nodes(recipe, before, then):
    old, grads = engines(*before, recipe), gradients(before[0], 3)
    for grad in grads:
        step(old, grad[:, None])
    mass = sum(engine.residual("a").astype(np.float64) for engine in old)
    saved = checkpoint.gathered([engine.state_dict() for engine in old])
    new, zeros = engines(*then, recipe), np.zeros((then[0], 1, 2000), np.float32)
    for engine in new:
        engine.load_state_dict(checkpoint.part_of(saved, engine.rank, engine.world_size))
    [total] = step(new, zeros)
    left = sum(engine.residual("a").astype(np.float64) for engine in new)
    np.testing.assert_allclose(total.reshape(SHAPE) + left, mass, rtol=0, atol=1e-4)


def test_what_leaders_alone_know_is_found_again():
    names = ("a", "b", "c", "d")
    straight, saved_by = engines(4, 2, "powersgd", names), engines(4, 2, "powersgd", names)
    steps = [[[g] * 4 for g in grad] for grad in gradients(4, 4)]
    leaders = {NodeLayout(2, 4).leaders([Tensor(name, SHAPE)]) for name in names}
    assert len(leaders) == 2
    for grads in steps[:2]:
        step(straight, grads)
        step(saved_by, grads)
    saved = checkpoint.gathered([engine.state_dict() for engine in saved_by])
    resumed = engines(4, 2, "powersgd", names)
    for engine in resumed:
        engine.load_state_dict(checkpoint.part_of(saved, engine.rank, 4))
    for grads in steps[2:]:
        expected, found = step(straight, grads), step(resumed, grads)
        assert [f.tobytes() for f in found] == [e.tobytes() for e in expected]


def test_recipes_that_would_do_something_else_on_one_node_are_refused():
    assert sorted(REFUSED) == ["demo", "signsgd", "signum"]
    for recipe in [*REFUSED, "dgc", "sketchsgd"]:
        with pytest.raises(
            UnsupportedError,
            match="their own momentum",
        ):
            make_policy(recipe, ranks_per_node=2)


@pytest.mark.parametrize("recipe", ["topk", "dgc"])
def test_a_frozen_tensor_keeps_what_a_rank_owes_that_leads_no_more(recipe):
    options = {"momentum": 0.0} if recipe == "dgc" else {}
    old = engines(4, 1, recipe, **options)
    step(old, gradients(4)[0][:, None])
    saved = checkpoint.gathered([engine.state_dict() for engine in old])
    new = engines(4, 2, recipe, **options)
    for engine in new:
        engine.load_state_dict(checkpoint.part_of(saved, engine.rank, 4))
    before = [engine.residual("a").tobytes() for engine in new]
    [total] = step(new, [[None]] * 4)
    assert not total.any()
    assert [engine.residual("a").tobytes() for engine in new] == before


@pytest.mark.parametrize("ranks_per_node", [0, -1])
def test_what_is_no_number_of_ranks_is_refused(ranks_per_node):
    with pytest.raises(ValueError, match="ranks_per_node must"):
        make_policy("topk", ranks_per_node=ranks_per_node)
    for other in (1.5, "two", True):
        with pytest.raises(TypeError, match="ranks_per_node must"):
            make_policy("topk", ranks_per_node=other)


def test_warm_up_and_schedules_go_through_nodes_as_well():
    policy = make_policy(
        "topk", warmup_steps=2, density_schedule={0: 0.5, 1: 0.1}, ranks_per_node=2
    )
    assert [policy.at(s).scheme.rounds for s in range(3)] == [("allreduce",)] * 2 + [("allgather",)]
    assert policy.density(3) == 0.1
    assert policy.facts()["ranks_per_node"] == 2
