"""Parameters that the replica check compares between ranks: those that an optimizer changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from horovod_fftcomp.adapter.torch_tensors.optimizers import is_exchanged
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.errors import listed, warn


class OptimizedParameters:
    """Parameters of a compressor's model, frozen ones included, and those of its optimizer.

    ``names`` and ``tensors`` grow when parameters are added to the optimizer.
    """

    def __init__(self, given: Parameters) -> None:
        self.names = [*given.names, *(name for name, _ in given.frozen)]
        self._n_trainable = len(given.tensors)
        self.tensors = [*given.tensors, *(parameter for _, parameter in given.frozen)]
        self._optimizer: Callable[[], Any] = lambda: None
        self._n_counted = 0  # number of the optimizer's parameters
        self._optimized: list[int] = []  # numbers of the optimizer's parameters
        self._warned: set[int] = set()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Include the parameters of ``optimizer``, held by a weak reference."""
        self._optimizer, self._n_counted = weakref.ref(optimizer), 0
        self.refresh()

    def refresh(self) -> None:
        """Include parameters that were added to the optimizer since the last call."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        groups = [group["params"] for group in optimizer.param_groups]
        if (count := sum(map(len, groups))) == self._n_counted:
            return
        self._n_counted = count
        known = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self._optimized = []
        for i, group in enumerate(groups):
            for j, parameter in enumerate(group):
                if id(parameter) not in known:
                    known[id(parameter)] = len(self.tensors)
                    self.names.append(f"param_groups[{i}]['params'][{j}]")
                    self.tensors.append(parameter)
                self._optimized.append(known[id(parameter)])

    def warn_of_unexchanged(self, exchanged: Collection[int]) -> None:
        """Warn, once for each parameter, of trained parameters whose gradient was not exchanged.

        ``exchanged``: numbers of the parameters whose gradients Horovod has passed in this step.
        """
        self.refresh()
        if len(self._optimized) in (0, len(exchanged)):
            return
        grads = {n: self.tensors[n].grad for n in self._optimized if n not in exchanged}
        self._warn_of(  # Horovod gathers sparse ones itself
            [number for number, grad in grads.items() if grad is None or not grad.is_sparse],
            "since they were frozen or not in the optimizer when hvd.DistributedOptimizer was "
            "made; without compression Horovod would not reduce them either. Make the optimizer "
            "with all parameters that will ever train, and the compressor and "
            "hvd.DistributedOptimizer while all of them have requires_grad=True; freeze layers "
            "after that",
        )

    def warn_of_unfrozen(self) -> None:
        """Warn, once for each parameter, of trained ones that were frozen when DDP was made."""
        frozen = range(self._n_trainable, len(self.tensors))
        self._warn_of(
            [n for n in frozen if (it := self.tensors[n]).requires_grad and not is_exchanged(it)],
            "since they were frozen when DistributedDataParallel was made; without compression DDP "
            "would not average them either. Wrap the model while all parameters that will ever "
            "train have requires_grad=True; freeze layers after that",
        )

    def _warn_of(self, numbers: Sequence[int], reason: str) -> None:
        alone = [
            number
            for number in numbers
            if number not in self._warned
            and (tensor := self.tensors[number]).requires_grad
            and tensor.grad is not None
        ]
        if not alone:
            return
        self._warned.update(alone)
        names = listed([repr(self.names[number]) for number in alone])
        warn(
            f"each rank trains these parameters alone, and the ranks will differ: {names}. "
            f"Their gradients are not exchanged, {reason}"
        )

    def sizes(self) -> list[int]:
        """Return the size of each parameter in bytes."""
        values = map(self._values, range(len(self.tensors)))
        return [tensor.numel() * tensor.element_size() for tensor in values]

    def _values(self, number: int) -> torch.Tensor:
        """Return a parameter's present values, in its memory."""
        return self.tensors[number].detach()

    def read(self, number: int) -> np.ndarray:
        """Return a parameter's present values as bytes, uint8 1-D."""
        flat = self._values(number).to("cpu").contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy()

    def read_in_place(self, number: int) -> torch.Tensor:
        """Return the same on the device of the first parameter, aligned to 8 bytes."""
        place = self.tensors[0].device
        flat = self._values(number).to(place).contiguous().reshape(-1).view(torch.uint8)
        return flat if flat.data_ptr() % 8 == 0 else flat.clone()

    def write(self, number: int, values: np.ndarray) -> None:
        """Overwrite a parameter with ``values``, uint8 1-D."""
        parameter = self._values(number)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values).view(parameter.dtype).view(parameter.shape))
