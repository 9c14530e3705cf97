"""Warns of averages that were exchanged and then not used, which error feedback does not forget."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.hooks import unserializable_hook

from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.errors import warn

_SUSPICION = 8  # so many steps after a first finding, a second one is told


class ThrownAway:
    """Looks, when a backward pass begins, whether the last exchange's averages were used.

    They were not if the gradient of a parameter is gone or zero, no optimizer of PyTorch has taken
    a step, and the parameter is the same. Other optimizers may write to ``parameter.data``, which
    no version counts: from the second time on its values are compared, too.
    """

    def __init__(self, parameters: Parameters, engine: Engine) -> None:
        self._parameters, self._engine = parameters, engine
        self._number = -1  # of the parameter that is looked at
        self._hook: Any = None
        self._is_between = self._is_done = False
        self._place: tuple[int, int] = (0, 0)  # version and address of the parameter
        self._suspects = 0  # for so many steps more
        self._was_zero = False  # whether a suspected step's average is zero
        self._copy: torch.Tensor | None = None  # of the parameter, once there is a suspicion

    def stop(self) -> None:
        """Look no more."""
        self._is_done, self._copy = True, None
        self._unhook()

    def begin(self) -> None:
        """Note that a step begins."""
        self._is_between, self._was_zero, self._copy = False, False, None

    def end(self, first: int, average: torch.Tensor | None) -> None:
        """Note that a step has ended whose first gradient was that of parameter ``first``.

        That one comes first again, so the next look is before the next exchange begins.
        ``average``: that of its gradients; None if Horovod exchanges them.
        """
        parameter = self._parameters.tensors[first]
        if self._is_done or not parameter.requires_grad:
            return
        if first != self._number:
            self._unhook()
            look = weakref.WeakMethod(self._look)  # the parameter may live longer
            called = unserializable_hook(lambda grad: (look() or _nothing)())
            self._hook, self._number = parameter.register_hook(called), first
        self._place = (parameter._version, parameter.data_ptr())
        if self._suspects:
            self._suspects -= 1
            self._copy = parameter.detach().clone()
            self._was_zero = average is not None and not bool(average.any())
        self._is_between = True

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _look(self) -> None:
        parameter = self._parameters.tensors[self._number]
        if not self._is_between or self._engine.is_used:
            return
        self._is_between = False
        if self._place != (parameter._version, parameter.data_ptr()):
            return
        if parameter.grad is not None and bool(parameter.grad.any()):
            return
        if self._was_zero or not self._engine.keeps_last():
            return
        copy, self._suspects = self._copy, _SUSPICION
        if copy is None:
            return
        same = torch.equal(copy, parameter)
        self.stop()
        if same:
            warn(
                f"the averaged gradients, of {self._parameters.names[self._number]!r} for one, "
                "were zeroed before an optimizer used them, but what was held back of them is "
                "kept and will be sent in later steps. Call discard() of the compressor on all "
                "ranks after such a backward pass, or exchange nothing in it; if you use copies of "
                "them, call note_used() instead: docs/training.md, "
                '"Passes whose gradients you do not use"'
            )


def _nothing() -> None:
    """Stand in for a method whose object is gone."""
