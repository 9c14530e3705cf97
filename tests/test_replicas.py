"""Equal bytes hash alike, others do not; every tensor has its turn; odd ranks are named."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_fftcomp.monitor.parameter_hash import (
    Rotation,
    describe,
    find_differences,
    hash_bytes,
)
from tests.loops import each
from tests.reference_hash import hash_bytes_reference

ROW = 512  # bytes: 64 lanes of 8


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def check_hash(array):
    before = array.copy()
    assert hash_bytes(array) == hash_bytes_reference(array)
    assert 0 <= hash_bytes(array) < 2**64
    np.testing.assert_array_equal(array.reshape(-1).view(np.uint8), before.reshape(-1).view("u1"))


@pytest.mark.parametrize("fill", ["random", "zeros", "ones"])
def test_the_hash_equals_its_reference_at_every_small_size(fill):
    sizes = [*range(101), *range(ROW - 9, ROW + 10), *range(3 * ROW - 9, 3 * ROW + 10)]
    for nbytes in sizes:
        array = random_bytes(nbytes)
        if fill != "random":
            array[:] = 0 if fill == "zeros" else 255
        check_hash(array)


@pytest.mark.parametrize("nbytes", [10**6, 2**20, 2**20 - 1, 2**20 + 13])
def test_the_hash_equals_its_reference_at_a_million_bytes(nbytes):
    check_hash(random_bytes(nbytes))


def test_the_place_in_memory_does_not_count():
    content = random_bytes(5 * ROW + 77)
    memory = np.zeros(content.size + 64, np.uint8)
    for offset in range(17):
        view = memory[offset : offset + content.size]
        view[:] = content
        assert hash_bytes(view) == hash_bytes_reference(view) == hash_bytes(content)


def test_strides_writability_and_shape_do_not_count():
    array = np.random.default_rng(1).standard_normal((40, 30)).astype(np.float32)
    expected = hash_bytes(array)
    frozen = array.copy()
    frozen.flags.writeable = False
    doubled = np.repeat(array, 2, axis=1)
    for same in (frozen, array.copy(order="F"), doubled[:, ::2], array.reshape(-1), array[None]):
        assert hash_bytes(same) == hash_bytes_reference(same) == expected
    assert hash_bytes(array.T) != expected


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", "c8", "c16", "?", "i1", "i4", "u8", ml_dtypes.bfloat16]
)
@each("shape", [(), (0,), (0, 3), (1,), (7, 3), (300, 5)])
def test_every_dtype_and_shape_is_hashed(dtype, shape):
    check_hash(np.asarray(np.random.default_rng(2).uniform(-9, 9, shape)).astype(dtype))


def test_references_to_objects_are_refused():
    with pytest.raises(TypeError, match="references"):
        hash_bytes(np.array([None]))


def test_each_flipped_bit_changes_the_hash_and_no_two_alike():
    # Two alike would be two flips that undo each other.
    array = random_bytes(2 * ROW + 8 * 3 + 5)
    hashes = {hash_bytes(array)}
    for bit in range(8 * array.size):
        array[bit // 8] ^= 1 << bit % 8
        hashes.add(hash_bytes(array))
        array[bit // 8] ^= 1 << bit % 8
    assert len(hashes) == 1 + 8 * array.size


@given(st.integers(1, 5000), st.integers(0, 99), st.data())
def test_any_flipped_bit_changes_the_hash(nbytes, seed, data):
    array = random_bytes(nbytes, seed)
    before = hash_bytes(array)
    bit = data.draw(st.integers(0, 8 * nbytes - 1))
    array[bit // 8] ^= 1 << bit % 8
    assert hash_bytes(array) != before
    array[bit // 8] ^= 1 << bit % 8
    assert hash_bytes(array) == before


@given(st.integers(2, 900), st.sampled_from([np.uint16, np.uint32, np.uint64]), st.data())
def test_any_two_swapped_words_change_the_hash(n_words, dtype, data):
    array = random_bytes(n_words * np.dtype(dtype).itemsize).view(dtype)
    places = st.integers(0, n_words - 1)
    i, j = data.draw(st.lists(places, min_size=2, max_size=2, unique=True))
    swapped = array.copy()
    swapped[[i, j]] = array[[j, i]]
    if array[i] != array[j]:
        assert hash_bytes(swapped) != hash_bytes(array)


@pytest.mark.parametrize("bit", [0, 1, 29, 31, 34, 35, 62, 63])
def test_words_that_differ_in_one_bit_are_told_apart_by_place(bit):
    # Products carry a difference upward only: without a rotation, swapped signs would cancel.
    n_words = 200
    hashes = set()
    for place in range(n_words):
        array = random_bytes(8 * n_words).view(np.uint64).copy()
        array[:] = array[0]
        array[place] ^= np.uint64(1 << bit)
        hashes.add(hash_bytes(array))
    assert len(hashes) == n_words


def test_negating_any_two_numbers_changes_the_hash():
    array = np.random.default_rng(3).standard_normal(400).astype(np.float32)
    hashes = {hash_bytes(array)}
    for first in (0, 1, 7):
        for second in range(first + 1, 400):
            array[[first, second]] *= -1
            hashes.add(hash_bytes(array))
            array[[first, second]] *= -1
    assert len(hashes) == 1 + 399 + 398 + 392


def test_zeros_of_different_lengths_hash_differently():
    assert len({hash_bytes(np.zeros(n, np.uint8)) for n in range(3 * ROW)}) == 3 * ROW


def test_positive_and_negative_zero_are_different_bytes():
    assert hash_bytes(np.array([0.0])) != hash_bytes(np.array([-0.0]))


def test_importing_the_module_does_not_load_numba():
    script = "import sys, horovod_fftcomp.monitor.parameter_hash; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@st.composite
def rotations(draw):
    nbytes = draw(st.lists(st.integers(0, 10**10) | st.integers(0, 9), max_size=40))
    every = draw(st.integers(1, 20))
    within = draw(st.integers(every, 200))
    return nbytes, within, every


@given(rotations(), st.integers(0, 10**6))
def test_every_tensor_has_its_turn_within_any_steps_in_a_row(case, start):
    nbytes, within, every = case
    rotation = Rotation(nbytes, within, every)
    steps = range(start, start + within)
    turns = [index for step in steps for index in rotation.due(step)]
    assert set(turns) == set(range(len(nbytes)))
    assert not any(len(rotation.due(step)) for step in steps if step % every)
    if within % every == 0:
        assert len(turns) == len(nbytes)


@given(rotations())
def test_groups_are_of_about_equal_bytes(case):
    nbytes, within, every = case
    rotation = Rotation(nbytes, within, every)
    n_groups = within // every
    groups = [rotation.due(step) for step in range(0, n_groups * every, every)]
    assert [index for group in groups for index in group] == list(range(len(nbytes)))
    for group in groups:
        own = [nbytes[index] for index in group]
        assert n_groups * sum(own) <= sum(nbytes) + n_groups * max(own, default=0)
        if any(size and n_groups * size >= 2 * sum(nbytes) for size in own):
            assert len([size for size in own if size]) == 1


def test_equal_tensors_are_spread_evenly():
    rotation = Rotation([4] * 20, within=100, every=10)
    assert [len(rotation.due(step)) for step in range(0, 100, 10)] == [2] * 10
    assert list(rotation.due(30)) == list(rotation.due(130)) == [6, 7]
    assert len(rotation.due(31)) == 0


def test_a_huge_tensor_has_a_group_to_itself():
    rotation = Rotation([1, 1, 10**9, 1], within=40, every=10)
    groups = [list(rotation.due(step)) for step in (0, 10, 20, 30)]
    assert groups == [[0, 1], [], [2], [3]]


@pytest.mark.parametrize(("within", "every"), [(9, 10), (0, 0), (10, 0), (10, -1), (-10, -20)])
def test_impossible_rotations_are_refused(within, every):
    with pytest.raises(ValueError, match=r"every must lie in \[1, within\]"):
        Rotation([1], within, every)


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match="negative, got -1"):
        Rotation([3, -1])


@given(st.integers(1, 12), st.integers(0, 8), st.data())
def test_the_ranks_outside_a_majority_are_found(n_ranks, n_tensors, data):
    names = [f"layer{index}.weight" for index in range(n_tensors)]
    hashes = st.integers(0, 2**64 - 1)
    gathered = np.empty((n_ranks, n_tensors), np.uint64)
    expected = {}
    for column, name in enumerate(names):
        gathered[:, column] = common = data.draw(hashes)
        ranks = st.sets(st.integers(0, n_ranks - 1), max_size=(n_ranks - 1) // 2)
        odd = sorted(data.draw(ranks))
        for rank in odd:
            gathered[rank, column] = data.draw(hashes.filter(lambda h, common=common: h != common))
        if odd:
            expected[name] = odd
    assert find_differences(gathered, names) == expected
    assert list(find_differences(gathered, names)) == list(expected)


@pytest.mark.parametrize(
    ("hashes", "odd"),
    [([1, 2], [1]), ([1, 2, 3], [1, 2]), ([2, 1, 1, 2], [1, 2]), ([3, 1, 1, 2, 2], [0, 3, 4]),
     ([3, 2, 2, 1, 1], [0, 3, 4])],
)  # fmt: skip
def test_ties_go_to_the_value_of_the_lowest_rank(hashes, odd):
    assert find_differences(np.array([hashes], np.uint64).T, ["w"]) == {"w": odd}


def test_hashes_that_differ_in_the_last_bit_are_told_apart():
    gathered = np.array([[2**64 - 1], [2**64 - 2], [2**64 - 1]], np.uint64)
    assert find_differences(gathered, ["w"]) == {"w": [1]}


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 3, 1)])
def test_gathered_hashes_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"shape \(ranks, 3\).*got \(2"):
        find_differences(np.zeros(shape, np.uint64), ["a", "b", "c"])


def test_the_message_names_tensors_ranks_causes_and_mends():
    text = describe({"layer1.weight": [3], "layer2.bias": [0, 2]})
    assert "'layer1.weight' on rank 3, 'layer2.bias' on ranks 0, 2." in text
    for word in ("broadcast", "checkpoint", "hardware", "restart"):
        assert word in text
    assert "more" not in text


def test_long_messages_are_cut_short():
    text = describe({f"w{index}": list(range(index + 1)) for index in range(11)})
    assert "'w7' on ranks 0, 1, 2, 3, 4, 5, 6, 7, and 3 more." in text
    assert "w8" not in text
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more" in describe({"w": range(100)})
    assert "more." not in describe({f"w{index}": [1] for index in range(8)})


def test_no_difference_is_said_to_be_none():
    assert describe({}) == "all ranks hold the same values"
