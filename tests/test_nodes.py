"""Dense sums within nodes, compressed exchange between them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from horovod_fftcomp import UnsupportedError, get_scheme, simulate
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.schemes import Tensor, hierarchical
from horovod_fftcomp.schemes.hierarchical import NodeLayout, node_size_of
from horovod_fftcomp.schemes.parts import Part, node_plan
from horovod_fftcomp.simulation import exchange_once
from horovod_fftcomp.wire.counter_rng import RngKey
from tests import payloads, reference
from tests.loops import each

OPTIONS = {**payloads.TOGETHER, **{name: {} for name in payloads.EACH}}
OPTIONS |= {name: {**OPTIONS[name], "momentum": 0.0} for name in ("dgc", "sketchsgd")}
SCHEMES = {name: get_scheme(name, **OPTIONS[name]) for name in OPTIONS}
REFUSED = [n for n, s in SCHEMES.items() if s.traits.momentum or not s.traits.fits_differences]
SERVED = [name for name in OPTIONS if name not in REFUSED]
SHAPE = (100, 90)
# A node of two cuts the matrix by rows, and the others not.
BUCKET = tuple(map(Tensor, "abcd", [(400, 50), (5000,), (16, 8, 3, 3), (40, 30)]))
ALONE = (Tensor("a", SHAPE),)


def gradients(ranks, steps=6, seed=0, numel=9000):
    """Return float32 ``[steps, ranks, numel]`` whose sums of few are exact in any order."""
    numbers = np.random.default_rng(seed).integers(-512, 512, (steps, ranks, numel))
    return (numbers / 64).astype(np.float32)


def engines(ranks, ranks_per_node, recipe="topk", buckets=(ALONE,), **options):
    policy = make_policy(recipe, ranks_per_node=ranks_per_node, **options)
    made = [Bucket(tensors, policy.decided(tensors, ranks)) for tensors in buckets]
    return [Engine(made, rank, ranks) for rank in range(ranks)]


def step(those, grads):
    """Run a step of a bucket; return its sums, which all ranks have alike."""
    exchange_once(those, [[list(grad)] for grad in grads], random.Random(0))
    found = [[total.copy() for total in engine.sums(0)] for engine in those]
    for sums in found[1:]:
        assert [total.tobytes() for total in sums] == [total.tobytes() for total in found[0]]
    for engine in those:
        engine.settle()
    return found[0]


def drawn(rng, ranks, tensors=BUCKET):
    """Return gradients ``[rank][tensor]`` whose sums depend on the order of additions."""
    return [
        [rng.standard_normal(math.prod(t.shape)).astype(np.float32) for t in tensors]
        for _ in range(ranks)
    ]


def sums_of_nodes(grads, nodes, size):
    """Return each node's sums of every tensor, added in rank order."""
    found = []
    for node in range(nodes):
        first, *others = grads[node * size : (node + 1) * size]
        total = [grad.copy() for grad in first]
        for other in others:
            for mine, its in zip(total, other, strict=True):
                mine += its
        found.append(total)
    return found


def parts_of(share, grads):
    pairs = zip(share.numbers, share.parts, strict=True)
    return [grads[number][part.begin : part.end] for number, part in pairs]


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("recipe", ["topk", "bf16", "onebit", "efsignsgd", "qsgd", "natural"])
def test_sums_and_residuals_are_those_of_the_reference_codec(recipe, nodes):
    """Node sums in rank order, each share's parts encoded one by one, payloads summed, gathered."""
    those, plan = engines(2 * nodes, 2, recipe, [BUCKET]), node_plan(BUCKET, 2)
    scheme, rng = get_scheme(recipe), np.random.default_rng(1)
    residuals = [[{} for _ in range(nodes)] for _ in plan.shares]
    for number in range(4):
        grads = drawn(rng, 2 * nodes)
        found = step(those, grads)
        within = sums_of_nodes(grads, nodes, 2)
        expected = [np.empty(numel, np.float32) for numel in plan.numels]
        for share, kept in zip(plan.shares, residuals, strict=True):
            own = [parts_of(share, sums) for sums in within]
            for at, (place, part) in enumerate(zip(share.numbers, share.parts, strict=True)):
                total = _encoded(scheme, part.tensor, [g[at] for g in own], kept, number)
                expected[place][part.begin : part.end] = total.reshape(-1)
        for total, sums in zip(found, expected, strict=True):
            assert total.tobytes() == sums.tobytes()
        for rank, engine in enumerate(those):
            kept, state = residuals[rank % 2][rank // 2], engine.state_dict()["state"]
            own = {name: array.tobytes() for name, array in kept.items()}
            have = {name: array.tobytes() for name, array in state.get("residual", {}).items()}
            assert have == own


def _encoded(scheme, tensor, grads, residuals, number):
    """Return the sum of all nodes' payloads of a part; update their residuals."""
    codec, sent = scheme.codec, []
    for node, grad in enumerate(grads):
        old = residuals[node].get(tensor.name)
        coeffs = codec.coeffs_of(grad.copy(), tensor.shape, reference, old)
        made = codec.encode_coeffs(
            coeffs,
            tensor.shape,
            kernels=reference,
            keep_residual=scheme.error_feedback,
            rng_key=RngKey(number, tensor.name, node),
        )
        sent.append(made.payload)
        if made.residual is not None:
            residuals[node][tensor.name] = made.residual.copy()
    return codec.decode_sum(sent, reference)


@pytest.mark.parametrize(("nodes", "size"), [(2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, OPTIONS[recipe]) for recipe in SERVED),
        *((recipe, {"exchange": "sharded"}) for recipe in ("topk", "fft", "qsgd")),
        ("topk", {"scope": "bucket"}),
    ],
    ids=str,
)
def test_each_share_is_exchanged_as_between_so_many_ranks(recipe, options, nodes, size):
    """Sums, state, bytes and choices are those of ranks that have the shares alone."""
    those = engines(nodes * size, size, recipe, [BUCKET], **options)
    plan, rng = node_plan(BUCKET, size), np.random.default_rng(2)
    assert all(share.tensors for share in plan.shares)
    policy = make_policy(recipe, **options)
    flat = [
        [Engine([Bucket(share.tensors, policy)], node, nodes) for node in range(nodes)]
        for share in plan.shares
    ]
    for _ in range(5):
        grads = drawn(rng, nodes * size)
        found, within = step(those, grads), sums_of_nodes(grads, nodes, size)
        expected = [np.empty(numel, np.float32) for numel in plan.numels]
        for share, ranks in zip(plan.shares, flat, strict=True):
            sums = step(ranks, [parts_of(share, own) for own in within])
            for number, part, total in zip(share.numbers, share.parts, sums, strict=True):
                expected[number][part.begin : part.end] = total
        assert [t.tobytes() for t in found] == [t.tobytes() for t in expected]
    for rank, engine in enumerate(those):
        alone = flat[rank % size][rank // size]
        assert _bytes_of(engine) == _bytes_of(alone)
        assert engine.costs.sent_nbytes == alone.costs.sent_nbytes
        assert engine.costs.received_nbytes == alone.costs.received_nbytes
        assert engine.costs.relative_error == alone.costs.relative_error
        words = {choice.words for choice in engine.choices().values()}
        assert words <= {choice.words for choice in alone.choices().values()}
        assert bool(words) == (recipe == "auto")


def _bytes_of(engine):
    state = engine.state_dict()["state"]
    return {(kind, n): a.tobytes() for kind, arrays in state.items() for n, a in arrays.items()}


@pytest.mark.parametrize("recipe", ["topk", "bf16", "qsgd", "dither", "random_block"])
def test_the_bytes_between_nodes_are_the_recipes_once_a_node(recipe):
    """But for headers, of which a tensor that is cut has two."""
    steps, tensors = 5, (Tensor("a", (400, 100)),)
    flat, those = engines(2, 1, recipe, [tensors]), engines(4, 2, recipe, [tensors])
    for grads in gradients(4, steps, numel=40_000):
        step(those, grads[:, None])
        step(flat, (grads[0::2] + grads[1::2])[:, None])
    once = flat[0].costs.sent_nbytes
    for node in (those[:2], those[2:]):
        sent = sum(engine.costs.sent_nbytes for engine in node)
        received = sum(engine.costs.received_nbytes for engine in node)
        assert once - 200 * steps < sent < 1.03 * once + 200 * steps
        assert once - 200 * steps < received < 1.03 * once + 200 * steps
        # Each rank hands in half of its gradient, and the sums of the other half or, if these are
        # mostly zeros, what both nodes have sent of it.
        within = 160_000 if recipe != "topk" else 2 * once / steps
        inside = sum(engine.costs.inside_nbytes for engine in node) / steps - 160_000
        assert within <= inside < 1.01 * within + 400
    assert max(e.costs.sent_nbytes for e in those) < 0.52 * once + 200 * steps


def test_one_rank_per_node_is_no_change():
    grads = gradients(4)
    for recipe in ("topk", "powersgd", "none"):
        assert make_policy(recipe, ranks_per_node=1) == make_policy(recipe)
        plain, ones = simulate(recipe, grads), simulate(recipe, grads, ranks_per_node=1)
        for found, expected in zip(ones, plain, strict=True):
            assert found.average.tobytes() == expected.average.tobytes()
            assert found.sent_bytes == expected.sent_bytes


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(5, 2), (7, 4), (6, 4)])
def test_nodes_of_unequal_sizes_are_refused(ranks, ranks_per_node):
    for recipe in ("topk", "none"):
        with pytest.raises(UnsupportedError, match=f"{ranks} ranks leave a node of"):
            list(simulate(recipe, gradients(ranks), ranks_per_node=ranks_per_node))


def test_within_one_node_nothing_is_compressed():
    grads = gradients(3)
    for found, grad in zip(simulate("topk", grads, ranks_per_node=4), grads, strict=True):
        assert found.average.tobytes() == (grad.sum(0) / np.float32(3)).tobytes()
        assert found.sent_bytes == [0, 0, 0]
        assert not found.residual.any()


def test_auto_is_the_ranks_of_a_host_where_all_hosts_have_as_many():
    two = [(2, 0), (2, 1)]
    assert node_size_of(3 * two) == 2
    assert node_size_of([(1, 0)] * 3) == 1
    for uneven in (two, [*two, (1, 0)], [(3, 0), (3, 1), (3, 2), *two], [(2, 0), (2, 0)] + 2 * two):
        assert node_size_of(uneven) == 1
    assert node_size_of([(2, 0), (2, 0), (2, 1), (2, 1)]) == 1  # no consecutive ranks
    policy, grads = make_policy("topk", ranks_per_node="auto"), gradients(4)
    assert policy.at(0) == make_policy("topk").at(0)  # as in a simulation
    assert policy.on_nodes(lambda: 2) == make_policy("topk", ranks_per_node=2)
    assert make_policy("topk", ranks_per_node=4).on_nodes(lambda: 2).ranks_per_node == 4
    found = simulate("topk", grads, ranks_per_node="auto")
    for ours, plain in zip(found, simulate("topk", grads), strict=True):
        assert ours.average.tobytes() == plain.average.tobytes()


def test_groups_are_told_once():
    layout = NodeLayout(3, 6)
    assert list(layout.groups()) == [(0, 1, 2), (3, 4, 5), (0, 3), (1, 4), (2, 5)]
    assert [layout.peers_of(rank) for rank in (1, 5)] == [(1, 4), (2, 5)]
    assert list(NodeLayout(4, 3).groups()) == [(0, 1, 2)]


@each("ranks", range(2, 9))
@each("numels", [(1,), (3000,), (1, 2, 3), (9000, 20), (40_000, 3, 900, 12_000), (0, 5000)])
def test_shares_hold_every_element_once(ranks, numels):
    tensors = tuple(Tensor(f"t{n}", (numel,)) for n, numel in enumerate(numels))
    plan = node_plan(tensors, ranks)
    there = [
        (number, element)
        for share in plan.shares
        for number, part in zip(share.numbers, share.parts, strict=True)
        for element in range(part.begin, part.end)
    ]
    assert there == [(n, element) for n, numel in enumerate(numels) for element in range(numel)]
    for share in plan.shares:
        assert [math.prod(t.shape) for t in share.tensors] == list(share.numels)


def test_a_part_of_a_matrix_is_a_matrix():
    whole = Tensor("w", (100, 4, 5))
    assert Part(whole, 0, 2000).tensor is whole
    assert Part(whole, 40, 200).tensor == Tensor("w[40:200]", (8, 4, 5))
    assert Part(whole, 40, 210).tensor == Tensor("w[40:210]", (170, 1, 1))
    assert Part(Tensor("w", (50, 40)), 10, 90).tensor == Tensor("w[10:90]", (80,))
    shares = node_plan((Tensor("w", (600, 70)),), 4).shares
    shapes = [tensor.shape for share in shares for tensor in share.tensors]
    assert shapes == [(150, 70)] * 4


@pytest.mark.parametrize(
    ("recipe", "bad"),
    [*(("topk", rank) for rank in range(4)), *zip(SERVED, [0, 1, 2, 3] * 9, strict=False)],
)
def test_a_bad_value_on_any_rank_is_a_step_that_never_was(recipe, bad):
    those = engines(4, 2, recipe, **OPTIONS[recipe])
    grads = gradients(4)
    step(those, grads[0][:, None])
    before = [_bytes_of(engine) for engine in those]
    broken = grads[1].copy()
    broken[bad, 7] = np.nan
    [total] = step(those, broken[:, None])
    assert not np.isfinite(total).all()
    assert [engine.costs.skipped_steps for engine in those] == [1] * 4
    assert [_bytes_of(engine) for engine in those] == before


def test_a_sum_within_a_node_that_overflows_is_a_step_that_never_was():
    for ranks in (4, 2):
        those = engines(ranks, 2)
        step(those, np.full((ranks, 1, 9000), 3e38, np.float32))
        assert [engine.costs.skipped_steps for engine in those] == [1] * ranks


def test_a_tensor_that_is_frozen_everywhere_keeps_its_residual():
    those, grads = engines(4, 2), gradients(4)
    step(those, grads[0][:, None])
    before = [engine.residual("a").tobytes() for engine in those]
    [total] = step(those, [[None]] * 4)
    assert not total.any()
    assert [engine.residual("a").tobytes() for engine in those] == before


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 3), (0, 1)])
def test_a_gradient_counts_where_others_are_frozen(frozen):
    those, grads = engines(4, 2, density=1.0, bits=32), gradients(4)[0]
    [total] = step(those, [[None if rank in frozen else grads[rank]] for rank in range(4)])
    rest = [rank for rank in range(4) if rank not in frozen]
    assert total.tobytes() == grads[rest].sum(0).tobytes()


def mass(those, name="a"):
    return sum(engine.residual(name).astype(np.float64) for engine in those)


def load(those, saved):
    for engine in those:
        engine.load_state_dict(checkpoint.part_of(saved, engine.rank, engine.world_size))


@each("movable", [False, True])
@each("then", [(2, 1), (4, 1), (4, 2), (4, 4), (6, 3), (6, 2), (3, 3), (2, 2)])
@each("before", [(4, 2), (4, 1), (6, 3), (3, 1)])
@each(
    "recipe, options",
    [
        ("topk", {}),
        ("fft", {}),
        ("gtopk", {}),
        ("auto", {"ratio": 20}),
        ("onebit", {}),
        ("topk", {"exchange": "sharded"}),
    ],
)
def test_residuals_survive_other_numbers_of_ranks_and_nodes(recipe, options, before, then, movable):
    if not movable and options and before[0] != then[0]:
        return  # second residuals belong to this number of ranks
    old = engines(*before, recipe, **options)
    for grad in gradients(before[0], 3):
        step(old, grad[:, None])
    saved = checkpoint.gathered([engine.state_dict(movable) for engine in old])
    new, zeros = engines(*then, recipe, **options), np.zeros((then[0], 1, 9000), np.float32)
    load(new, saved)
    np.testing.assert_allclose(mass(new), mass(old), rtol=0, atol=1e-4)
    arrived = step(new, zeros)[0] + step(new, zeros)[0]
    np.testing.assert_allclose(arrived.reshape(SHAPE) + mass(new), mass(old), rtol=0, atol=1e-4)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("recipe", ["topk", "fft", "powersgd", "auto", "hard_threshold", "sharded"])
def test_with_the_same_nodes_a_state_resumes_to_the_bit(recipe, gathers):
    options = {"hard_threshold": {"calibrate_steps": 4}, "sharded": {"exchange": "sharded"}}
    arguments = {"sharded": "topk"}.get(recipe, recipe), [BUCKET]
    made = [engines(4, 2, *arguments, **options.get(recipe, {})) for _ in range(3)]
    straight, saved_by, resumed = made
    steps = [drawn(np.random.default_rng(seed), 4) for seed in range(5)]
    for grads in steps[:3]:
        step(straight, grads)
        step(saved_by, grads)
    movable = gathers and recipe != "sharded"  # second residuals would go into the first ones
    states = [checkpoint.unpack(checkpoint.pack(e.state_dict(movable))) for e in saved_by]
    if gathers:
        load(resumed, checkpoint.gathered(states))
    else:
        for engine, state in zip(resumed, states, strict=True):
            engine.load_state_dict(state)
    for grads in steps[3:]:
        expected, found = step(straight, grads), step(resumed, grads)
        assert [f.tobytes() for f in found] == [e.tobytes() for e in expected]
    assert list(map(_bytes_of, resumed)) == list(map(_bytes_of, straight))


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("recipe", ["topk", "dgc"])
def test_what_belongs_to_other_nodes_waits_for_a_step_that_counts(recipe, bad):
    options = {"momentum": 0.0} if recipe == "dgc" else {}
    old = engines(4, 1, recipe, **options)
    step(old, gradients(4)[0][:, None])
    new = engines(4, 2, recipe, **options)
    load(new, checkpoint.gathered([engine.state_dict() for engine in old]))
    before = [engine.residual("a").tobytes() for engine in new]
    grads = np.zeros((4, 1, 9000), np.float32)
    grads[2, 0, 8999] = np.inf
    [total] = step(new, grads if bad else [[None]] * 4)
    assert np.isfinite(total).all() != bad
    assert bad or not total.any()
    assert [engine.residual("a").tobytes() for engine in new] == before
    [total] = step(new, np.zeros((4, 1, 9000), np.float32))
    np.testing.assert_allclose(total.reshape(SHAPE) + mass(new), mass(old), rtol=0, atol=1e-5)
    plan = node_plan((Tensor("a", SHAPE),), 2)
    for engine in new:  # each keeps its half alone
        [part] = plan.shares[engine.rank % 2].parts
        rest = np.delete(engine.residual("a").reshape(-1), slice(part.begin, part.end))
        assert not rest.any()


def test_a_step_without_compression_leaves_what_belongs_to_other_nodes():
    old = engines(4, 1)
    step(old, gradients(4)[0][:, None])
    new = engines(4, 2, dense_every=2)
    saved = [engine.state_dict() for engine in old]
    for engine, state in zip(new, saved, strict=True):
        engine.load_state_dict({**state, "step": 1})  # which is dense
    grads = gradients(4)[1]
    [total] = step(new, grads[:, None])
    np.testing.assert_allclose(total, grads.sum(0), rtol=2**-6, atol=0.1)  # by bf16
    assert mass(new).tobytes() == mass(old).tobytes()


def test_a_bucket_that_is_too_long_for_an_alltoall_is_refused(monkeypatch):
    monkeypatch.setattr(hierarchical, "MOST_NBYTES", 35_999)
    with pytest.raises(UnsupportedError, match="at most 35999 bytes of a bucket within a node"):
        step(engines(4, 2), gradients(4)[0][:, None])


def test_a_state_of_no_tensor_is_refused():
    old, new = engines(4, 2), engines(4, 2)
    step(old, gradients(4)[0][:, None])
    for name in ("b[0:4950]", "a[0:9001]", "a[5:5]", "a[0:9000]"):
        state = old[0].state_dict()
        [array] = state["state"]["residual"].values()
        state["state"]["residual"] = {name: array}
        with pytest.raises(ValueError, match="residual of unknown tensors"):
            new[0].load_state_dict(state)


def test_recipes_that_would_do_something_else_on_one_node_are_refused():
    assert sorted(REFUSED) == ["demo", "signsgd", "signum"]
    for recipe in [*REFUSED, "dgc", "sketchsgd"]:
        for nodes in (2, "auto"):
            with pytest.raises(UnsupportedError, match="their own momentum"):
                make_policy(recipe, ranks_per_node=nodes)


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


def test_dense_steps_have_the_rounds_that_are_possible():
    policy = make_policy("topk", dense_every=3, dense_by="none", ranks_per_node=2)
    tensors = (Tensor("a", SHAPE),)
    rounds = {policy.decided(tensors, 4).at(number).rounds for number in range(6)}
    assert rounds == policy.decided(tensors, 4).possible_rounds()
    assert rounds == {("alltoall", kind, "allgather") for kind in ("allgather", "allreduce")}
