"""Gradients of a step: their parameters, and the order in which they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.engine.overlap import Slot
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.torch import horovod_internals


@dataclass(slots=True, eq=False)
class GradientContext:
    """A parameter and its gradient of this step; Horovod passes it from compress to decompress."""

    number: int
    name: str
    parameter: torch.Tensor
    slot: Slot | None  # None: exchanged densely, by Horovod
    dense_nbytes: int  # of the gradient in float32
    following: GradientContext | None = None  # whose gradient came next in the last step

    # Of this step, until the reduced gradient has been returned.
    grad: torch.Tensor | None = None
    version: int = 0  # of ``grad`` when it came
    total: torch.Tensor | None = None  # sum over ranks, float32 in the gradient's shape


class StepGradients:
    """Contexts of all parameters, and which of their gradients have come in this step.

    ``slots``: of each parameter. ``seen``: contexts of the gradients that have come, by number, in
    their order. ``expected``: context of the next one if the order is that of the last step; None
    if a step is about to begin or the order is not known.
    """

    def __init__(self, parameters: Parameters, slots: Sequence[Slot | None]) -> None:
        named = zip(parameters.names, parameters.tensors, slots, strict=True)
        self.contexts = [
            GradientContext(number, name, parameter, slot, 4 * parameter.numel())
            for number, (name, parameter, slot) in enumerate(named)
        ]
        self.seen: dict[int, GradientContext] = {}
        self.expected: GradientContext | None = None

    def begin_step(self) -> None:
        """Start a new step, in which no gradient has come; remember the order of the last one."""
        order = list(self.seen.values())
        for context, following in zip(order, [*order[1:], None], strict=True):
            context.following = following
        self.seen.clear()
        self.expected = None

    def abandon(self) -> None:
        """Discard a step, and the order of the last one."""
        for context in self.contexts:
            context.following = context.grad = context.total = None
        self.seen.clear()
        self.expected = None

    def find(self, grad: torch.Tensor) -> GradientContext:
        """Return the context of a gradient that is not the expected one.

        Horovod passes no names, so it is found by ``parameter.grad is grad``. Raises
        UnsupportedError if ``grad`` belongs to no parameter, or has already come in this step.
        """
        for context in reversed(self.contexts):  # the order of a backward pass
            if context.parameter.grad is grad:
                if context.number in self.seen:
                    raise UnsupportedError(
                        f"gradient of {context.name!r} came twice in one step; a "
                        "compressor serves one optimizer: make another for the second"
                    )
                return context
            if context.parameter is grad:
                raise UnsupportedError(
                    "op=hvd.Adasum passes parameters instead of gradients and cannot be "
                    "compressed; use op=hvd.Average or op=hvd.Sum"
                )
        return self._densified(grad)

    def _densified(self, grad: torch.Tensor) -> GradientContext:
        """Return the context of a sparse gradient that Horovod has made dense.

        ``grad`` is a copy then, and only the calling hook knows its parameter.
        """
        caller = horovod_internals.parameter_of_hook()
        for context in self.contexts:
            if context.parameter is caller and context.number not in self.seen:
                return context
        raise UnsupportedError(
            f"a gradient of shape {tuple(grad.shape)} belongs to none of the "
            f"{len(self.contexts)} parameters given to this compressor; give it all parameters of "
            "the optimizer: the model, model.named_parameters() or a list"
        )
