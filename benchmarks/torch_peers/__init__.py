"""Peers: common compressors written plainly in PyTorch, to compare recipes with.

Messages are unpacked tensors, as in published collections of compressors: an index takes four bytes
and a quantized value one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_fftcomp.tools.bench.sessions import Session
from horovod_fftcomp.types import Array
from torch_peers.reduced import (
    Carried,
    Sparse,
    TorchDGC,
    TorchPowerSGD,
    TorchRandomK,
)

if TYPE_CHECKING:
    import torch

_QSGD_LEVELS = 127  # what int8 holds


class TorchTopK(Sparse):
    """``abs().topk(k)`` and gather; float32 values and int32 indices. Aji and Heafield 2017."""

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


class _WithoutFeedback:
    """Base of compressors without a residual."""

    has_feedback = False

    def advance(self, grad: Array) -> None:
        """Do nothing: there is no state."""

    def residual(self) -> Array:
        """Return an empty array: there is no residual."""
        return np.zeros(0, np.float32)


class _Summed:
    """Base of compressors whose messages are decoded by ``_meant`` and summed in float32."""

    encode: Any
    _meant: Any
    _other: tuple[torch.Tensor, ...]

    def collect(self, message: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, ...]]:
        """Return the messages of both ranks, without the residual at the end of ``message``."""
        return [message[: len(self._other)], self._other]

    def decode(self, received: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        """Return the sum over both ranks."""
        parts = [self._meant(message) for message in received]
        return sum(parts[1:], parts[0])

    def alone(self, grad: Array) -> Array:
        """Return ``grad`` encoded and decoded without feedback, flat float32."""
        return self.decode([self.encode(grad, feedback=False)]).numpy()


class TorchQSGD(_Summed, _WithoutFeedback):
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

    def _meant(self, message: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return message[0].float() * (message[1] / _QSGD_LEVELS)


class TorchBucketedQSGD(TorchQSGD):
    """The same with 7 levels of the largest magnitude of each 1024 elements; int8."""

    label = "torch QSGD 7 levels"
    _levels, _bucket = 7, 1024

    def __init__(self, numel: int, other_grad: Array, seed: int) -> None:
        super().__init__(numel, other_grad, seed)
        self._numel, self.sent_nbytes = numel, numel + 4 * -(-numel // self._bucket)

    def encode(self, grad: Array, feedback: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (levels as int8 ``[buckets, 1024]``, norms ``[buckets, 1]``)."""
        import torch

        del feedback
        x = torch.from_numpy(grad)
        rest = -x.numel() % self._bucket
        rows = (torch.nn.functional.pad(x, (0, rest)) if rest else x).view(-1, self._bucket)
        norm = rows.abs().amax(1, keepdim=True)
        scaled = rows.abs() / norm.clamp_min(torch.finfo(torch.float32).tiny) * self._levels
        floor = scaled.floor()
        up = torch.rand(rows.shape, generator=self._generator) < scaled - floor
        return ((floor + up) * rows.sign()).to(torch.int8), norm

    def _meant(self, message: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (message[0].float() * (message[1] / self._levels)).view(-1)[: self._numel]


class TorchTernGrad(TorchQSGD):
    """Ternary digits of the largest clipped magnitude; int8. Wen et al. 2017."""

    label = "torch TernGrad int8"

    def encode(self, grad: Array, feedback: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (digits as int8, the scale)."""
        import torch

        del feedback
        x = torch.from_numpy(grad)
        limit = 2.5 * x.std(correction=0)
        x = x.clamp(-limit, limit)
        scale = x.abs().max()
        chosen = torch.rand(x.shape, generator=self._generator) < x.abs() / scale
        return (x.sign() * chosen).to(torch.int8), scale

    def _meant(self, message: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return message[0].float() * message[1]


class TorchOneBit(_Summed, Carried):
    """A byte for the sign and the mean of either side. Seide et al. 2014."""

    label = "torch 1-bit uint8"

    def __init__(self, numel: int, other_grad: Array) -> None:
        import torch

        self._residual = torch.zeros(numel)
        self.sent_nbytes = numel + 8
        self._other = self._signs(torch.from_numpy(other_grad))

    def _signs(self, acc: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import torch

        below = acc < 0
        low, high = acc[below].mean(), acc[~below].mean()
        return below.to(torch.uint8), low.nan_to_num(0), high.nan_to_num(0)

    def encode(self, grad: Array, feedback: bool) -> tuple[torch.Tensor, ...]:
        """Return signs, both values and, with ``feedback``, the new residual."""
        import torch

        acc = torch.from_numpy(grad)
        if not feedback:
            return self._signs(acc)
        acc = acc + self._residual
        message = self._signs(acc)
        return *message, acc - self._meant(message)

    def _meant(self, message: tuple[torch.Tensor, ...]) -> torch.Tensor:
        import torch

        return torch.where(message[0].bool(), message[1], message[2])


class TorchScaledSign(TorchOneBit):
    """A byte for the sign and the mean magnitude. Karimireddy et al. 2019."""

    label = "torch EF-Sign uint8"

    def _signs(self, acc: torch.Tensor) -> tuple[torch.Tensor, ...]:
        import torch

        scale = acc.abs().mean()
        return (acc < 0).to(torch.uint8), -scale, scale


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
        """Return the float16 sum over both ranks."""
        return message + self._other

    def decode(self, received: torch.Tensor) -> torch.Tensor:
        """Return the sum in float32."""
        return received.float()

    def alone(self, grad: Array) -> Array:
        """Return ``grad`` encoded and decoded, flat float32."""
        return self.encode(grad, feedback=False).float().numpy()


# The start of the label of the peer of each recipe. Peers of Top-k, QSGD in int8 and float16 always
# run.
PEERS = {
    "qsgd": TorchBucketedQSGD.label,
    "terngrad": TorchTernGrad.label,
    "onebit": TorchOneBit.label,
    "efsignsgd": TorchScaledSign.label,
    "dgc": TorchDGC.kind,
    "random_k": TorchRandomK.kind,
    "powersgd": TorchPowerSGD.kind,
}


def make_sessions(
    density: float,
    shape: tuple[int, ...],
    other_grad: Array,
    seed: int,
    recipes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[Session]:
    """Return the peers for tensors of ``shape``.

    ``density``: that of Top-k. ``recipes``: the measured recipes with all their options, by name;
    their peers are added.
    """
    numel = math.prod(shape)
    sessions: list[Session] = [
        TorchTopK(density, numel, other_grad),
        TorchQSGD(numel, other_grad, seed),
        TorchHalf(numel, other_grad),
    ]
    if "qsgd" in recipes:
        sessions.append(TorchBucketedQSGD(numel, other_grad, seed))
    if "terngrad" in recipes:
        sessions.append(TorchTernGrad(numel, other_grad, seed))
    if "onebit" in recipes:
        sessions.append(TorchOneBit(numel, other_grad))
    if "efsignsgd" in recipes:
        sessions.append(TorchScaledSign(numel, other_grad))
    if "dgc" in recipes:
        sessions.append(TorchDGC(recipes["dgc"]["density"], numel, other_grad))
    if "random_k" in recipes:
        sessions.append(TorchRandomK(recipes["random_k"]["density"], numel, other_grad, seed))
    if "powersgd" in recipes and len(shape) > 1:
        sessions.append(TorchPowerSGD(recipes["powersgd"]["rank"], shape, other_grad, seed))
    return sessions
