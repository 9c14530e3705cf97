"""Communication hook of DDP, and what is left of it in a copy of the model.

DDP reads its annotations at run time, so this file has no ``from __future__ import annotations``.
"""

from typing import Any

import torch
import torch.distributed as dist

from horovod_fftcomp.errors import UnsupportedError, warn


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


class PassNote:
    """Forward pre-hook that notes passes under ``no_sync``, and training of a copy of the model."""

    def __init__(self, is_copy: bool = False) -> None:
        self.is_copy = is_copy
        self._seen: list[int] = []  # versions of the weights in the last pass under no_sync

    def __call__(self, model: Any, inputs: Any) -> None:
        """Note a pass; warn once if ``model`` is a copy and this pass trains it."""
        if torch.is_grad_enabled() and not model.require_backward_grad_sync:
            self._seen = _versions(model)
        if self.is_copy and model.training and torch.is_grad_enabled():
            self.is_copy = False
            warn(
                "this copy of a compressed model is trained without compression, since copies have "
                "no compressor; call compress(copy) if its gradients are to be compressed"
            )

    def __reduce__(self) -> Any:
        return PassNote, (True,)

    def is_perturbed(self, model: Any) -> bool:
        """Return whether weights have changed between a pass under ``no_sync`` and the present one.

        Then ranks may differ on purpose: sharpness-aware minimization (SAM) adds to the weights
        what each rank's own gradients say, and takes it off before the optimizer's step.
        """
        seen, self._seen = self._seen, []
        is_exchanged = model.require_backward_grad_sync  # not so under LocalSteps
        return is_exchanged and bool(seen) and seen != _versions(model)

    def forget(self) -> None:
        """Note that an optimizer changes the weights, on all ranks alike."""
        self._seen = []


def _versions(model: torch.nn.Module) -> list[int]:
    return [weight._version for weight in model.parameters() if weight.requires_grad]


def note_passes(model: torch.nn.Module) -> PassNote:
    """Return the note of ``model``, which now has a compressor and is no copy any more."""
    notes = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, PassNote)]
    note = notes[0] if notes else PassNote()
    note.is_copy = False
    if not notes:
        model.register_forward_pre_hook(note)
    return note
