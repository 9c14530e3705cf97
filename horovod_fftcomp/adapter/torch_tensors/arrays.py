"""Conversions between PyTorch tensors and the arrays that the core works on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from horovod_fftcomp.engine.engine import Engine


def flat_float32(grads: Iterable[torch.Tensor | None], in_place: bool = False) -> list[Any]:
    """Return ``grads`` as 1-D float32 arrays in C order, None for None; no copy without need.

    C order does not depend on strides, so ranks with different memory formats agree. Tensors on a
    GPU are copied to the host, or with ``in_place`` returned as tensors on it.
    """
    if in_place:
        return [g if g is None else g.detach().to(torch.float32).reshape(-1) for g in grads]
    return [
        None if grad is None else grad.detach().to("cpu", torch.float32).reshape(-1).numpy()
        for grad in grads
    ]


def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int32 tensor of one element on its device: 1 if any value is not finite, else 0."""
    return (~torch.isfinite(tensor).all()).to(torch.int32).reshape(1)


def observe(engine: Engine, tensor: torch.Tensor) -> bool:
    """Tell the engine whether ``tensor`` is finite; return False if it is known not to be.

    On a GPU that computes steps it does not wait for the result and returns True.
    """
    if engine.device is not None:
        engine.observe_on_device(not_finite(tensor))
        return True
    finite = bool(torch.isfinite(tensor).all())
    engine.observe(finite)
    return finite


def sendable(grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` in a form that Horovod accepts: contiguous, and float32 for bfloat16."""
    return (grad.float() if grad.dtype is torch.bfloat16 else grad).contiguous()


def to_torch(state: Any) -> Any:
    """Return nested dicts and lists with their NumPy arrays converted to tensors."""
    return _mapped(state, np.ndarray, torch.from_numpy)


def to_numpy(state: Any) -> Any:
    """Return nested dicts and lists with their tensors converted to NumPy arrays."""
    return _mapped(state, torch.Tensor, lambda tensor: tensor.detach().cpu().numpy())


def _mapped(state: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {key: _mapped(value, kind, convert) for key, value in state.items()}
    if isinstance(state, list):
        return [_mapped(value, kind, convert) for value in state]
    return convert(state) if isinstance(state, kind) else state
