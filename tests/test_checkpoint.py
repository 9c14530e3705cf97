"""States as bytes: they come back as they were, and reading them runs no code."""

from __future__ import annotations

import io
import math
import os
import pickle

import numpy as np
import pytest

from horovod_fftcomp.engine import checkpoint


def test_a_state_comes_back_as_it_was():
    arrays = {
        "a/b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "complex": np.array([1 + 2j, np.nan], np.complex64),
        "bytes": np.zeros(0, np.uint8),
        "__array__": np.array(7, np.int64),
    }
    saved = {"version": 1, "density": None, "best": math.inf, "state": {"residual": arrays}}
    states = [saved, {**saved, "recovery": {"better": "lower", "best": np.float32(0.5)}}]
    read = checkpoint.unpack(checkpoint.pack(checkpoint.gathered(states)))
    found = [each.pop("state") for each in read["ranks"]]
    assert read == {
        "version": 1,
        "world_size": 2,
        "ranks": [
            {"version": 1, "density": None, "best": math.inf},
            {
                "version": 1,
                "density": None,
                "best": math.inf,
                "recovery": {"better": "lower", "best": 0.5},
            },
        ],
    }
    for state in found:
        for name, array in state["residual"].items():
            assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
            np.testing.assert_array_equal(array, arrays[name])
    assert checkpoint.unpack(checkpoint.pack(None)) is None


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([object()])])
def test_what_is_no_state_is_not_written(value):
    with pytest.raises(TypeError, match="cannot be part of a state"):
        checkpoint.pack({"state": value})


class _Malicious:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(tmp_path, protocol):
    data = pickle.dumps({"version": 1, "state": _Malicious(str(tmp_path / "ran"))}, protocol)
    with pytest.raises(ValueError, match=r"is a pickle|no state of a compressor") as caught:
        checkpoint.unpack(data)
    assert not (tmp_path / "ran").exists()
    if protocol >= 2:  # as checkpoints had it
        assert "load_state_dict(pickle.loads(data))" in str(caught.value)


def test_a_pickle_inside_of_a_state_is_refused_and_not_run(tmp_path):
    array = np.array([_Malicious(str(tmp_path / "ran"))], object)
    np.savez(tmp_path / "state.npz", **{"state.json": array})
    with pytest.raises(ValueError, match="no state of a compressor"):
        checkpoint.unpack((tmp_path / "state.npz").read_bytes())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("cut", [0, 1, 30, -1])
def test_bytes_that_are_cut_short_are_refused(cut):
    data = checkpoint.pack({"state": {"residual": {"a": np.ones(100, np.float32)}}})
    with pytest.raises(ValueError, match="no state of a compressor"):
        checkpoint.unpack(data[:cut])


def test_damaged_bytes_are_refused_with_a_value_error():
    data = checkpoint.pack({"state": {"residual": {"a": np.arange(20, dtype=np.float32)}}})
    draw, others = np.random.default_rng(0), set()
    for _ in range(2000):
        damaged = bytearray(data)
        for position in draw.integers(0, len(data), 2):
            damaged[position] = draw.integers(256)
        try:
            checkpoint.unpack(bytes(damaged))
        except ValueError:
            continue  # what is damaged may also lie where nothing is read
        except Exception as error:
            others.add(repr(error))
    plain = io.BytesIO()
    np.save(plain, np.arange(3))
    nested = io.BytesIO()
    np.savez(nested, **{"state.json": np.frombuffer(b"[" * 100_000, np.uint8)})
    for file in (plain, nested):
        with pytest.raises(ValueError, match="no state of a compressor"):
            checkpoint.unpack(file.getvalue())
    assert not others


def test_keys_that_are_no_strings_are_not_written():
    with pytest.raises(TypeError, match="keys"):
        checkpoint.pack({"state": [{1: 2}]})
