"""Peers with a state of their own or several rounds, written plainly in PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_fftcomp.types import Array

if TYPE_CHECKING:
    import torch

_MOMENTUM = 0.9
_SAMPLED = 0.01  # of the elements, for the threshold


class Carried:
    """Base of compressors with a residual, the last item of an encoding with feedback."""

    has_feedback = True
    _residual: torch.Tensor
    encode: Any

    def advance(self, grad: Array) -> None:
        """Exchange ``grad`` with feedback and keep the new residual."""
        *_, self._residual = self.encode(grad, feedback=True)

    def residual(self) -> Array:
        """Return the residual, flat float32."""
        return self._residual.numpy().reshape(-1)


class Sparse(Carried):
    """Base of compressors whose messages begin with values and indices."""

    _other: tuple[torch.Tensor, ...]

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
        """Return ``grad`` encoded and decoded without feedback, flat float32."""
        return self.decode([self.encode(grad, feedback=False)[:2]]).numpy()


class TorchDGC(Sparse):
    """Momentum, a threshold from a sample, masks; int32 indices. Lin et al., ICLR 2018."""

    kind = "torch DGC"

    def __init__(self, density: float, numel: int, other_grad: Array) -> None:
        import torch

        self.label = f"{self.kind} {density:g}"
        self._k = min(numel, max(1, int(density * numel + 1e-9)))
        self._residual, self._velocity = torch.zeros(numel), torch.zeros(numel)
        self._other = self.encode(other_grad, feedback=False)[:2]
        self.sent_nbytes = 8 * self._k

    def encode(self, grad: Array, feedback: bool) -> tuple[torch.Tensor, ...]:
        """Return values, indices, and the new velocity and residual."""
        import torch

        velocity = residual = torch.from_numpy(grad)
        if feedback:
            velocity = _MOMENTUM * self._velocity + velocity
            residual = self._residual + velocity
        else:
            velocity, residual = velocity.clone(), residual.clone()
        magnitudes = residual.abs()
        indices = self._choose(magnitudes)
        values = residual[indices]
        velocity.index_fill_(0, indices, 0)
        residual.index_fill_(0, indices, 0)
        return values, indices.int(), velocity, residual

    def _choose(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Return about k positions: those above a threshold from a sample, adjusted a few times."""
        sample = magnitudes[:: max(1, round(1 / _SAMPLED))]
        k_of_sample = max(1, round(self._k * sample.numel() / magnitudes.numel()))
        threshold = sample.topk(k_of_sample, sorted=False)[0].min()
        indices = (magnitudes >= threshold).nonzero().view(-1)
        for _ in range(10):
            if indices.numel() > 1.3 * self._k:
                within = magnitudes[indices].topk(self._k, sorted=False)[1]
                return indices[within]
            if indices.numel() >= 0.8 * self._k:
                break
            threshold = threshold * 0.8
            indices = (magnitudes >= threshold).nonzero().view(-1)
        return indices[: self._k]

    def advance(self, grad: Array) -> None:
        """Exchange ``grad`` with feedback and keep the new state."""
        *_, self._velocity, self._residual = self.encode(grad, feedback=True)


class TorchRandomK(Carried):
    """Random positions by ``randperm`` with a shared seed; values by allreduce."""

    kind = "torch random-k"

    def __init__(self, density: float, numel: int, other_grad: Array, seed: int) -> None:
        import torch

        self.label = f"{self.kind} {density:g}"
        self._k = min(numel, max(1, int(density * numel + 1e-9)))
        self._generator, self._seed = torch.Generator(), seed
        self._residual = torch.zeros(numel)
        self._other = self.encode(other_grad, feedback=False)[0]
        self.sent_nbytes = 4 * self._k

    def encode(self, grad: Array, feedback: bool) -> tuple[torch.Tensor, ...]:
        """Return values, indices and, with ``feedback``, the new residual."""
        import torch

        whole = torch.from_numpy(grad)
        self._generator.manual_seed(self._seed)
        indices = torch.randperm(whole.numel(), generator=self._generator)[: self._k]
        if not feedback:
            return whole[indices], indices
        whole = whole + self._residual
        values = whole[indices]
        return values, indices, whole.index_fill_(0, indices, 0)

    def collect(self, message: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of values over both ranks, and the indices."""
        return message[0] + self._other, message[1]

    def decode(self, received: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the sum over both ranks."""
        import torch

        values, indices = received
        return torch.zeros(self._residual.numel()).index_copy_(0, indices, values)

    def alone(self, grad: Array) -> Array:
        """Return ``grad`` encoded and decoded without feedback, flat float32."""
        values, indices = self.encode(grad, feedback=False)
        return self.decode((values, indices)).numpy()


class TorchPowerSGD(Carried):
    """Low-rank factors with warm start, by Gram-Schmidt. Vogels et al., NeurIPS 2019.

    ``encode`` ends with this rank's part of the second sum.
    """

    kind = "torch PowerSGD"

    def __init__(self, rank: int, shape: tuple[int, ...], other_grad: Array, seed: int) -> None:
        import torch

        rows, columns = shape[0], int(np.prod(shape[1:]))
        rank = min(rank, rows, columns)
        self.label = f"{self.kind} rank {rank}"
        self._shape = (rows, columns)
        generator = torch.Generator().manual_seed(seed)
        self._right = torch.randn(columns, rank, generator=generator)
        self._residual = torch.zeros(rows, columns)
        self._other = torch.from_numpy(other_grad).view(self._shape)
        self._others_left = self._other @ self._right
        self.sent_nbytes = 4 * rank * (rows + columns)

    def encode(self, grad: Array, feedback: bool) -> tuple[torch.Tensor, ...]:
        """Return the right factor, the left one, and gradient plus residual."""
        import torch

        whole = torch.from_numpy(grad).view(self._shape)
        if feedback:
            whole = whole + self._residual
        left = _orthonormal(whole @ self._right + self._others_left)
        return whole.T @ left, left, whole

    def collect(self, message: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the sum of right factors, the left one, gradient plus residual, the own factor."""
        right, left, whole = message
        return right + self._other.T @ left, left, whole, right

    def decode(self, received: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the sum over both ranks; keeps the new residual, as the published code does."""
        right, left, whole, own = received
        self._left_over = whole - left @ own.T
        return left @ right.T

    def alone(self, grad: Array) -> Array:
        """Return ``grad`` encoded and decoded without feedback, on one rank, flat float32."""
        import torch

        whole = torch.from_numpy(grad).view(self._shape)
        left = _orthonormal(whole @ self._right)
        return (left @ (whole.T @ left).T).numpy().reshape(-1)

    def advance(self, grad: Array) -> None:
        """Exchange ``grad`` with feedback and keep the new residual and the new factor."""
        received = self.collect(self.encode(grad, feedback=True))
        self.decode(received)
        self._right, self._residual = received[0], self._left_over


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Make the columns orthonormal, in place."""
    for i in range(matrix.shape[1]):
        column = matrix[:, i : i + 1]
        column /= column.norm() + 1e-8
        if i + 1 < matrix.shape[1]:
            rest = matrix[:, i + 1 :]
            rest -= (column * rest).sum(0) * column
    return matrix
