"""Memory that kernels allocate: all of it is freed, whatever the recipe."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys

from horovod_fftcomp import get_scheme, list_compressors
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.schemes import Scheme, Tensor
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.simulation import exchange_once

# The first is too small for a sample of its keys.
SMALL = (Tensor("a", (20, 10)), Tensor("b", (300, 200)), Tensor("c", (1000, 500)))
LARGE = (Tensor("a", (1500, 1500)),)  # its keys are counted while coefficients are computed
CASES = [(get_scheme(recipe), SMALL) for recipe in list_compressors()]
CASES += [(get_scheme(recipe), LARGE) for recipe in ("topk", "fft", "demo")]
CASES += [(Allgather(get_scheme("topk").codec, decay=0.9), SMALL)]


def kept_by_kernels(scheme: Scheme, tensors: tuple[Tensor, ...], n_steps: int = 4) -> int:
    """Return how many blocks are not freed after the last of some steps that were after two."""
    rng, policy = np.random.default_rng(0), always(scheme)
    engines = [Engine([Bucket(tensors, policy)], rank, 2) for rank in range(2)]
    grads = [[[rng.standard_normal(t.shape, np.float32).ravel() for t in tensors]] for _ in "ab"]
    kept = []
    for _ in range(2 + n_steps):
        exchange_once(engines, grads, random.Random(0))
        for engine in engines:
            engine.settle()
        gc.collect()
        found = rtsys.get_allocation_stats()
        kept.append(found.alloc - found.free)
    return kept[-1] - kept[1]


@pytest.fixture
def counted():
    """Have Numba count what kernels allocate and free."""
    _nrt_python.memsys_enable_stats()
    yield
    _nrt_python.memsys_disable_stats()


@pytest.mark.parametrize(("scheme", "tensors"), CASES)
def test_kernels_free_what_they_allocate(counted, scheme, tensors, n_threads):
    assert kept_by_kernels(scheme, tensors) <= 0
