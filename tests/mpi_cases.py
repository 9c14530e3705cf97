"""Sums by mpi4py; ``test_mpi.py`` starts this on every rank of an MPI job."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
from mpi4py import MPI

from horovod_fftcomp import ConfigMismatchError, get_scheme, list_compressors, simulate
from horovod_fftcomp.mpi import Reducer
from horovod_fftcomp.policy import make_policy

COMM = MPI.COMM_WORLD


def gradients(steps, n=5000):
    """Return all ranks' arrays ``[steps, ranks, n]``; this rank's are ``[:, COMM.rank]``."""
    return np.random.default_rng(0).standard_normal((steps, COMM.size, n)).astype(np.float32)


def same_everywhere(*arrays):
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    assert len(set(COMM.allgather(digest))) == 1


@pytest.mark.parametrize("recipe", list_compressors())
def test_sums_are_those_of_a_simulation(recipe):
    everyone, reducer = gradients(6), Reducer(recipe)
    gathers = "allgather" in get_scheme(recipe).rounds
    for grads, expected in zip(everyone, simulate(recipe, everyone), strict=True):
        mean = reducer.mean({"gradient": grads[COMM.rank]})["gradient"]
        same_everywhere(mean)
        if gathers:
            assert mean.tobytes() == expected.average.tobytes()
        else:
            scale = np.abs(expected.average).max()
            tolerance = 2e-3 if recipe == "fp16" else 1e-6
            np.testing.assert_allclose(mean, expected.average, rtol=0, atol=tolerance * scale)
    if recipe not in ("none", "fp16", "bf16"):
        np.testing.assert_allclose(
            reducer.residual("gradient"), expected.residual[COMM.rank], rtol=1e-5, atol=1e-5
        )
    policy = make_policy(recipe)
    assert reducer.costs.collectives == sum(len(policy.at(step).rounds) for step in range(6))


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
@pytest.mark.parametrize("recipe", ["topk", "scalecom", "hard_threshold"])
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


def test_ranks_that_differ_stop_with_one_message():
    reducer = Reducer("topk", density=0.1 if COMM.rank == 0 else 0.2)
    with pytest.raises(ConfigMismatchError, match="options is") as raised:
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
