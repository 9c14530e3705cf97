"""Old and new state of an exchange, by tensor, for schemes whose state has one array a tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.kernels.cuda import is_on_host
from horovod_fftcomp.kernels.ops import Ops
from horovod_fftcomp.kernels.plans import BucketPlan
from horovod_fftcomp.schemes import Grads, State
from horovod_fftcomp.types import OldState, Tensor, Tensors


def bucket_plan(tensors: Tensors) -> BucketPlan:
    """Return the plan of a bucket for element-wise ops, always the same object."""
    return _bucket_plan(tuple(tensors))


@functools.lru_cache(maxsize=1024)  # more than a training has buckets
def _bucket_plan(tensors: tuple[Tensor, ...]) -> BucketPlan:
    return BucketPlan([math.prod(tensor.shape) for tensor in tensors])


def old_arrays(ops: Ops, kind: str, state: OldState, tensors: Tensors, grads: Grads) -> list[Any]:
    """Return the old state of each tensor, where ``ops`` work; None if there is none or frozen.

    ``kind``: of float32 elements, one for each of the tensor.
    """
    arrays = state.get(kind, {})
    return [
        None
        if grad is None
        else ops.checked(kind, arrays.get(tensor.name), math.prod(tensor.shape))
        for tensor, grad in zip(tensors, grads, strict=True)
    ]


def named(tensors: Tensors, arrays: Sequence[Any]) -> dict[str, Any]:
    """Return arrays by the names of their tensors, without None."""
    pairs = zip(tensors, arrays, strict=True)
    return {tensor.name: array for tensor, array in pairs if array is not None}


def new_state(
    tensors: Tensors, grads: Grads, old: OldState, new: Mapping[str, Sequence[Any]]
) -> State:
    """Return the new arrays by kind and name, without None, and the old ones of frozen tensors."""
    state = {}
    for kind, arrays in new.items():
        before = old.get(kind, {})
        triples = zip(tensors, grads, arrays, strict=True)
        kept = [_alone(before.get(t.name)) if grad is None else a for t, grad, a in triples]
        state[kind] = named(tensors, kept)
    return state


def _alone(array: Any) -> Any:
    """Return a NumPy array that keeps no larger one alive, as a part of a bucket's array would."""
    base = array.base if is_on_host(array) else None
    is_part = isinstance(base, np.ndarray) and base.nbytes > 2 * array.nbytes
    return array.copy() if is_part else array
