"""Adam and AdamW whose second moments come from uncompressed gradients alone.

Adam divides by the root of a mean of squares, which the error of a compressed gradient, or a
residual that is sent late, enters squared. Source: a second moment that stays while gradients are
compressed, 1-bit Adam (Tang et al., ICML 2021); one that is updated on a schedule, 0/1 Adam (Lu et
al., ICLR 2023).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Slot
from horovod_fftcomp.errors import UnsupportedError, warn
from horovod_fftcomp.schemes import moments_error

Tensors: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]

_MIXED = 3  # so many uncompressed exchanges in a row came together with compressed ones

# Of each parameter whose gradients are exchanged: its engine and bucket there.
_exchanged: Any = WeakTensorKeyDictionary()


def has_second_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer divides by roots of squared gradients."""
    options = getattr(optimizer, "defaults", {})  # which some wrappers lack
    return "eps" in options and "ns_steps" not in options  # of Muon


def note_exchanged(
    parameters: Iterable[torch.Tensor], slots: Sequence[Slot | None], engine: Engine
) -> None:
    """Let optimizers find the engine that exchanges the gradients of ``parameters``."""
    if any(bucket.policy.after_warmup.traits.sends_moments for bucket in engine.buckets):
        _refuse_others()
    for parameter, slot in zip(parameters, slots, strict=False):  # frozen ones come last
        _exchanged[parameter] = None if slot is None else (weakref.ref(engine), slot.bucket)


@functools.cache  # one hook for all
def _refuse_others() -> None:
    """Let each optimizer but those of this package refuse first moments in place of gradients."""

    def look(optimizer: torch.optim.Optimizer, *given: object) -> None:
        if isinstance(optimizer, Adam):
            return
        for parameter in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            if momentum := _exchanges_of(parameter).momentum:
                raise moments_error(f"the compressor of this {type(optimizer).__name__}", momentum)

    register_optimizer_step_pre_hook(look)


def is_exchanged(parameter: torch.Tensor) -> bool:
    """Return whether a compressor exchanges the gradients of ``parameter``."""
    return parameter in _exchanged


def forget_exchanged(parameters: Iterable[torch.Tensor]) -> None:
    """Tell optimizers that gradients of ``parameters`` are not exchanged."""
    for parameter in parameters:
        _exchanged.pop(parameter, None)


class _Exchanges(NamedTuple):
    """How many exchanges of a parameter's gradients an engine has begun, and how many compressed.

    ``engine``: a weak reference; None if the gradients are sent dense or not exchanged.
    ``momentum``: of the first moments that were exchanged last; 0 if these were gradients.
    """

    engine: Any = None
    n: int = 0
    n_compressed: int = 0
    momentum: float = 0.0

    def since(self, before: _Exchanges) -> tuple[int, int]:
        """Return the differences of both numbers; the numbers if the engine is another one."""
        if self.engine is not before.engine:
            return self.n, self.n_compressed
        return self.n - before.n, self.n_compressed - before.n_compressed


def _exchanges_of(parameter: torch.Tensor) -> _Exchanges:
    found = _exchanged.get(parameter)
    engine = None if found is None else found[0]()
    if engine is None:
        return _Exchanges()
    reference, bucket = found
    counts = engine.n_exchanges[bucket], engine.n_compressed[bucket]
    return _Exchanges(reference, *counts, engine.momenta[bucket])


class Adam(torch.optim.Optimizer):
    """Adam for compressed gradients: second moments are updated by uncompressed ones alone.

    It finds out from the compressor of the parameters which gradients were exchanged uncompressed:
    in the steps before ``warmup_steps``, in each ``dense_every``-th step after them, and those of
    tensors that are always sent dense. A second moment that was last updated g steps ago decays by
    beta2^g. All else, and every step without a compressor, is that of ``torch.optim.Adam``.

    A recipe with ``momentum`` equal to the first beta and with ``dense_every`` exchanges the first
    moments of each rank in place of gradients, in which there is less noise to send; the optimizer
    takes their mean as its first moment.

    Parameters
    ----------
    params
        Parameters or parameter groups, as for ``torch.optim.Adam``.
    lr
        Learning rate.
    betas
        Decay of the first and of the second moments, for a step.
    eps
        Added to the root of the second moment.
    weight_decay
        Added to the gradient, as a factor of the weights; decoupled from it by ``AdamW``.
    max_norm
        Clip the norm of all gradients to it, as ``torch.nn.utils.clip_grad_norm_`` does, but for
        what enters the second moments: those are of gradients before clipping. None: no clipping.
        Gradients that were clipped before ``step`` enter both as they are.
    """

    _decouples = False
    _warned = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must be 0 or more, got {value!r}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must lie in [0, 1), got {betas!r}")
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be above 0 or None, got {max_norm!r}")
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_norm=max_norm)
        self._seen: Any = WeakTensorKeyDictionary()  # a parameter's exchanges before its last step
        self._n_mixed: Any = WeakTensorKeyDictionary()  # see ``_warn_of_mixture``
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # torch calls this in ``load_state_dict``, too
        for name in ("_seen", "_n_mixed"):
            self.__dict__.setdefault(name, WeakTensorKeyDictionary())
        for group in self.param_groups:
            group.setdefault("max_norm", None)  # of a checkpoint of torch's Adam

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see ``torch.optim.Optimizer``."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._seen[parameter] = _exchanges_of(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; see ``torch.optim.Optimizer``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [
            (group, parameters)
            for group in self.param_groups
            if (parameters := [p for p in group["params"] if p.grad is not None])
        ]
        moments = []
        for group, parameters in groups:
            self._prepare(parameters)
            uncompressed = [*map(self._is_uncompressed, parameters)]
            self._update_second_moments(group, [*itertools.compress(parameters, uncompressed)])
            moments.append(self._are_moments(group, parameters))
        self._clip(groups)
        for (group, parameters), are_moments in zip(groups, moments, strict=True):
            self._update(group, parameters, are_moments)
        return loss

    def _prepare(self, parameters: list[torch.Tensor]) -> None:
        """Count a step of each parameter; its state is made in the first."""
        for parameter in parameters:
            if parameter.grad is not None and (parameter.grad.is_sparse or parameter.is_complex()):
                raise UnsupportedError(
                    f"{type(self).__name__} takes gradients that are real numbers and not sparse"
                )
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["refreshed"] = 0  # the step in which the second moment was last updated
                for moment in ("exp_avg", "exp_avg_sq"):
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            elif "refreshed" not in state:  # of a checkpoint of torch's Adam
                state["refreshed"] = int(state["step"])
        torch._foreach_add_([self.state[parameter]["step"] for parameter in parameters], 1)

    def _is_uncompressed(self, parameter: torch.Tensor) -> bool:
        """Return whether all exchanges since the parameter's last step were uncompressed.

        Raises UnsupportedError if they were compressed before the first second moment.
        """
        found = _exchanges_of(parameter)
        n, n_compressed = found.since(self._seen.get(parameter, _Exchanges()))
        self._seen[parameter] = found
        if n > n_compressed > 0 or (found.momentum and n > 1):
            self._warn_of_mixture(parameter, n)
        elif n > n_compressed or found.momentum:
            self._n_mixed.pop(parameter, None)
        is_compressed = n_compressed > 0 or found.momentum > 0
        if is_compressed and not self.state[parameter]["refreshed"]:
            raise UnsupportedError(
                f"{type(self).__name__} has no second moment yet, and gradients are "
                "compressed; begin with uncompressed steps and repeat them, for example by the "
                "options warmup_steps=100, dense_every=10 of the compressor"
            )
        return not is_compressed

    def _are_moments(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> list[bool]:
        """Return for each parameter whether its gradient is a first moment."""
        beta, momenta = group["betas"][0], [self._seen[p].momentum for p in parameters]
        for momentum in {*momenta} - {0.0, beta}:
            raise UnsupportedError(
                f"the compressor sends first moments with momentum={momentum}, and the first beta "
                f"of {type(self).__name__} is {beta}: give both the same value"
            )
        if any(momenta) and group["weight_decay"] and not self._decouples:
            raise UnsupportedError(
                f"{type(self).__name__} has a weight_decay that belongs to gradients, but the "
                "compressor sends first moments: use AdamW, or weight_decay=0"
            )
        return [momentum > 0 for momentum in momenta]

    def _warn_of_mixture(self, parameter: torch.Tensor, n: int) -> None:
        """Warn if the last exchanges did not come alone: uncompressed ones, or of first moments.

        Once is no reason: a loss scaler may have skipped the step between.
        """
        self._n_mixed[parameter] = self._n_mixed.get(parameter, 0) + 1
        if self._n_mixed[parameter] < _MIXED or self._warned:
            return
        self._warned = True
        warn(
            f"gradients were exchanged {n} times between two steps of {type(self).__name__}, "
            "uncompressed and compressed or as first moments, which are wrong then or not updated; "
            "under DDP accumulate gradients in no_sync(), forward pass included"
        )

    def _update_second_moments(self, group: dict[str, Any], chosen: list[torch.Tensor]) -> None:
        """Update the second moments of parameters, whose gradients are uncompressed."""
        if not chosen:
            return
        states = [self.state[parameter] for parameter in chosen]
        beta = group["betas"][1]
        decays = [beta ** (int(state["step"]) - state["refreshed"]) for state in states]
        moments, grads = [state["exp_avg_sq"] for state in states], self._gradients(group, chosen)
        torch._foreach_mul_(moments, decays)
        torch._foreach_addcmul_(moments, grads, grads, [1 - decay for decay in decays])
        for state in states:
            state["refreshed"] = int(state["step"])

    def _gradients(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> Tensors:
        """Return the gradients, with the weight decay that is part of them."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._decouples or not group["weight_decay"]:
            return grads
        return torch._foreach_add(grads, parameters, alpha=group["weight_decay"])

    def _clip(self, groups: list[tuple[dict[str, Any], list[torch.Tensor]]]) -> None:
        """Clip the norm of the gradients of each ``max_norm``, in place."""
        for most in {group["max_norm"] for group, _ in groups} - {None}:
            clipped = [p for group, parameters in groups for p in parameters
                       if group["max_norm"] == most]  # fmt: skip
            torch.nn.utils.clip_grad_norm_(clipped, most, foreach=True)

    def _update(
        self, group: dict[str, Any], parameters: list[torch.Tensor], are_moments: list[bool]
    ) -> None:
        """Update the first moments, some of which are given, and the parameters of a group."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        states = [self.state[parameter] for parameter in parameters]
        moments, grads = [state["exp_avg"] for state in states], self._gradients(group, parameters)
        if any(are_moments):
            torch._foreach_copy_(
                [*itertools.compress(moments, are_moments)],
                [*itertools.compress(grads, are_moments)],
            )
        torch._foreach_lerp_(moments, grads, 1 - beta1)  # leaves those that were copied
        roots = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(roots, [(1 - beta2 ** s["refreshed"]) ** 0.5 for s in states])
        torch._foreach_add_(roots, group["eps"])
        if group["weight_decay"] and self._decouples:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        sizes = [-lr / (1 - beta1 ** int(state["step"])) for state in states]
        torch._foreach_addcdiv_(parameters, moments, roots, sizes)


class AdamW(Adam):
    """AdamW for compressed gradients: ``Adam`` with weight decay that is not part of the gradient.

    Parameters as those of ``Adam``; in each step weights are multiplied by 1 - lr * weight_decay.

    >>> model = torch.nn.Linear(50, 30)
    >>> optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, max_norm=1.0)
    """

    _decouples = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, max_norm=max_norm)
