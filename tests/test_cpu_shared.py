"""Kernels of schemes with shared positions: the CPU's bytes are the reference's."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from horovod_fftcomp import get_scheme
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.kernels import cpu
from horovod_fftcomp.kernels.cpu import addresses
from horovod_fftcomp.kernels.host.ops import HOST
from horovod_fftcomp.kernels.index_plan import IndexPlan
from horovod_fftcomp.schemes import Round, Tensor
from tests import reference
from tests.contracts import SHARED_RECIPES
from tests.loops import each

SIZES = [0, 1, 2, 63, 64, 65, 4095, 4097, 70_001]


def values(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def bucket_of(grads, residuals, beta=1.0, chunk=100):
    """Return a bucket for the ops of the host; its gradients may have any sizes."""
    numels = [0 if grad is None else grad.size for grad in grads]
    counts, names = [-(-n // chunk) for n in numels], tuple(f"t{i}" for i in range(len(numels)))
    begins = np.zeros(1, np.int64)  # no sketch
    plan = IndexPlan(names, numels, counts, 1, beta, False, True, chunk, 32, begins)
    return HOST.common_index(plan, grads, residuals, False)


def low_pass(grad, residual, beta):
    bucket = bucket_of([grad], [residual], beta)
    (left,) = HOST.low_pass(bucket)
    return left, bucket.peaks[0]


def chunk_winners(grad, residual, chunk):
    bucket = bucket_of([grad], [residual], chunk=chunk)
    count = bucket.plan.total
    packed = HOST.winners(bucket, 0, count, bucket.plan.offsets_nbytes(count))
    return cpu.unpack_bits(packed, count, 32)


@each("n", SIZES)
@each("beta", [1.0, 0.1])
@pytest.mark.usefixtures("n_threads")
def test_low_pass_is_the_reference(n, beta):
    grad, residual = values(n), values(n, 1)
    for carried in (None, residual):
        left, peak = low_pass(grad, carried, beta)
        expected, expected_peak = reference.low_pass(grad, carried, beta)
        assert left.tobytes() == expected.tobytes()
        assert peak == expected_peak
    assert grad.tobytes() == values(n).tobytes()
    assert residual.tobytes() == values(n, 1).tobytes()


def test_arrays_of_another_size_are_refused():
    with pytest.raises(
        ValueError, match=r"tensor 't0': the residual is .* 99\), expected .* 100\)"
    ):
        bucket_of([values(100)], [values(99)])
    with pytest.raises(ValueError, match=r"tensor 't0': the residual is .*float64"):
        bucket_of([values(100)], [values(100).astype(np.float64)])


def calls_of_a_step(recipe, n_tensors):
    """Return how many functions Python calls in a step with ``n_tensors`` small tensors."""
    tensors = tuple(Tensor(f"layer{i}.weight", (64, 64)) for i in range(n_tensors))
    engine = Engine([Bucket(tensors, always(get_scheme(recipe)))], 0, 1)
    grads, calls = [values(4096) for _ in tensors], []

    def step():
        made = engine.resume(0, grads)
        while isinstance(made, Round):
            made = engine.resume(0, made.data)
        engine.settle()

    for _ in range(3):
        step()
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    step()
    sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in calls)


@each("recipe", SHARED_RECIPES)
def test_a_small_tensor_more_in_a_bucket_costs_few_calls(recipe):
    """Each call of NumPy or a kernel takes about a microsecond, as the values of 4 KiB do."""
    assert calls_of_a_step(recipe, 60) - calls_of_a_step(recipe, 20) < 40 * 20


def test_addresses_are_those_of_the_data(monkeypatch):
    arrays = [values(100), None, values(100)[7:], np.zeros(0, np.float32)]
    expected = [0 if array is None else array.ctypes.data for array in arrays]
    for how in ("fast", "portable"):
        found = np.ones(len(arrays), np.int64)
        addresses.addresses_of(arrays, found)
        assert found.tolist() == expected, how
        monkeypatch.setattr(addresses, "data_is_found", lambda: False)
        monkeypatch.setattr(addresses, "FOUND", [])


@each("bad", [np.nan, np.inf])
@each("at", [0, 5000, 70_000])
def test_a_bad_value_is_seen_wherever_it_lies(bad, at):
    grad = values(70_001)
    grad[at] = bad
    for carried in (None, values(70_001, 1)):
        with np.errstate(invalid="ignore"):
            assert low_pass(grad, carried, 0.5)[1] >= 0x7F800000
        winners = chunk_winners(grad, carried, 100)
        assert winners.tolist() == reference.chunk_winners(grad, carried, 100).tolist()


@each("n", SIZES)
@each("chunk", [1, 2, 7, 100, 5000])
@pytest.mark.usefixtures("n_threads")
def test_winners_are_the_reference(n, chunk):
    few = np.random.default_rng(2).integers(-2, 3, n).astype(np.float32)  # with many ties
    for grad in (values(n), few, np.zeros(n, np.float32)):
        for carried in (None, values(n, 1)):
            winners = chunk_winners(grad, carried, chunk)
            assert winners.dtype == np.uint32
            assert winners.tolist() == reference.chunk_winners(grad, carried, chunk).tolist()


@each("n", SIZES)
@each("bits", [1, 2, 3, 7, 8, 11, 16, 32])
def test_packed_bits_are_the_reference(n, bits):
    codes = np.random.default_rng(3).integers(0, 2**bits, n, np.uint32)
    packed = cpu.pack_bits(codes, bits)
    assert packed.tobytes() == reference.pack_bits(codes, bits).tobytes()
    assert packed.size == (n * bits + 7) // 8
    for kernels in (cpu, reference):
        assert kernels.unpack_bits(packed, n, bits).tolist() == codes.tolist()


@each("n", SIZES)
@each("share", [0.0, 0.01, 0.5, 1.0])
def test_positions_of_a_bitmap_are_the_reference(n, share):
    positions = np.flatnonzero(np.random.default_rng(4).random(n) < share)
    bitmap = reference.bitmap_of(positions, n)
    for kernels in (cpu, reference):
        found = kernels.positions_of(bitmap)
        assert found.dtype == np.int64
        assert found.tolist() == positions.tolist()
