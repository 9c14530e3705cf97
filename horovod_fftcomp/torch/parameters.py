"""The parameters of one optimizer, and whose gradient a tensor is."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.schemes import Tensor


class Parameters:
    """Names and trainable parameters, in the order that all ranks share.

    ``model``: a module, named parameters or a list. Raises ValueError if there are none.
    """

    def __init__(self, model: torch.nn.Module | Iterable[Any]) -> None:
        items = list(model.named_parameters() if isinstance(model, torch.nn.Module) else model)
        pairs = [
            item if isinstance(item, tuple) else (f"{i}", item) for i, item in enumerate(items)
        ]
        trainable = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
        if not trainable:
            raise ValueError(
                "model has no trainable parameters; pass the model whose gradients the optimizer "
                "exchanges, its named_parameters() or a list of parameters"
            )
        self.names = [name for name, _ in trainable]
        self.tensors = [parameter for _, parameter in trainable]
        self.seen: dict[int, None] = {}  # numbers, in this step's order
        self._last_order: list[int] = []

    def __len__(self) -> int:
        return len(self.names)

    def specs(self) -> list[Tensor]:
        """Return names and shapes."""
        return [
            Tensor(name, tuple(parameter.shape))
            for name, parameter in zip(self.names, self.tensors, strict=True)
        ]

    def begin_step(self) -> None:
        """Forget which gradients have come, but not their order."""
        self._last_order, self.seen = list(self.seen), {}

    def take(self, grad: torch.Tensor) -> int:
        """Return the number of the parameter whose gradient ``grad`` is, and mark it as seen.

        Horovod tells no names; ``parameter.grad is grad`` does. Raises UnsupportedError for a
        gradient of none of them, or one that has come in this step already.
        """
        number = self._expected(grad)
        if number is None:
            number = self._searched(grad)
        if number is None:
            number = self._densified(grad)
        self.seen[number] = None
        return number

    def _expected(self, grad: torch.Tensor) -> int | None:
        """Try the order of the last step: a search of all for each would be quadratic."""
        position = len(self.seen)
        if position < len(self._last_order):
            number = self._last_order[position]
            if self.tensors[number].grad is grad and number not in self.seen:
                return number
        return None

    def _searched(self, grad: torch.Tensor) -> int | None:
        for number, parameter in enumerate(self.tensors):
            if parameter.grad is grad:
                if number in self.seen:
                    raise UnsupportedError(
                        f"gradient of {self.names[number]!r} came twice in one step; a "
                        "compressor serves one optimizer: make another for the second"
                    )
                return number
            if parameter is grad:
                raise UnsupportedError(
                    "op=hvd.Adasum hands over parameters instead of gradients and cannot be "
                    "compressed; use op=hvd.Average or op=hvd.Sum"
                )
        return None

    def _densified(self, grad: torch.Tensor) -> int:
        """Return the parameter whose sparse gradient Horovod made dense.

        ``grad`` is a copy then, and only the hook that calls knows of what: its local ``p``.
        """
        frame = sys._getframe(1)
        while frame is not None:
            asking = frame.f_locals.get("p")
            for number, parameter in enumerate(self.tensors):
                if parameter is asking and number not in self.seen:
                    return number
            frame = frame.f_back
        raise UnsupportedError(
            f"a gradient of shape {tuple(grad.shape)} belongs to none of the {len(self)} "
            "parameters given to this compressor; give it all parameters of the optimizer: the "
            "model, model.named_parameters() or a list"
        )
