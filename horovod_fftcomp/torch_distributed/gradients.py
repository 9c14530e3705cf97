"""Gradients of a step as DDP's buckets bring them, by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

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
    future: torch.futures.Future[torch.Tensor] = field(init=False)
    waiting: set[int] = field(init=False)  # numbers of the parameters without an average yet

    def __post_init__(self) -> None:
        self.waiting = set(self.gradients)
        self.future = torch.futures.Future(
            devices=[self.buffer.device] if self.buffer.is_cuda else []
        )

    def is_whole(self, nbytes: int) -> bool:
        """Return whether ``buffer`` consists of the gradients, in float32, at least ``nbytes``."""
        numel = sum(gradient.numel() for gradient in self.gradients.values())
        kind = self.buffer.dtype, self.buffer.numel()
        return self.buffer.nbytes >= nbytes and kind == (torch.float32, numel)

    def finish(self, number: int) -> None:
        """Note that a parameter's average has been written; the last one completes the future."""
        self.waiting.discard(number)
        if not self.waiting:
            self.complete()

    def complete(self) -> None:
        """Hand the buffer back to DDP, whose stream waits for what this thread has launched."""
        if not self.future.done():
            self.future.set_result(self.buffer)


class ParameterNumbers:
    """Numbers of a model's parameters, by which the gradients in DDP's buckets are found.

    DDP assigns parameters to other buckets after the first step, so a bucket's index says nothing.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._tensors = parameters.tensors  # kept, since the keys are their addresses
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._tensors)}
        self._gradients: Any = WeakTensorKeyDictionary()  # of each bucket's tensor

    def gradients(self, bucket: dist.GradBucket) -> dict[int, torch.Tensor]:
        """Return views of a bucket's gradients, in the shape and strides of their parameters."""
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise UnsupportedError(
                "DDP exchanges a sparse gradient; make the embedding with sparse=False"
            )
        if buffer not in self._gradients:  # other parameters come in a new tensor
            self._gradients[buffer] = dict(self._views(buffer.detach(), bucket.parameters()))
        return self._gradients[buffer]

    def _views(
        self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of each parameter and its gradient, a view of ``buffer``.

        DDP copies gradients in the order of the parameter's memory, which ``GradBucket.gradients``
        ignores: there channels-last gradients have their elements in other places.
        """
        offset = buffer.storage_offset()
        for parameter in parameters:
            number = self._numbers.get(id(parameter))
            if number is None:
                raise UnsupportedError(
                    f"DDP exchanges a parameter of shape {tuple(parameter.shape)} that was not "
                    "trainable when compress() was called; call it after requires_grad is set, "
                    "with the model that DDP wraps"
                )
            like = torch.empty_like(parameter.detach(), device="meta")
            if like.stride() != parameter.stride():  # its memory has gaps or overlaps
                like = like.contiguous()
            yield number, buffer.as_strided(like.size(), like.stride(), offset)
            offset += parameter.numel()
