"""Compressors as others write them in PyTorch, plainly: the yardsticks beside ours.

Unpacked, as in published collections of compressors: an index takes four bytes and a quantized
value one. Their messages are tensors; ours are bytes ready for the wire.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np

from horovod_fftcomp.backends import Array

if TYPE_CHECKING:
    import torch

_QSGD_LEVELS = 127  # what int8 holds


def torch_is_installed() -> bool:
    """Tell whether the peers can run; imports nothing."""
    return importlib.util.find_spec("torch") is not None


def set_num_threads(count: int) -> None:
    """Let PyTorch compute with ``count`` threads, as the kernels do."""
    import torch

    torch.set_num_threads(count)


class TorchTopK:
    """``abs().topk(k)`` and gather; float32 values and int32 indices. Aji and Heafield 2017."""

    has_feedback = True

    def __init__(self, density: float, numel: int, other_grad: Array) -> None:
        import torch

        self.label = f"torch.topk {density:g}"
        self._k = min(numel, max(1, int(density * numel + 1e-9)))
        self._residual = torch.zeros(numel)
        self.sent_nbytes = 8 * self._k
        self._other = self._choose(torch.from_numpy(other_grad))

    def _choose(self, acc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, indices = acc.abs().topk(self._k, sorted=False)
        return acc.gather(0, indices), indices.int()

    def encode(self, grad: Array, feedback: bool) -> tuple[torch.Tensor, ...]:
        """Return values, indices and, with ``feedback``, the new residual."""
        import torch

        acc = torch.from_numpy(grad)
        if not feedback:
            return self._choose(acc)
        acc = acc + self._residual
        values, indices = self._choose(acc)
        return values, indices, acc.index_fill_(0, indices.long(), 0)

    def collect(self, message: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        """Return values and indices of both ranks."""
        return [message[:2], self._other]

    def decode(self, received: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """Return the sum over both ranks."""
        import torch

        total = torch.zeros(self._residual.numel())
        for values, indices in received:
            total.index_add_(0, indices, values)
        return total

    def alone(self, grad: Array) -> Array:
        """Return what arrives of ``grad`` without feedback, flat float32."""
        return self.decode([self.encode(grad, feedback=False)]).numpy()

    def advance(self, grad: Array) -> None:
        """Exchange ``grad`` with feedback and keep the new residual."""
        *_, self._residual = self.encode(grad, feedback=True)

    def residual(self) -> Array:
        """Return what is not sent yet, flat float32."""
        return self._residual.numpy()


class _WithoutFeedback:
    """What compressors without a residual have in common."""

    has_feedback = False

    def advance(self, grad: Array) -> None:
        """Do nothing: every step is like the first."""

    def residual(self) -> Array:
        """Return nothing: there is no residual."""
        return np.zeros(0, np.float32)


class TorchQSGD(_WithoutFeedback):
    """Stochastic rounding to 127 levels of one norm; int8. Alistarh et al. 2017."""

    label = "torch QSGD int8"

    def __init__(self, numel: int, other_grad: Array, seed: int) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(seed)
        self.sent_nbytes = numel + 4
        self._other = self.encode(other_grad, feedback=False)

    def encode(self, grad: Array, feedback: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (levels as int8, the norm)."""
        import torch

        del feedback
        x = torch.from_numpy(grad)
        norm = x.norm()
        scaled = x.abs() / norm.clamp_min(torch.finfo(torch.float32).tiny) * _QSGD_LEVELS
        floor = scaled.floor()
        up = torch.rand(x.shape, generator=self._generator) < scaled - floor
        return ((floor + up) * x.sign()).to(torch.int8), norm

    def collect(
        self, message: tuple[torch.Tensor, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return levels and norms of both ranks."""
        return [message, self._other]

    def decode(self, received: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the sum over both ranks."""
        import torch

        parts = [levels.float() * (norm / _QSGD_LEVELS) for levels, norm in received]
        return torch.stack(parts).sum(0) if len(parts) > 2 else sum(parts[1:], parts[0])

    def alone(self, grad: Array) -> Array:
        """Return what arrives of ``grad``, flat float32."""
        return self.decode([self.encode(grad, feedback=False)]).numpy()


class TorchHalf(_WithoutFeedback):
    """A cast to float16, summed by allreduce in float16: Horovod's own fp16."""

    label = "torch float16 cast"

    def __init__(self, numel: int, other_grad: Array) -> None:
        self.sent_nbytes = 2 * numel
        self._other = self.encode(other_grad, feedback=False)

    def encode(self, grad: Array, feedback: bool) -> torch.Tensor:
        """Return ``grad`` in float16."""
        import torch

        del feedback
        return torch.from_numpy(grad).half()

    def collect(self, message: torch.Tensor) -> torch.Tensor:
        """Return the sum that an allreduce of both ranks makes."""
        return message + self._other

    def decode(self, received: torch.Tensor) -> torch.Tensor:
        """Return the sum in float32."""
        return received.float()

    def alone(self, grad: Array) -> Array:
        """Return what arrives of ``grad``, flat float32."""
        return self.encode(grad, feedback=False).float().numpy()


def make_sessions(
    density: float, numel: int, other_grad: Array, seed: int
) -> list[TorchTopK | TorchQSGD | TorchHalf]:
    """Return all peers for tensors of ``numel`` elements; Top-k keeps the ``density`` share."""
    return [
        TorchTopK(density, numel, other_grad),
        TorchQSGD(numel, other_grad, seed),
        TorchHalf(numel, other_grad),
    ]
