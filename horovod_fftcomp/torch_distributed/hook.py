"""Communication hook of DDP, and what is left of it in a copy of the model.

DDP reads its annotations at run time, so this file has no ``from __future__ import annotations``.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from horovod_fftcomp.errors import UnsupportedError


class HookState:
    """State of the hook, which passes buckets to ``compressor``; a copy has no compressor.

    DDP keeps it in an attribute, so ``copy.deepcopy`` and ``torch.save`` of the model find it. They
    make a model without the hook.
    """

    def __init__(self, compressor: Any = None) -> None:
        self._compressor = compressor

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future of a bucket's averages over all ranks."""
        if self._compressor is None:
            raise UnsupportedError("a copy of a model has no compressor; call compress(copy)")
        future: torch.futures.Future[torch.Tensor] = self._compressor.exchange(bucket)
        return future

    def __reduce__(self) -> Any:
        return HookState, ()


class CopyNote:
    """Forward pre-hook that does nothing, but warns once when a copy of the model is trained."""

    def __init__(self, is_copy: bool = False) -> None:
        self.is_copy = is_copy

    def __call__(self, model: torch.nn.Module, inputs: Any) -> None:
        """Warn if ``model`` is a copy and this pass trains it."""
        if self.is_copy and model.training and torch.is_grad_enabled():
            self.is_copy = False
            warnings.warn(
                "this copy of a compressed model is trained without compression, since copies have "
                "no compressor; call compress(copy) if its gradients are to be compressed",
                RuntimeWarning,
                stacklevel=3,
            )

    def __reduce__(self) -> Any:
        return CopyNote, (True,)


def note_copies(model: torch.nn.Module) -> None:
    """Let copies of ``model``, which now has a compressor, say that they have none."""
    notes = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, CopyNote)]
    for note in notes:
        note.is_copy = False
    if not notes:
        model.register_forward_pre_hook(CopyNote())


def exchange_bucket(
    state: HookState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Return the future of a bucket's averages over all ranks."""
    return state.exchange(bucket)
