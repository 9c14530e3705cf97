"""Kernels of schemes with shared positions: the CPU's bytes are the reference's."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp.kernels import cpu, reference, threads
from tests.loops import each

SIZES = [0, 1, 2, 63, 64, 65, 4095, 4097, 70_001]


def values(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


@pytest.fixture(params=[1, 3])
def n_threads(request):
    before = threads.get_num_threads()
    threads.set_num_threads(request.param)
    yield request.param
    threads.set_num_threads(before)


@each("n", SIZES)
@each("beta", [1.0, 0.1])
@pytest.mark.usefixtures("n_threads")
def test_low_pass_is_the_reference(n, beta):
    grad, residual = values(n), values(n, 1)
    for carried in (None, residual):
        left, peak = cpu.low_pass(grad, carried, beta)
        expected, expected_peak = reference.low_pass(grad, carried, beta)
        assert left.tobytes() == expected.tobytes()
        assert peak == expected_peak
    assert grad.tobytes() == values(n).tobytes()
    assert residual.tobytes() == values(n, 1).tobytes()


@each("bad", [np.nan, np.inf])
@each("at", [0, 5000, 70_000])
def test_a_bad_value_is_seen_wherever_it_lies(bad, at):
    grad = values(70_001)
    grad[at] = bad
    for carried in (None, values(70_001, 1)):
        with np.errstate(invalid="ignore"):
            assert cpu.low_pass(grad, carried, 0.5)[1] >= 0x7F800000
        winners = cpu.chunk_winners(grad, carried, 100)
        assert winners.tolist() == reference.chunk_winners(grad, carried, 100).tolist()


@each("n", SIZES)
@each("chunk", [1, 2, 7, 100, 5000])
@pytest.mark.usefixtures("n_threads")
def test_winners_are_the_reference(n, chunk):
    few = np.random.default_rng(2).integers(-2, 3, n).astype(np.float32)  # with many ties
    for grad in (values(n), few, np.zeros(n, np.float32)):
        for carried in (None, values(n, 1)):
            winners = cpu.chunk_winners(grad, carried, chunk)
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
