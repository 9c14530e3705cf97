"""Sums by mpi4py; ``test_mpi.py`` starts this on every rank of an MPI job."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
from mpi4py import MPI

from horovod_fftcomp import (
    ConfigMismatchError,
    UnsupportedError,
    get_scheme,
    list_compressors,
    simulate,
)
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.mpi import LocalSteps, Reducer
from horovod_fftcomp.recipes import get_recipe
from horovod_fftcomp.schemes import Tensor
from tests import payloads

COMM = MPI.COMM_WORLD


def gradients(steps, n=5000):
    """Return all ranks' arrays ``[steps, ranks, n]``; this rank's are ``[:, COMM.rank]``."""
    return np.random.default_rng(0).standard_normal((steps, COMM.size, n)).astype(np.float32)


def same_everywhere(*arrays):
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    assert len(set(COMM.allgather(digest))) == 1


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("recipe", list_compressors())
def test_sums_are_those_of_a_simulation(recipe, exchange):
    own = get_recipe(recipe).options.get("exchange") == "auto"
    if exchange == "sharded" and not own:
        pytest.skip("it gathers nothing")
    options = {"exchange": exchange} if own else {}
    everyone, reducer = gradients(6), Reducer(recipe, **options)
    gathers = get_scheme(recipe).rounds[-1] == "allgather"
    for grads, expected in zip(everyone, simulate(recipe, everyone, **options), strict=True):
        mean = reducer.mean({"gradient": grads[COMM.rank]})["gradient"]
        same_everywhere(mean)
        if gathers:
            assert mean.tobytes() == expected.average.tobytes()
        else:
            scale = np.abs(expected.average).max()
            tolerance = 2e-3 if recipe in payloads.SUMS_OF_FLOAT16 else 1e-6
            np.testing.assert_allclose(mean, expected.average, rtol=0, atol=tolerance * scale)
    if recipe not in ("none", "fp16", "bf16"):
        np.testing.assert_allclose(
            reducer.residual("gradient"), expected.residual[COMM.rank], rtol=1e-5, atol=1e-5
        )
    policy = make_policy(recipe, **options)
    assert reducer.costs.collectives == sum(len(policy.at(step).rounds) for step in range(6))


@pytest.mark.parametrize("recipe", ["topk", "fft", "scalecom", "powersgd", "gtopk", "sparcml"])
def test_a_discarded_sum_never_was(recipe):
    plain, reducer = Reducer(recipe), Reducer(recipe)
    for grads in gradients(4):
        reducer.mean({"gradient": 3 - grads[COMM.rank]})
        reducer.discard()
        expected = plain.mean({"gradient": grads[COMM.rank]})["gradient"]
        found = reducer.mean({"gradient": grads[COMM.rank]})["gradient"]
        assert found.tobytes() == expected.tobytes()
    assert reducer.residual("gradient").tobytes() == plain.residual("gradient").tobytes()
    assert reducer.costs.sent_nbytes == plain.costs.sent_nbytes


@pytest.mark.parametrize("recipe", ["none", "topk", "scalecom", "gtopk", "sparcml"])
def test_nodes_of_two_are_those_of_a_simulation(recipe):
    if COMM.size % 2:
        with pytest.raises(UnsupportedError, match="3 ranks leave a node of 1"):
            Reducer(recipe, ranks_per_node=2).sum({"gradient": gradients(1)[0, COMM.rank]})
        return
    everyone, reducer = gradients(4), Reducer(recipe, ranks_per_node=2)
    steps = list(simulate(recipe, everyone, ranks_per_node=2))
    for grads, expected in zip(everyone, steps, strict=True):
        mean = reducer.mean({"gradient": grads[COMM.rank]})["gradient"]
        same_everywhere(mean)
        assert mean.tobytes() == expected.average.tobytes()
    residual = reducer.residual("gradient")
    assert residual.tobytes() == steps[-1].residual[COMM.rank].tobytes()
    assert reducer.costs.sent_nbytes == sum(step.sent_bytes[COMM.rank] for step in steps)
    assert reducer.costs.inside_nbytes > 0


@pytest.mark.parametrize("density", [0.01, 0.4])
def test_sparcml_counts_what_doubling_sends(density):
    """On 3 ranks, say: 0 sends two messages and gets two, 1 and 2 one each; the last is a sum."""
    everyone, reducer = gradients(5), Reducer("sparcml", density=density)
    steps = list(simulate("sparcml", everyone, density=density))
    for grads, expected in zip(everyone, steps, strict=True):
        mean = reducer.mean({"gradient": grads[COMM.rank]})["gradient"]
        assert mean.tobytes() == expected.average.tobytes()
    pairs = 1 << (COMM.size.bit_length() - 1)
    late, doublings = COMM.size - pairs, pairs.bit_length() - 1
    messages = 1 if COMM.rank >= pairs else doublings + (COMM.rank < late)
    one, costs = (
        get_scheme("sparcml", density=density).sent_nbytes(Tensor("w", (5000,))),
        reducer.costs,
    )
    if COMM.rank >= pairs or COMM.size == 2:
        assert costs.sent_nbytes == 5 * one
    most = 4 * 5000 + 64
    assert 5 * one * messages <= costs.sent_nbytes <= 5 * most * messages
    assert 5 * one * messages <= costs.received_nbytes <= 5 * most * messages
    sent, received = (COMM.allreduce(n) for n in (costs.sent_nbytes, costs.received_nbytes))
    assert sent == received  # every message that somebody has sent, somebody has got
    assert COMM.allreduce(messages) == 2 * late + pairs * doublings


def test_messages_of_the_user_are_left_alone():
    everyone, partner = gradients(1), (COMM.rank + 1) % COMM.size
    sending = COMM.isend(f"from {COMM.rank}", partner)
    Reducer("sparcml").sum({"gradient": everyone[0, COMM.rank]})
    assert COMM.recv(source=(COMM.rank - 1) % COMM.size) == f"from {(COMM.rank - 1) % COMM.size}"
    sending.wait()


def test_small_arrays_and_other_dtypes_keep_their_shapes():
    reducer = Reducer("topk", density=0.5, bits=32)
    arrays = {
        "half": np.full((40, 50), 1.5, np.float16),
        "double": np.arange(2000.0).reshape(2, 1000)[:, ::-1],
        "bias": np.arange(7, dtype=np.float32),
        "scalar": np.float64(2.0).reshape(()),
    }
    before = {name: array.tobytes() for name, array in arrays.items()}
    sums = reducer.sum(arrays)
    assert list(sums) == list(arrays)
    for name, array in arrays.items():
        assert sums[name].shape == array.shape
        assert sums[name].dtype == np.float32
        assert array.tobytes() == before[name]
    np.testing.assert_array_equal(sums["bias"], COMM.size * arrays["bias"])
    assert sums["scalar"] == 2.0 * COMM.size
    same_everywhere(*sums.values())


@pytest.mark.parametrize("bad_rank", [0, COMM.size - 1])
@pytest.mark.parametrize("recipe", ["topk", "scalecom", "hard_threshold", "sparcml"])
def test_a_bad_value_on_one_rank_is_told_to_all(recipe, bad_rank):
    everyone, reducer = gradients(3), Reducer(recipe)
    reducer.sum({"w": everyone[0, COMM.rank]})
    before = reducer.residual("w").tobytes()
    broken = everyone[1, COMM.rank].copy()
    if COMM.rank == bad_rank:
        broken[17] = np.nan
    assert np.isnan(reducer.sum({"w": broken})["w"]).all()
    assert reducer.residual("w").tobytes() == before
    assert np.isfinite(reducer.sum({"w": everyone[2, COMM.rank]})["w"]).all()


def test_a_saved_state_goes_on():
    everyone = gradients(6)
    straight, first = Reducer("fft"), Reducer("fft")
    for grads in everyone[:3]:
        straight.sum({"w": grads[COMM.rank]})
        first.sum({"w": grads[COMM.rank]})
    resumed = Reducer("fft")
    resumed.load_state_dict(first.state_dict())
    for grads in everyone[3:]:
        expected = straight.sum({"w": grads[COMM.rank]})["w"]
        assert resumed.sum({"w": grads[COMM.rank]})["w"].tobytes() == expected.tobytes()


def test_first_moments_are_refused():
    with pytest.raises(UnsupportedError, match="'dither' sends first moments"):
        Reducer("dither", momentum=0.9, dense_every=3)


def test_ranks_that_differ_stop_with_one_message():
    reducer = Reducer("topk", density=0.1 if COMM.rank == 0 else 0.2)
    with pytest.raises(ConfigMismatchError, match="differently: density is") as raised:
        reducer.sum({"w": np.ones(3000, np.float32)})
    same_everywhere(np.frombuffer(str(raised.value).encode(), np.uint8))
    reducer = Reducer("topk")
    with pytest.raises(ConfigMismatchError, match="names and shapes is"):
        reducer.sum({f"w{COMM.rank}": np.ones(3000, np.float32)})


def test_other_arrays_than_in_the_first_step_are_refused():
    reducer = Reducer("topk")
    reducer.sum({"w": np.ones(3000, np.float32)})
    for arrays in ({"v": np.ones(3000, np.float32)}, {"w": np.ones((3, 1000), np.float32)}, {}):
        with pytest.raises(ValueError, match="but in the first step were"):
            reducer.sum(arrays)
    for bad in (np.ones(3000, np.int32), [1.0] * 3000):
        with pytest.raises(TypeError, match="array 'w' is"):
            reducer.sum({"w": bad})


def test_a_part_of_the_ranks_sums_among_itself():
    color = COMM.rank % 2
    part = COMM.Split(color)
    reducer = Reducer("topk", part, density=1.0, bits=32)
    total = reducer.sum({"w": np.full(3000, 1.0 + COMM.rank, np.float32)})["w"]
    assert (total == sum(1.0 + rank for rank in range(COMM.size) if rank % 2 == color)).all()


def test_no_framework_is_loaded():
    assert not {"torch", "tensorflow", "horovod"} & set(sys.modules)


@pytest.mark.parametrize("recipe", payloads.RECIPES)
def test_payloads_and_residuals_are_those_of_every_framework(recipe, monkeypatch):
    if COMM.size > 2 and recipe == "auto":
        pytest.skip("decides by sums over ranks, whose rounding depends on MPI's order")
    spy, reducer = payloads.Spy(monkeypatch, COMM.rank), Reducer(recipe)
    for grads in payloads.gradients(COMM.size):
        reducer.sum({"gradient": grads[COMM.rank]})
    payloads.check(recipe, spy, COMM.size, COMM.rank, reducer.residual("gradient"))


def test_local_steps_meet_at_the_mean():
    """Without loss: the weights are the mean of the ranks' own; a bad rank undoes a period."""
    start = np.linspace(-1, 1, 5000, dtype=np.float32)
    local = LocalSteps(Reducer("topk", density=1.0, bits=32), {"w": start}, period=3)
    moves = gradients(9)
    expected = start + moves[:3].astype(np.float64).sum(0).mean(0)
    weights = {"w": start.copy()}
    for step in range(9):
        weights["w"] = weights["w"] + moves[step, COMM.rank]
        if step == 4 and COMM.rank == COMM.size - 1:
            weights["w"][17] = np.nan
        weights = local.after_step(weights)
        if step in (2, 5):
            same_everywhere(weights["w"])
            np.testing.assert_allclose(weights["w"], expected, atol=1e-5)
    same_everywhere(weights["w"])
    expected += moves[6:].astype(np.float64).sum(0).mean(0)
    np.testing.assert_allclose(weights["w"], expected, atol=1e-5)


def test_what_local_steps_do_not_send_they_carry_on():
    start, moves = np.zeros(5000, np.float32), gradients(20)
    reducer = Reducer("topk", density=0.1, bits=32)
    local, weights = LocalSteps(reducer, {"w": start}, period=2), {"w": start}
    for move in moves:
        weights = local.after_step({"w": weights["w"] + move[COMM.rank]})
        if local.steps == 0:
            same_everywhere(weights["w"])
    left = np.mean(COMM.allgather(reducer.residual("w")), 0)
    owed = moves.astype(np.float64).sum(0).mean(0)
    np.testing.assert_allclose(weights["w"] + left, owed, atol=1e-4)
    with pytest.raises(ValueError, match="period must be a whole number"):
        LocalSteps(reducer, weights, 0)
    for recipe in ("dgc", "signum", "signsgd"):
        with pytest.raises(UnsupportedError, match="differences of weights"):
            LocalSteps(Reducer(recipe), weights, 2)


@pytest.mark.parametrize(
    ("recipe", "options"), [("signsgd", {}), ("signum", {}), ("demo", {"sign": True})]
)
def test_signs_are_sent_of_small_arrays_too(recipe, options):
    grads = gradients(1, 5000 + 50 + 1)[0, COMM.rank]
    arrays = {"w": grads[:5000], "bias": grads[5000:5050], "scale": abs(grads[5050:].reshape(()))}
    means = Reducer(recipe, **options).mean(arrays)  # of the scale there is no tie
    for mean in means.values():
        assert set(np.unique(mean)) <= {-1, 0, 1}
        assert mean.any()
