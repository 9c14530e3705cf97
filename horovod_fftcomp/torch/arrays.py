"""Torch tensors as the NumPy arrays that the core works on, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def flat_float32(grad: torch.Tensor) -> np.ndarray:
    """Return ``grad`` in C order as float32 1-D; shares its memory where it is that already.

    C order does not depend on strides, so ranks with other memory formats still agree. A tensor
    on a GPU is copied to the host.
    """
    return grad.detach().to("cpu", torch.float32).reshape(-1).numpy()


def flat_in_place(grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` in C order as float32 1-D where it is; no copy if it is that already."""
    return grad.detach().to(torch.float32).reshape(-1)


def gradient_like(
    values: np.ndarray | torch.Tensor, factor: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Return ``values * factor`` in shape, dtype, strides and device of ``grad``.

    ``values``: flat float32, overwritten. ``factor``: float32, one element.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    scaled = tensor.mul_(factor.to(tensor.device))
    return restored(scaled.view(grad.shape), grad)


def not_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return one int32 word, where ``tensor`` is: 1 if something in it is not finite."""
    return (~torch.isfinite(tensor).all()).to(torch.int32).reshape(1)


def sendable(grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` as Horovod accepts it: contiguous, and not bfloat16."""
    return (grad.float() if grad.dtype is torch.bfloat16 else grad).contiguous()


def restored(reduced: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return ``reduced`` in dtype, strides and device of ``grad``, itself if it has them.

    The strides matter: Horovod hands the result to ``grad.set_``, which would drop a
    channels-last layout.
    """
    same = (reduced.dtype, reduced.stride(), reduced.device) == (
        grad.dtype,
        grad.stride(),
        grad.device,
    )
    return reduced if same else torch.empty_like(grad).copy_(reduced)


def to_torch(state: Any) -> Any:
    """Return nested dicts and lists with tensors in the place of NumPy arrays."""
    return _mapped(state, np.ndarray, torch.from_numpy)


def to_numpy(state: Any) -> Any:
    """Return nested dicts and lists with NumPy arrays in the place of tensors."""
    return _mapped(state, torch.Tensor, lambda tensor: tensor.detach().cpu().numpy())


def _mapped(state: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(state, dict):
        return {key: _mapped(value, kind, change) for key, value in state.items()}
    if isinstance(state, list):
        return [_mapped(value, kind, change) for value in state]
    return change(state) if isinstance(state, kind) else state
