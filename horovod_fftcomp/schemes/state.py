"""Old and new state of an exchange, by tensor, for schemes whose state has one array a tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from horovod_fftcomp.errors import check_share
from horovod_fftcomp.kernels.cuda import Device, is_on_host
from horovod_fftcomp.kernels.ops import Ops
from horovod_fftcomp.kernels.plans import BucketPlan
from horovod_fftcomp.schemes import Context, Grads, Scheme, State
from horovod_fftcomp.types import OldState, Tensor, Tensors


@dataclass(frozen=True, kw_only=True)
class LowPass(Scheme):
    """Base of schemes with error feedback whose residuals may have a low-pass filter.

    residual <- (1 - ``beta``) * residual + ``beta`` * (gradient + residual - sent). Source: Chen et
    al., NeurIPS 2020 (ScaleCom).
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        check_share("beta", self.beta, "; 1 means no filter")
        object.__setattr__(self, "beta", float(self.beta))
        if self.beta < 1.0 and not getattr(self, "error_feedback", True):
            raise ValueError("beta is of the residual, so it needs error_feedback=True")

    def spec_parts(self) -> tuple[str, dict[str, object]]:
        """Return name and options for ``spec_of``; without a filter those of earlier versions."""
        names = [f.name for f in fields(self) if f.name != "beta" or self.beta < 1.0]
        return type(self).__dict__["spec_name"], {name: getattr(self, name) for name in names}


def low_passed(
    ops: Ops, tensors: Tensors, state: OldState, residuals: Sequence[Any], beta: float
) -> list[Any]:
    """Return residuals after the filter of ``LowPass``; None for zeros.

    ``residuals``: gradient + residual - sent, which may be written to.
    """
    if beta == 1.0:
        return list(residuals)
    known = state.get("residual", {})
    old = [known.get(tensor.name) for tensor in tensors]
    pairs = zip(old, residuals, strict=True)
    return ops.mix(old, [_zeros_like(b, ops) if a is None else a for b, a in pairs], beta)


def _zeros_like(array: Any, ops: Ops) -> Any:
    """Return the new residual of what is sent whole; on a device only frozen tensors have none."""
    return ops.put(np.zeros_like(array)) if array is not None and is_on_host(array) else None


def bucket_plan(tensors: Tensors) -> BucketPlan:
    """Return the plan of a bucket for element-wise ops, always the same object."""
    return _bucket_plan(tuple(tensors))


@functools.lru_cache(maxsize=1024)  # more than a training has buckets
def _bucket_plan(tensors: tuple[Tensor, ...]) -> BucketPlan:
    return BucketPlan([tensor.numel for tensor in tensors])


def old_arrays(ops: Ops, kind: str, state: OldState, tensors: Tensors, grads: Grads) -> list[Any]:
    """Return the old state of each tensor, where ``ops`` work; None if there is none or frozen.

    ``kind``: of float32 elements, one for each of the tensor.
    """
    arrays = state.get(kind, {})
    return [
        None if grad is None else ops.checked(kind, arrays.get(tensor.name), tensor.numel)
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


def on_the_host(context: Context, grads: Grads, state: OldState) -> tuple[Context, Grads, State]:
    """Return a step's inputs as NumPy arrays, for what the host alone can compute; waits."""
    get = context.ops.get
    there = {
        kind: {name: get(array) for name, array in arrays.items()} for kind, arrays in state.items()
    }
    local = [None if grad is None else get(grad) for grad in grads]
    return context._replace(device=None), local, there


def multiply(arrays: Iterable[Any], factor: float, device: Device | None) -> None:
    """Multiply arrays by ``factor``, in place; they may lie on the ``device``."""
    for array in arrays:
        if device is None or isinstance(array, np.ndarray):
            np.multiply(array, np.float32(factor), out=array)
        else:
            device.scale(array, np.float32(factor))
