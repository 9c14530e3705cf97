"""Conversions between PyTorch tensors and the arrays that the core works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def flat_float32(grad: torch.Tensor) -> np.ndarray:
    """Return ``grad`` as a 1-D float32 array in C order; no copy if it is that already.

    C order does not depend on strides, so ranks with different memory formats agree. A tensor on a
    GPU is copied to the host.
    """
    return grad.detach().to("cpu", torch.float32).reshape(-1).numpy()


def flat_in_place(grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` as 1-D float32 in C order on its device; no copy if it is that already."""
    return grad.detach().to(torch.float32).reshape(-1)


def gradient_like(
    values: np.ndarray | torch.Tensor, factor: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Return ``values * factor`` with the shape, dtype, strides and device of ``grad``.

    ``values``: flat float32, overwritten. ``factor``: float32, one element.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    scaled = tensor.mul_(factor.to(tensor.device))
    return restored(scaled.view(grad.shape), grad)


def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return an int32 tensor of one element on its device: 1 if any value is not finite, else 0."""
    return (~torch.isfinite(tensor).all()).to(torch.int32).reshape(1)


def sendable(grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` in a form that Horovod accepts: contiguous, and float32 for bfloat16."""
    return (grad.float() if grad.dtype is torch.bfloat16 else grad).contiguous()


def restored(reduced: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return ``reduced`` with the dtype, strides and device of ``grad``; no copy if it has them.

    Horovod passes the result to ``grad.set_``, so other strides would drop a channels-last layout.
    """
    same = (reduced.dtype, reduced.stride(), reduced.device) == (
        grad.dtype,
        grad.stride(),
        grad.device,
    )
    return reduced if same else torch.empty_like(grad).copy_(reduced)


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
