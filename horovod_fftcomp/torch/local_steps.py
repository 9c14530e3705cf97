"""Local SGD over Horovod."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from horovod_fftcomp.adapter.torch_tensors import local_steps
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters


class LocalSteps(local_steps.TorchLocalSteps):
    """Local SGD with compression: ranks exchange the changes of weights after ``period`` steps.

    Each rank takes steps of a plain optimizer. After ``period`` steps, every rank sends the change
    of its weights since the last exchange, and all subtract the mean of the changes, by a step of
    the outer optimizer, from the weights of the last exchange; what compression does not send is
    added to the next change (error feedback). Moments of optimizers and running means stay local.

    ``model``: as for ``Compression``, equal on all ranks at the start; ``compression``: a
    compressor made of it, or one of ``hvd.Compression``. ``outer``: function that returns the outer
    optimizer for a list of weights; the default adds the mean change. Raises UnsupportedError for
    compressors that are for gradients only: with momentum, of signs, or with a loss scaler. Source:
    Stich, ICLR 2019 (local SGD); Basu et al., NeurIPS 2019 (with compression and error feedback);
    Douillard et al. 2023 (DiLoCo: with an outer optimizer).

    >>> compression = Compression.topk(model, density=0.05)  # doctest: +SKIP
    >>> local = LocalSteps(model, compression, period=8)  # doctest: +SKIP
    >>> optimizer.step(); local.after_step()  # of torch.optim.SGD, say  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        compression: Any,
        period: int,
        process_set: hvd.ProcessSet | None = None,
        outer: local_steps.Outer = local_steps.ADD,
    ) -> None:
        super().__init__(Parameters(model), compression, period, outer)
        self.process_set = process_set or hvd.global_process_set

    def means_of(self, changes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the means of ``changes``, as Horovod's optimizer would of the parameters' grad."""
        grads, sent = [parameter.grad for parameter in self._parameters], []
        try:
            each = zip(self._names, self._parameters, changes, strict=True)
            for name, parameter, change in reversed(list(each)):
                parameter.grad = change  # by which the compressor knows it
                data, context = self._compression.compress(change)
                handle = hvd.allreduce_async_(
                    data, name=f"local_steps.{name}", op=hvd.Average, process_set=self.process_set
                )
                sent.append((handle, context))
            means = [
                self._compression.decompress(hvd.synchronize(handle), context)
                for handle, context in sent
            ]
        finally:
            for parameter, grad in zip(self._parameters, grads, strict=True):
                parameter.grad = grad
        return means[::-1]
