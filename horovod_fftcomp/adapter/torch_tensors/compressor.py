"""``TensorCompressor``, the part of the PyTorch compressors that needs no launcher."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from horovod_fftcomp.adapter.compressor import Compressor
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.torch_tensors import arrays
from horovod_fftcomp.adapter.torch_tensors.optimizers import Adam, has_second_moments
from horovod_fftcomp.adapter.torch_tensors.parameters import with_plain_names
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.engine.policy import Scheduled


class TensorCompressor(Compressor):
    """Compressor whose methods take and return tensors in place of arrays."""

    _parameters: OptimizedParameters
    driver: Any
    sends_gradients = True  # False: changes of weights, for ``LocalSteps``

    def __init__(self, policy: Scheduled, settings: Settings) -> None:
        super().__init__(policy, settings)
        # Of optimizers that have taken a step: how many tensors, and whether any of the recipe.
        self._trains: weakref.WeakKeyDictionary[Any, tuple[int, bool]]
        self._trains = weakref.WeakKeyDictionary()
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

    def _warn_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Warn if optimizer and recipe do not go together for the same tensors.

        Returns whether the optimizer trains any tensors of the recipe.
        """
        momenta: dict[str, object] = {}
        tensors = zip(self._parameters.tensors, self._slots, strict=False)  # frozen ones come last
        compressed = {id(tensor) for tensor, slot in tensors if slot is not None}
        trains = False
        for group in optimizer.param_groups:
            if compressed.isdisjoint(map(id, group["params"])):
                continue
            trains = True
            momenta |= {"momentum": group["momentum"]} if group.get("momentum") else {}
            momenta |= {"betas": betas} if any((betas := group.get("betas") or ())[:1]) else {}
        name, of_package = type(optimizer).__name__, isinstance(optimizer, Adam)
        self._warn_of_two_momenta(name, momenta)
        if trains and has_second_moments(optimizer):
            self._warn_of_squares(name, of_package)
        return trains

    def expect_changes(self) -> None:
        """Note that this exchanges changes of weights from now on, no gradients."""
        self.sends_gradients = False
        self.driver.thrown_away.stop()

    def note_used(self) -> None:
        """Note that the last averages are used; ``discard`` cannot undo their exchange any more."""
        self.engine.note_used()

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of an optimizer, and look at it if it is its first."""
        n = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._trains.get(optimizer, (0, False))[0] != n:
            self._trains[optimizer] = n, self._warn_of(optimizer)
        if self._trains[optimizer][1]:
            self.engine.note_used()

    def _await_optimizer(self, always: bool = False) -> None:
        """Call ``_note_step`` at each step of an optimizer, if that or ``always`` is of use."""
        if always:
            _awaiting().add(self)
        for bucket in self._buckets:
            traits = bucket.policy.after_warmup.traits
            if traits.momentum or traits.compresses or traits.is_noisy:
                _awaiting().add(self)


@functools.cache
def _awaiting() -> weakref.WeakSet[TensorCompressor]:
    """Return the compressors that are told of each step of an optimizer.

    PyTorch calls one hook for all of them, which stays: a hook cannot remove itself.
    """
    compressors: weakref.WeakSet[TensorCompressor] = weakref.WeakSet()

    def look(optimizer: torch.optim.Optimizer, *given: object) -> None:
        for compressor in list(compressors):
            if compressor.sends_gradients:
                compressor._note_step(optimizer)
            else:
                compressors.discard(compressor)

    register_optimizer_step_pre_hook(look)
    register_optimizer_step_post_hook(look)  # a closure may have made an exchange
    return compressors
