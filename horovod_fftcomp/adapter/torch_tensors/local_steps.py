"""Local SGD: ranks train alone for some steps, then average their changes, compressed."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from horovod_fftcomp.adapter.compressor import Compressor
from horovod_fftcomp.adapter.torch_tensors.optimizers import forget_exchanged
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.errors import warn

Outer: TypeAlias = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
ADD: Outer = functools.partial(torch.optim.SGD, lr=1.0)


_UNTOLD = 20  # at least so many steps of an optimizer are told of


class _Count:
    """Number of steps since the last exchange, and how many of them a state has that was saved."""

    steps = saved = 0

    def tell_end(self) -> None:
        """Warn if no exchange follows, for the ranks' weights differ."""
        failed = hasattr(sys, "last_value")  # the interpreter ends by an error
        if self.steps != self.saved and not failed:
            warn(
                f"LocalSteps ends within a period, {self.steps} after its last exchange, so "
                "the ranks have different weights: call synchronize() after the last step"
            )


class TorchLocalSteps:
    """Base class of the launchers' ``LocalSteps``, which average changes between ranks.

    Raises UnsupportedError for compressors that are for gradients only: with momentum, of signs, or
    with a loss scaler; ValueError for one of other parameters, and unless ``period`` is a whole
    number from 1; TypeError if ``outer`` is an optimizer.
    """

    def __init__(self, parameters: Parameters, compression: Any, period: int, outer: Outer) -> None:
        if type(period) is not int or period < 1:
            raise ValueError(f"period must be a whole number of steps from 1, got {period!r}")
        if isinstance(outer, torch.optim.Optimizer):
            raise TypeError(
                "outer must make the optimizer from the weights that LocalSteps passes it: "
                "functools.partial(torch.optim.SGD, lr=0.7)"
            )
        self._is_ours = isinstance(compression, Compressor)  # not Horovod's own
        if self._is_ours:
            compression.check_differences()
            if compression.tensors() != parameters.specs():
                raise ValueError("the compressor has other parameters; make it of the same model")
        self._names, self._parameters = parameters.names, parameters.tensors
        self._compression, self._period = compression, period
        forget_exchanged(self._parameters)  # optimizers step with this rank's own gradients
        self.last = [parameter.detach().clone() for parameter in self._parameters]
        self.outer = outer(self.last)
        self._count = _Count()
        weakref.finalize(self, self._count.tell_end)
        self._untold = 0  # steps of the model's optimizer since the last call
        self._synchronizes = False  # whether ``synchronize`` has been called
        note = weakref.WeakMethod(self._note_step)
        handle = register_optimizer_step_post_hook(lambda *given: (note() or _nothing)(given[0]))
        weakref.finalize(self, handle.remove)
        if self._is_ours:
            compression.expect_changes()

    @property
    def steps(self) -> int:
        """Number of steps since the last exchange."""
        return self._count.steps

    @property
    def ratio(self) -> float:
        """Float32 bytes of gradients over the bytes sent: ``period`` times the compressor's ratio.

        NaN before the first exchange, and for a compressor that is Horovod's.
        """
        return self._period * self._compression.stats()["ratio"] if self._is_ours else math.nan

    def __repr__(self) -> str:
        fewer = "" if math.isnan(self.ratio) else f"{self.ratio:.1f} times fewer bytes, "
        return f"LocalSteps(period={self._period}): {fewer}{self.steps} steps since the last " + (
            f"exchange, by {self._compression!r}"
        )

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn, once, if ``after_step`` is not called after steps of the model's optimizer."""
        first, groups = self._parameters[0], optimizer.param_groups
        if not any(one is first for group in groups for one in group["params"]):
            return
        self._untold += 1
        if self._untold == max(_UNTOLD, 2 * self._period) and not self._synchronizes:
            warn(
                f"{type(optimizer).__name__} has taken {self._untold} steps of which LocalSteps "
                "was not told, so each rank trains alone: call after_step() after each step"
            )

    def after_step(self) -> bool:
        """Count a step; return True after the last one of a period, which calls ``synchronize``."""
        self._untold = 0
        self._count.steps += 1
        if self.steps < self._period:
            return False
        self.synchronize()
        return True

    @torch.no_grad()
    def synchronize(self) -> None:
        """Step the outer optimizer with the mean change over ranks; continue from its weights.

        If a rank's change has NaN or Inf, all ranks restore the weights of the last exchange, and
        the outer optimizer's state stays as it is. Gradients are kept.
        """
        pairs = zip(self.last, self._parameters, strict=True)
        changes = [last - parameter for last, parameter in pairs]
        self._restore()  # equal on all ranks, for the replica check
        means = self.means_of(changes)
        if self._is_ours:
            self._compression.note_used()
        if all(bool(torch.isfinite(mean).all()) for mean in means):
            for last, parameter, mean in zip(self.last, self._parameters, means, strict=True):
                last.copy_(parameter)  # the replica check may have replaced it
                last.grad = mean
            self.outer.step()
            self.outer.zero_grad()
            self._restore()
        self._untold = self._count.steps = self._count.saved = 0
        self._synchronizes = True

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the last exchange, the outer optimizer's state and ``steps``.

        Equal on all ranks; the compressor's ``state_dict`` has the residuals. As with optimizers,
        the tensors are those in use, which the next exchange changes.
        """
        self._count.saved = self.steps
        weights = dict(zip(self._names, self.last, strict=True))
        return {"weights": weights, "outer": self.outer.state_dict(), "steps": self.steps}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on any rank; load the model's own as well."""
        weights = saved["weights"]
        shapes = {name: weight.shape for name, weight in weights.items()}
        if shapes != {n: last.shape for n, last in zip(self._names, self.last, strict=True)}:
            raise ValueError("the saved state has other parameters; load it for the same model")
        self.outer.load_state_dict(saved["outer"])
        for name, last in zip(self._names, self.last, strict=True):
            last.copy_(weights[name])
        self._count.steps = self._count.saved = saved["steps"]

    def _restore(self) -> None:
        for last, parameter in zip(self.last, self._parameters, strict=True):
            parameter.copy_(last)

    def means_of(self, changes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the means of ``changes``, one for each parameter, over ranks."""
        raise NotImplementedError


def _nothing(optimizer: object) -> None:
    """Stand in for a method whose object is gone."""
