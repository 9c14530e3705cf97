"""Steps of several ranks on an emulated GPU and on the CPU, to be compared."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once

TENSORS = (Tensor("a", (100, 90)), Tensor("b", (3000,)), Tensor("c", (50, 70)))


def make_engines(device, recipe, n_ranks=2, **options):
    policy = make_policy(recipe, **options)
    buckets = [Bucket(TENSORS[:2], policy), Bucket(TENSORS[2:], policy)]
    return [Engine(buckets, rank, n_ranks, device) for rank in range(n_ranks)]


def random_grads(rng, n_ranks=2):
    def grad(tensor):
        return rng.standard_t(3, math.prod(tensor.shape)).astype(np.float32)

    return [[[grad(t) for t in TENSORS[:2]], [grad(TENSORS[2])]] for _ in range(n_ranks)]


def run_step(engines, grads):
    """Return the sums of a step, the same on all ranks."""
    exchange_once(engines, grads, random.Random(0))
    sums = [[total for bucket in (0, 1) for total in engine.sums(bucket)] for engine in engines]
    for others in sums[1:]:
        for ours, theirs in zip(sums[0], others, strict=True):
            assert ours.tobytes() == theirs.tobytes()
    found = [np.array(total) for total in sums[0]]
    for engine in engines:
        engine.settle()
    return found


def assert_same_step(cpu, gpu, grads, tolerance=0.0):
    """Take a step on both; the sums are the same, or as close as ``tolerance`` of the largest."""
    for ours, theirs in zip(run_step(gpu, grads), run_step(cpu, grads), strict=True):
        assert tolerance or ours.tobytes() == theirs.tobytes()
        scale = np.nan_to_num(np.abs(theirs)).max()
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)


def assert_same_account(cpu, gpu, skipped_steps, tolerance=0.0):
    """Both have dropped so many steps, sent and lost the same, and carry the same residuals."""
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.costs.skipped_steps == theirs.costs.skipped_steps == skipped_steps
        assert ours.costs.sent_nbytes == theirs.costs.sent_nbytes
        assert ours.costs.inside_nbytes == theirs.costs.inside_nbytes
        assert ours.costs.total_error == pytest.approx(theirs.costs.total_error, rel=1e-5)
        assert ours.costs.relative_error == pytest.approx(theirs.costs.relative_error, rel=1e-5)
        assert ours.costs.similarity == theirs.costs.similarity
        for tensor in TENSORS:
            found, wanted = ours.residual(tensor.name), theirs.residual(tensor.name)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * 10)
