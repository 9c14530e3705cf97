"""Gradients of a step as DDP's buckets bring them, by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.errors import UnsupportedError


@dataclass(eq=False)
class Arrival:
    """Bucket of DDP in this step: its gradients by the parameters' numbers, and its future.

    The averages are written over the gradients, in the memory of DDP.
    """

    buffer: torch.Tensor
    gradients: dict[int, torch.Tensor]
    is_last: bool
    future: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    waiting: set[int] = field(init=False)  # numbers of the parameters without an average yet

    def __post_init__(self) -> None:
        self.waiting = set(self.gradients)

    def finish(self, number: int) -> None:
        """Note that a parameter's average has been written; the last one completes the future."""
        self.waiting.discard(number)
        if not self.waiting:
            self.complete()

    def complete(self) -> None:
        """Hand the buffer back to DDP, which waits for it."""
        if not self.future.done():
            self.future.set_result(self.buffer)


class ParameterNumbers:
    """Numbers of a model's parameters, by which the gradients in DDP's buckets are found.

    DDP assigns parameters to other buckets after the first step, so a bucket's index says nothing.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._tensors = parameters.tensors  # kept, since the keys are their addresses
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}

    def gradients(self, bucket: dist.GradBucket) -> dict[int, torch.Tensor]:
        """Return views of a bucket's gradients, in the shape and strides of their parameters."""
        if bucket.buffer().is_sparse:
            raise UnsupportedError(
                "DDP exchanges a sparse gradient; make the embedding with sparse=False"
            )
        found: dict[int, torch.Tensor] = {}
        for parameter, view in _views(bucket.buffer(), bucket.parameters()):
            number = self._numbers.get(id(parameter))
            if number is None:
                raise UnsupportedError(
                    f"DDP exchanges a parameter of shape {tuple(parameter.shape)} that was not "
                    "trainable when compress() was called; call it after requires_grad is set, "
                    "with the model that DDP wraps"
                )
            found[number] = view
        return found


def _views(
    buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each parameter with its gradient, a view of ``buffer``.

    DDP copies gradients in the order of the parameter's memory, which ``GradBucket.gradients``
    ignores: there channels-last gradients have their elements in other places.
    """
    offset = 0
    for parameter in parameters:
        numel = parameter.numel()
        piece = buffer[offset : offset + numel]
        if parameter.is_contiguous() or not _is_dense(parameter):
            yield parameter, piece.view(parameter.shape)
        else:
            yield parameter, piece.as_strided(parameter.size(), parameter.stride())
        offset += numel


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` fill its memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
