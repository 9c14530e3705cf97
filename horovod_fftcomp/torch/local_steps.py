"""Local SGD: ranks train alone for some steps, then average their changes, compressed."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from horovod_fftcomp.adapter.compressor import Compressor
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters


class LocalSteps:
    """Local SGD with compression: the ranks' weights are averaged after every ``period`` steps.

    Each rank takes steps of a plain optimizer. After ``period`` steps, every rank sends the change
    of its weights since the last exchange, and all add the mean of the changes to the weights of
    the last exchange; what compression does not send is added to the next change (error feedback).
    Moments of optimizers and running means stay local.

    ``model``: as for ``Compression``, equal on all ranks at the start; ``compression``: a
    compressor made of it, or one of ``hvd.Compression``. Raises UnsupportedError for compressors
    that are for gradients only: with momentum, of signs, or with a loss scaler; ValueError unless
    ``period`` is a whole number from 1. Source: Stich, ICLR 2019 (local SGD); with compression and
    error feedback: Basu et al., NeurIPS 2019.

    >>> compression = Compression.topk(model, density=0.05)  # doctest: +SKIP
    >>> local = LocalSteps(model, compression, period=8)  # doctest: +SKIP
    >>> optimizer.step(); local.after_step()  # of torch.optim.SGD, say  # doctest: +SKIP
    """

    def __init__(
        self, model: Any, compression: Any, period: int, process_set: hvd.ProcessSet | None = None
    ) -> None:
        if type(period) is not int or period < 1:
            raise ValueError(f"period must be a whole number of steps from 1, got {period!r}")
        if isinstance(compression, Compressor):
            compression.check_differences()
        parameters = Parameters(model)
        self._pairs = list(zip(parameters.names, parameters.tensors, strict=True))
        self._last = [parameter.detach().clone() for _, parameter in self._pairs]
        self._compression = compression
        self.process_set = process_set or hvd.global_process_set
        self._period = period
        self.steps = 0  # since the last exchange

    def after_step(self) -> bool:
        """Count a step; return True after the last one of a period, which calls ``synchronize``."""
        self.steps += 1
        if self.steps < self._period:
            return False
        self.synchronize()
        return True

    @torch.no_grad()
    def synchronize(self) -> None:
        """Set the weights to those of the last exchange plus the mean change over ranks.

        If a rank's change has NaN or Inf, all ranks restore the weights of the last exchange.
        Gradients are kept.
        """
        grads = [parameter.grad for _, parameter in self._pairs]
        for (_, parameter), last in zip(self._pairs, self._last, strict=True):
            parameter.grad = last - parameter
            parameter.copy_(last)  # equal on all ranks, for the replica check
        try:
            means = self._means()
        finally:
            for (_, parameter), grad in zip(self._pairs, grads, strict=True):
                parameter.grad = grad
        if all(bool(torch.isfinite(mean).all()) for mean in means):
            for (_, parameter), last, mean in zip(self._pairs, self._last, means, strict=True):
                last.copy_(parameter.sub_(mean))
        self.steps = 0

    def _means(self) -> list[torch.Tensor]:
        """Return the means over ranks of the parameters' ``grad``, as Horovod's optimizer would."""
        sent = []
        for name, parameter in reversed(self._pairs):
            data, context = self._compression.compress(parameter.grad)
            handle = hvd.allreduce_async_(
                data, name=f"local_steps.{name}", op=hvd.Average, process_set=self.process_set
            )
            sent.append((handle, context))
        means = [
            self._compression.decompress(hvd.synchronize(handle), context)
            for handle, context in sent
        ]
        return means[::-1]
