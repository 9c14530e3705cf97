"""AdamW whose second moment sees gradients before they are clipped.

Behind ``clip_grad_norm_`` both moments of AdamW see clipped gradients. Here the second moment sees
their true size, so that the first gradients, the largest of a training, make small steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class UnclippedAdamW(torch.optim.Optimizer):
    """AdamW that clips the gradients itself, after they have entered the second moment.

    The norm of all gradients is clipped to ``max_norm`` for the first moment, in place. The second
    moment is updated in each of the first ``dense_steps`` steps and then in every ``every``-th one,
    with decay ``late_beta`` if that is not each step. Both moments are bias-corrected.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_norm: float = 1.0,
        every: int = 1,
        dense_steps: int = 100,
        late_beta: float = 0.9,
    ) -> None:
        numbers = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "max_norm": max_norm}
        schedule = {"every": every, "dense_steps": dense_steps, "late_beta": late_beta}
        # step: steps so far; weight: sum of the weights of the gradients in the second moment
        super().__init__(params, {"lr": lr, **numbers, **schedule, "step": 0, "weight": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update both moments and all parameters that have a gradient."""
        groups = [(group, self._tensors(group)) for group in self.param_groups]
        for group, (_, grads, _, squares) in groups:
            self._observe(group, grads, squares)
        every_parameter = [p for _, (parameters, *_) in groups for p in parameters]
        max_norm = self.param_groups[0]["max_norm"]
        torch.nn.utils.clip_grad_norm_(every_parameter, max_norm, foreach=True)
        for group, tensors in groups:
            self._update(group, *tensors)

    def _tensors(self, group: dict[str, Any]) -> tuple[list[torch.Tensor], ...]:
        """Return a group's parameters with their gradients, first and second moments."""
        parameters = [p for p in group["params"] if p.grad is not None]
        for p in parameters:
            if p not in self.state:
                self.state[p] = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        moments = [[self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq")]
        return parameters, [p.grad for p in parameters], *moments

    def _observe(
        self, group: dict[str, Any], grads: list[torch.Tensor], squares: list[torch.Tensor]
    ) -> None:
        group["step"] += 1
        beta = group["betas"][1]
        if group["every"] > 1 and group["step"] > group["dense_steps"]:
            if group["step"] % group["every"]:
                return
            beta = group["late_beta"]
        group["weight"] = beta * group["weight"] + (1 - beta)
        torch._foreach_mul_(squares, beta)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta)

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        grads: list[torch.Tensor],
        means: list[torch.Tensor],
        squares: list[torch.Tensor],
    ) -> None:
        beta, lr = group["betas"][0], group["lr"]
        torch._foreach_mul_(means, beta)
        torch._foreach_add_(means, grads, alpha=1 - beta)
        roots = torch._foreach_div(squares, group["weight"])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        step_size = lr / (1 - beta ** group["step"])
        torch._foreach_addcdiv_(parameters, means, roots, -step_size)
