"""``TensorCompressor``, the part of the PyTorch compressors that needs no launcher."""

from __future__ import annotations

from typing import Any

import torch

from horovod_fftcomp.adapter.compressor import Compressor
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.torch_tensors import arrays
from horovod_fftcomp.adapter.torch_tensors.parameters import with_plain_names
from horovod_fftcomp.engine.policy import Scheduled


class TensorCompressor(Compressor):
    """Compressor whose methods take and return tensors in place of arrays."""

    def __init__(self, policy: Scheduled, settings: Settings) -> None:
        super().__init__(policy, settings)
        scaler = settings.grad_scaler
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise TypeError(
                f"grad_scaler must have get_scale(), as torch.amp.GradScaler has; "
                f"got {type(scaler).__name__}"
            )

    def residual(self, name: str) -> torch.Tensor:
        """Return the residual of the parameter ``name``: float32, in the parameter's shape."""
        return torch.from_numpy(super().residual(name))

    def _of_framework(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with its NumPy arrays converted to tensors."""
        return arrays.to_torch(state)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on this rank, or a gathered one."""
        super().load_state_dict(with_plain_names(arrays.to_numpy(saved)))
