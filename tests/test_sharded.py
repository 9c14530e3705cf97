"""Sharded exchange: bytes that do not grow with the ranks, and nothing lost on the way."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, UnsupportedError, get_scheme, simulate
from horovod_fftcomp.codec.quantizers import Float32, RangeFloat
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.engine.buckets import Bucket, decided_anew, make_buckets
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Round, Second, Tensor, ops_of, shard_plan
from horovod_fftcomp.schemes.shard_plan import Key, cut, second_codec
from horovod_fftcomp.simulation import InProcessWorld, exchange_once
from horovod_fftcomp.wire.header import align
from tests.contracts import ADAPTIVE_RECIPES

SHARDED = [name for name, recipe in RECIPES.items() if recipe.options.get("exchange") == "auto"]
# Recipes whose sums and residuals together are the gradients: no momentum, votes or draws alone.
CONSERVING = ["topk", "fft", "dct", "onebit", "efsignsgd", "hard_threshold"]
CONSERVING += [name for name in ADAPTIVE_RECIPES if get_scheme(name).error_feedback]
TENSORS = (Tensor("a", (100, 90)), Tensor("b", (3000,)), Tensor("c", (50, 71)), Tensor("d", (5,)))


def options_of(recipe):
    return {"threshold": 1.5} if recipe == "hard_threshold" else {}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def engines_of(recipe, n_ranks, tensors=TENSORS, **options):
    policy = make_policy(recipe, exchange="sharded", **{**options_of(recipe), **options})
    buckets = [Bucket(tensors, policy)]
    return [Engine(buckets, rank, n_ranks) for rank in range(n_ranks)]


def grads_of(n_ranks, seed=0, tensors=TENSORS):
    draw = np.random.default_rng(seed).standard_normal
    return [
        [[draw(math.prod(t.shape)).astype(np.float32) for t in tensors]] for _ in range(n_ranks)
    ]


def step(engines, grads):
    """Run a step; return the sums, the same on all ranks."""
    exchange_once(engines, grads, random.Random(0))
    sums = [b"".join(total.tobytes() for total in engine.sums(0)) for engine in engines]
    assert len(set(sums)) == 1
    found = [total.copy() for total in engines[0].sums(0)]
    for engine in engines:
        engine.settle()
    return found


def states(engines):
    return [
        {
            (kind, name): array.tobytes()
            for kind, arrays in engine.state_dict()["state"].items()
            for name, array in arrays.items()
        }
        for engine in engines
    ]


def residuals(engines):
    """Return the sum of all ranks' residuals of each tensor, second ones included, float64."""
    tensors = engines[0].buckets[0].tensors
    return [
        sum(engine.residual(t.name).reshape(-1).astype(np.float64) for engine in engines)
        for t in tensors
    ]


@pytest.mark.parametrize("n_shards", [1, 2, 3, 8, 100])
@pytest.mark.parametrize(
    "numels", [[6400], [64] * 10, [10_000, 1, 70, 5, 333_333], [5], [1000, 0, 1000]]
)
def test_pieces_are_whole_blocks_and_shards_nearly_equal(numels, n_shards):
    grains = [64 if n % 2 == 0 else 256 for n in range(len(numels))]
    shards = cut(numels, grains, n_shards)
    assert len(shards) == n_shards
    covered = [[] for _ in numels]
    for number, begin, end in itertools.chain(*shards):
        covered[number].append((begin, end))
        assert begin < end
        assert begin % grains[number] == 0
        assert end % grains[number] == 0 or end == numels[number]
    for numel, parts in zip(numels, covered, strict=True):
        bounds = [0, *(end for _, end in parts)], [*(begin for begin, _ in parts), numel]
        assert bounds[0] == bounds[1]
    sizes = [sum(end - begin for _, begin, end in shard) for shard in shards]
    assert max(sizes) <= 1.8 * sum(numels) / n_shards + 2 * 256
    if len(numels) == 1:
        assert max(sizes) <= sum(numels) / n_shards + 256
    assert len(list(itertools.chain(*shards))) <= max(1, len(numels) + n_shards - 1)


@pytest.mark.parametrize(
    "recipe",
    [
        "topk",
        *(pytest.param(n, marks=pytest.mark.more) for n in "fft qsgd onebit bf16 signsgd".split()),
    ],
)
def test_received_bytes_grow_as_those_of_a_dense_ring(recipe):
    received = {}
    for ranks in (2, 8, 64):
        n = 25_000 * ranks
        gradients = np.broadcast_to(normal(n), (1, ranks, n))  # bytes do not depend on values
        [found] = simulate(recipe, gradients, exchange="sharded")
        received[ranks] = max(found.received_bytes) / n / (2 * (ranks - 1) / ranks)
    assert max(received.values()) <= 1.08 * min(received.values())


@pytest.mark.parametrize("recipe", ["fft", "topk", "qsgd", "onebit"])
def test_they_do_on_512_ranks_by_the_plans_sizes(recipe):
    received, codec = {}, get_scheme(recipe).codec
    for ranks in (2, 8, 64, 512):
        n = 25_000 * ranks
        plan = Key([codec]).plan((Tensor("g", (n,)),), False, Second(), ranks)
        pairs = zip(plan.seconds, plan.tensors, strict=True)
        seconds = [align(second.payload_nbytes(piece.shape)) for second, piece in pairs]
        found = max(
            (ranks - 1) * first + sum(seconds) - second
            for first, second in zip(plan.splits(ops_of(None), None), seconds, strict=True)
        )
        received[ranks] = found / n / (2 * (ranks - 1) / ranks)
    assert max(received.values()) <= 1.08 * min(received.values())


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("recipe", ["topk", "fft", "qsgd", "onebit", "signsgd", "natural"])
def test_schemes_know_what_a_rank_receives(recipe, exchange):
    n, ranks = 640_000, 4  # so that headers are few
    scheme = get_scheme(recipe, exchange=exchange)
    [found] = simulate(recipe, normal(1, ranks, n), exchange=exchange)
    expected = scheme.received_nbytes(Tensor("g", (n,)), ranks)
    assert max(found.received_bytes) == pytest.approx(expected, rel=0.02)


def test_schemes_of_common_positions_know_it_too():
    n, ranks = 64_000, 4
    for recipe, values in (("scalecom", 4 * 640), ("gtopk", 4 * 640)):
        [found] = simulate(recipe, normal(1, ranks, n), density=0.01)
        scheme = get_scheme(recipe, density=0.01)
        # A process has no ring: it receives the whole sum and nothing else.
        expected = max(found.received_bytes) + (2 * (ranks - 1) / ranks - 1) * values
        assert scheme.received_nbytes(Tensor("g", (n,)), ranks) == pytest.approx(expected, 0.02)


@pytest.mark.parametrize("recipe", CONSERVING)
@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_what_is_not_sent_is_kept(recipe, n_ranks):
    gradients = normal(4, n_ranks, 20_011)
    steps = list(simulate(recipe, gradients, exchange="sharded", **options_of(recipe)))
    sent = sum(found.average.astype(np.float64) for found in steps) * n_ranks
    kept = steps[-1].residual.astype(np.float64).sum(0)
    wanted = gradients.astype(np.float64).sum((0, 1))
    assert kept.any()
    np.testing.assert_allclose(sent + kept, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("recipe", ["signsgd", "signum", "demo"])
def test_votes_are_those_of_a_gather(recipe):
    options = {"sign": True} if recipe == "demo" else {}
    gradients = normal(3, 5, 4003)
    gradients[1] = 0
    ours, theirs = (
        np.array([one.average for one in simulate(recipe, gradients, exchange=exchange, **options)])
        for exchange in ("sharded", "gather")
    )
    if recipe == "demo":  # pieces choose their own k
        assert set(np.unique(ours)) == {-1, 0, 1}
        assert np.mean(ours == theirs) > 0.8
    else:
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("recipe", ["qsgd", "natural", "wangni"])
def test_unbiased_recipes_stay_unbiased_and_keep_nothing(recipe):
    gradients = np.repeat(normal(1, 3, 500), 400, 0)
    options = {"density": 0.5} if recipe == "wangni" else {}
    found = list(simulate(recipe, gradients, exchange="sharded", **options))
    assert not found[-1].residual.any()
    averages = np.array([one.average for one in found], np.float64)
    often = np.count_nonzero(averages, 0) > 40
    error = averages.mean(0) - gradients[0].mean(0)
    assert np.mean(often) > 0.9
    assert np.abs(error / (averages.std(0) / 20 + 1e-7))[often].max() < 5


@pytest.mark.parametrize("recipe", SHARDED)
def test_a_step_with_nan_changes_no_state_on_any_rank(recipe):
    """Wherever it is: in any rank's part of any shard."""
    engines = engines_of(recipe, 3)
    step(engines, grads_of(3))
    before = states(engines)
    for rank, place in itertools.product(range(3), (0, 4_000, 8_999)):
        grads = grads_of(3, seed=place)
        grads[rank][0][0][place] = np.nan if rank else np.inf
        with np.errstate(invalid="ignore"):
            sums = step(engines, grads)
        assert np.isnan(sums[0]).all()  # all pieces of the tensor
        assert all(np.isfinite(total).all() for total in sums[1:])
        assert states(engines) == before


def test_a_sum_that_overflows_changes_no_state():
    engines = engines_of("topk", 2, bits=32)
    step(engines, grads_of(2))
    before, grads = states(engines), grads_of(2)
    for rank in range(2):
        grads[rank][0][1][7] = 3e38
    sums = step(engines, grads)
    assert np.isnan(sums[1]).all()
    assert states(engines) == before


@pytest.mark.parametrize("recipe", ["topk", "fft", "qsgd", "onebit", "strom"])
@pytest.mark.parametrize("owner", [0, 2])
def test_a_corrupt_payload_at_one_owner_is_told_to_all_ranks(recipe, owner):
    engines = engines_of(recipe, 3)
    step(engines, grads_of(3))
    before, world = states(engines), InProcessWorld(3)
    for rank, (engine, grads) in enumerate(zip(engines, grads_of(3, 1), strict=True)):
        world.submit(rank, "first", engine.resume(0, grads[0]))
    outputs = world.complete("first")
    outputs[owner] = outputs[owner].copy()
    outputs[owner][9] ^= 0x40
    for rank, (engine, output) in enumerate(zip(engines, outputs, strict=True)):
        second = engine.resume(0, output)  # no rank waits for another in vain
        assert isinstance(second, Round)
        world.submit(rank, "second", second)
    for rank, (engine, output) in enumerate(zip(engines, world.complete("second"), strict=True)):
        told = "checksum|payload" if rank == owner else "owns this shard has received a corrupt"
        with pytest.raises(PayloadError, match=told):
            engine.resume(0, output)
        engine.abandon()
    assert states(engines) == before


@pytest.mark.parametrize("recipe", SHARDED)
def test_a_loaded_state_goes_on_as_if_nothing_had_happened(recipe):
    engines = engines_of(recipe, 3)
    for seed in range(2):
        step(engines, grads_of(3, seed))
    saved, wanted = [engine.state_dict() for engine in engines], []
    for seed in range(2, 4):
        wanted += step(engines, grads_of(3, seed))
    again, found = engines_of(recipe, 3), []
    for engine, state in zip(again, saved, strict=True):
        engine.load_state_dict(state)
    for seed in range(2, 4):
        found += step(again, grads_of(3, seed))
    assert [one.tobytes() for one in found] == [one.tobytes() for one in wanted]
    assert states(again) == states(engines)


@pytest.mark.parametrize("recipe", ["topk", "fft", "onebit"])
def test_nothing_is_lost_on_another_number_of_ranks(recipe):
    sent, due, engines = 0, 0, engines_of(recipe, 4)
    for n_ranks in (4, 2, 4):
        if len(engines) != n_ranks:
            before = residuals(engines)
            saved = {"version": 1, "world_size": len(engines)}
            saved["ranks"] = [engine.state_dict(movable=True) for engine in engines]
            engines = engines_of(recipe, n_ranks)
            for engine in engines:
                engine.load_state_dict(saved)
            for ours, theirs in zip(residuals(engines), before, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())
        for seed in range(2):
            grads = grads_of(n_ranks, seed)
            due = due + sum(np.concatenate(rank[0]).astype(np.float64) for rank in grads)
            sent = sent + np.concatenate(step(engines, grads)).astype(np.float64)
    kept = np.concatenate(residuals(engines))
    np.testing.assert_allclose(sent + kept, due, atol=1e-5 * np.abs(due).max())


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
def test_second_residuals_of_other_pieces_go_into_the_first_ones(exchange):
    """As after a change of the exchange, or of the buckets."""
    engines, policy = engines_of("fft", 2), make_policy("fft", exchange=exchange)
    for seed in range(2):
        step(engines, grads_of(2, seed))
    buckets, before = [Bucket(TENSORS[2:], policy), Bucket(TENSORS[:2], policy)], residuals(engines)
    others = [Engine(buckets, rank, 2) for rank in range(2)]
    for engine, old in zip(others, engines, strict=True):
        engine.load_state_dict(old.state_dict())
    grads = grads_of(2, 5)
    exchange_once(others, [[rank[0][2:], rank[0][:2]] for rank in grads], random.Random(0))
    sent = [*others[0].sums(1), *others[0].sums(0)]
    for engine in others:
        engine.settle()
    for number, tensor in enumerate(TENSORS):
        due = before[number] + sum(rank[0][number].astype(np.float64) for rank in grads)
        kept = sum(engine.residual(tensor.name).reshape(-1) for engine in others)
        np.testing.assert_allclose(sent[number] + kept, due, atol=1e-5 * np.abs(due).max())


@pytest.mark.parametrize("recipe", ["topk", "fft"])
def test_a_frozen_tensor_keeps_both_residuals(recipe):
    engines = engines_of(recipe, 3)
    step(engines, grads_of(3))
    before, grads = states(engines), grads_of(3, 1)
    for rank in range(3):
        grads[rank][0][0] = None
    sums = step(engines, grads)
    assert not sums[0].any()
    assert all(total.any() for total in sums[1:3])
    for now, then in zip(states(engines), before, strict=True):
        assert [key for key in now if now[key] != then.get(key)]
        assert all(now[key] == then[key] for key in then if key[1] == "a")


def test_a_gradient_that_one_rank_lacks_is_the_sum_of_the_others():
    engines, grads = engines_of("topk", 3, density=1.0, bits=32), grads_of(3)
    grads[1][0][0] = None
    sums = step(engines, grads)
    np.testing.assert_allclose(sums[0], grads[0][0][0] + grads[2][0][0], rtol=1e-6)


def test_auto_gathers_where_that_takes_fewer_bytes_and_shards_where_it_does_not():
    large = [Tensor("w", (1000, 1000))]
    for recipe, n_ranks, expected in (
        ("fft", 2, "gather"), ("fft", 8, "sharded"), ("topk", 2, "gather"),
        ("topk", 32, "sharded"), ("onebit", 4, "sharded"), ("none", 8, None), ("powersgd", 8, None),
    ):  # fmt: skip
        [bucket] = make_buckets(large, make_policy(recipe), world_size=n_ranks) or [None]
        found = None if bucket is None else dict(bucket.policy.options).get("exchange")
        assert found == expected, (recipe, n_ranks)
    [small] = make_buckets([Tensor("w", (40, 40))], make_policy("fft"), world_size=8)
    assert dict(small.policy.options)["exchange"] == "gather"


def test_a_schedule_does_not_change_what_auto_has_decided():
    policy = make_policy("topk", density_schedule={0: 0.01, 10: 0.5})
    [bucket] = make_buckets([Tensor("w", (1000, 1000))], policy, world_size=8)
    found = {bucket.policy.at(step).rounds for step in (0, 5, 10, 50)}
    assert len(found) == 1


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(UnsupportedError, match="needs scope="):
        get_scheme("topk", scope="bucket", exchange="sharded")
    with pytest.raises(UnsupportedError, match="max_norm"):
        get_scheme("dgc", max_norm=1.0, exchange="sharded")
    with pytest.raises(TypeError, match="no option exchange"):
        get_scheme("powersgd", exchange="sharded")
    [bucket] = make_buckets(
        [Tensor("w", (1000, 1000))], make_policy("topk", scope="bucket"), world_size=64
    )
    assert dict(bucket.policy.options)["exchange"] == "gather"


def test_the_second_compression_has_options_of_its_own():
    gradients = normal(1, 4, 100_000)
    [less] = simulate("topk", gradients, density=0.01, exchange="sharded", second_density=0.01)
    [more] = simulate("topk", gradients, density=0.01, exchange="sharded", second_density=0.5)
    [wide] = simulate("topk", gradients, density=0.01, exchange="sharded", second_bits=32)
    assert np.count_nonzero(less.average) < np.count_nonzero(more.average)
    assert less.received_bytes[0] < wide.received_bytes[0]


def test_measured_errors_count_both_residuals():
    gradients = grads_of(3)
    engines = engines_of("topk", 3)
    step(engines, gradients)
    for rank, engine in enumerate(engines):
        squares = sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients[rank][0])
        state = engine.state_dict()["state"]
        left = sum(
            float(np.square(a, dtype=np.float64).sum())
            for kind in ("residual", "shard_residual")
            for a in state[kind].values()
        )
        assert engine.costs.relative_error == pytest.approx(math.sqrt(left / squares), rel=1e-5)


@pytest.mark.parametrize("recipe", ["topk", "fft"])
@pytest.mark.parametrize("ranks", [(4, 2), (4, 3), (2, 4)])
@pytest.mark.parametrize("frozen_on", ["all", "one"])
def test_a_tensor_that_is_frozen_when_pieces_move_loses_nothing(recipe, ranks, frozen_on):
    before_size, size = ranks
    old = engines_of(recipe, before_size)
    for seed in range(2):
        step(old, grads_of(before_size, seed))
    before = [sum(engine.residual(t.name).astype(np.float64) for engine in old) for t in TENSORS]
    engines = engines_of(recipe, size)
    for rank, engine in enumerate(engines):  # survivors of an elastic job keep their own states
        if rank < before_size:
            state = old[rank].state_dict()
            engine.load_state_dict(state | {"rank": rank, "world_size": size})
    lost = [
        sum(old[rank].residual(t.name).astype(np.float64) for rank in range(size, before_size))
        for t in TENSORS
    ]
    grads = grads_of(size, 5)
    for rank in range(size if frozen_on == "all" else 1):
        grads[rank][0][0] = grads[rank][0][1] = None
    sums = step(engines, grads)
    for number, tensor in enumerate(TENSORS):
        given = [rank[0][number] for rank in grads if rank[0][number] is not None]
        due = before[number].reshape(-1) - np.reshape(lost[number], -1)
        due = due + sum(grad.astype(np.float64) for grad in given)
        kept = sum(engine.residual(tensor.name).reshape(-1) for engine in engines)
        np.testing.assert_allclose(sums[number] + kept, due, atol=2e-5 * max(np.abs(due).max(), 1))


@pytest.mark.parametrize("recipe", ["topk", "fft", "hard_threshold"])
def test_a_loaded_state_has_second_residuals_of_own_pieces_alone(recipe):
    """Else a GPU that drops the next step would restore arrays of other sizes."""
    old, engines = engines_of(recipe, 2), engines_of(recipe, 3)
    for seed in range(2):
        step(old, grads_of(2, seed))
    for rank, engine in enumerate(engines[:2]):
        engine.load_state_dict(old[rank].state_dict() | {"rank": rank, "world_size": 3})
        np.testing.assert_allclose(engine.residual("a"), old[rank].residual("a"), atol=1e-6)
    loaded = [engine.state_dict()["state"] for engine in engines]
    step(engines, grads_of(3, 5))
    for engine, before in zip(engines, loaded, strict=True):
        after = engine.state_dict()["state"]
        for kind in ("shard_residual", "shard_begin"):
            for name, array in before.get(kind, {}).items():
                assert array.size == after[kind][name].size
        for name, begin in before.get("shard_begin", {}).items():
            assert begin == after["shard_begin"][name]


def test_auto_is_decided_anew_for_another_number_of_ranks():
    tensors = [Tensor("w", (2500, 2500))]
    [bucket] = make_buckets(tensors, make_policy("fft"), world_size=2)
    assert "alltoall" not in bucket.policy.at(0).rounds
    [again] = decided_anew([bucket], 8)
    assert again == make_buckets(tensors, make_policy("fft"), world_size=8)[0]
    assert "alltoall" in again.policy.at(0).rounds
    assert decided_anew([again], 2) == [bucket]


def test_bins_of_adacomp_are_those_of_the_tensor_in_a_part_of_it():
    scheme = get_scheme("adacomp")
    plan = Key([scheme.codec]).plan((Tensor("w", (256, 256, 3, 3)),), False, Second(), 2)
    assert {scheme.codec.sparsifier.length(piece.shape) for piece in plan.tensors} == {50}


@pytest.mark.parametrize("recipe", ["strom", "adacomp"])
def test_sums_of_units_are_sent_by_top_k(recipe):
    codec = second_codec(get_scheme(recipe).codec, False, Second())
    assert codec == Codec(Identity(), TopK(0.04), RangeFloat(4))
    codec = second_codec(get_scheme(recipe).codec, False, Second(0.2, 32))
    assert codec == Codec(Identity(), TopK(0.2), Float32())


def test_a_message_that_an_alltoall_cannot_count_is_refused(monkeypatch):
    monkeypatch.setattr(shard_plan, "MOST_NBYTES", 20_000)
    with pytest.raises(UnsupportedError, match=r'at most 20000 bytes.*exchange="gather"'):
        list(simulate("bf16", normal(1, 2, 20_000), exchange="sharded"))


def test_the_first_nan_of_a_calibration_is_told_with_its_rank():
    engines, grads = engines_of("hard_threshold", 3, threshold=None, calibrate_steps=4), grads_of(3)
    grads[1][0][0][5] = np.nan
    exchange_once(engines, grads, random.Random(0))
    assert [engine.bad["a"] for engine in engines] == [False, True, False]


def test_a_state_with_second_residuals_is_refused_by_a_recipe_without_feedback():
    engines = engines_of("topk", 2)
    step(engines, grads_of(2))
    policy = make_policy("topk", exchange="gather", error_feedback=False)
    other = Engine([Bucket(TENSORS, policy)], 0, 2)
    with pytest.raises(ValueError, match="residual"):
        other.load_state_dict(engines[0].state_dict())
