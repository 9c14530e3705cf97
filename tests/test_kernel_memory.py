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
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once

# One below a sample's size, one with a few pieces if there are several threads.
TENSORS = (Tensor("a", (20, 10)), Tensor("b", (300, 200)), Tensor("c", (1000, 500)))


def kept_by_kernels(recipe: str, options: dict, n_steps: int) -> int:
    """Return how many blocks are not freed after the last of some steps that were after two."""
    rng, scheme = np.random.default_rng(0), get_scheme(recipe)
    policy = always(scheme if not options else type(scheme)(scheme.codec, **options))
    engines = [Engine([Bucket(TENSORS, policy)], rank, 2) for rank in range(2)]
    grads = [[[rng.standard_normal(t.shape, np.float32).ravel() for t in TENSORS]] for _ in "ab"]
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


@pytest.mark.parametrize("recipe", list_compressors())
def test_kernels_free_what_they_allocate(counted, recipe, n_threads):
    assert kept_by_kernels(recipe, {}, 4) <= 0
    if recipe == "topk":
        assert kept_by_kernels(recipe, {"decay": 0.9}, 4) <= 0
