"""Local SGD over ``torch.distributed``."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.adapter.torch_tensors import local_steps
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.torch_distributed.compressor import DDPCompressor, exchanged


class LocalSteps(local_steps.TorchLocalSteps):
    """Local SGD with compression: ranks exchange the changes of weights after ``period`` steps.

    As ``horovod_fftcomp.torch.LocalSteps``. ``model``: a ``DistributedDataParallel``, whose
    gradients are not averaged from now on: its ``require_backward_grad_sync`` is set to False;
    ``compression``: made of it by ``compress``.

    >>> compression = compress(model, "topk", density=0.05)  # doctest: +SKIP
    >>> local = LocalSteps(model, compression, period=8)  # doctest: +SKIP
    >>> optimizer.step(); local.after_step()  # of torch.optim.SGD, say  # doctest: +SKIP
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        compression: DDPCompressor,
        period: int,
        outer: local_steps.Outer = local_steps.ADD,
    ) -> None:
        is_ddp = isinstance(model, DistributedDataParallel)
        if not (is_ddp and isinstance(compression, DDPCompressor)):
            raise TypeError(
                "LocalSteps takes a DistributedDataParallel and what compress() has made of it, "
                f"got a {type(model).__name__} and a {type(compression).__name__}"
            )
        if model.static_graph:
            raise UnsupportedError(
                "with static_graph=True DDP averages the gradients of the first step whatever is "
                "set; make the DistributedDataParallel without it"
            )
        if compression.sends_gradients and compression.stats()["steps"]:
            raise ValueError(
                "the compressor has residuals of gradients, which are no changes of weights; wrap "
                "the model in a new DistributedDataParallel and call compress() on that"
            )
        super().__init__(exchanged(model), compression, period, outer)
        model.require_backward_grad_sync = False

    def means_of(self, changes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the means of ``changes``, written over them."""
        self._compression.average(changes)
        return changes
