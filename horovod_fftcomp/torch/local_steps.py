"""Ranks that train alone for some steps and then exchange what has changed, compressed."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from horovod_fftcomp.adapter.compressor import Compressor
from horovod_fftcomp.torch.parameters import Parameters


class LocalSteps:
    """Bring the ranks of a model together after every ``period`` steps of a plain optimizer.

    ``model`` as for ``Compression``, equal on all ranks now; ``compression``: a compressor made of
    it, or one of ``hvd.Compression``. UnsupportedError for one that holds for gradients alone: with
    a momentum, of signs, with a loss scaler. The mean over ranks of (weights - those of the last
    meeting) is sent, and what compression leaves of it goes into the next meeting. Moments of
    optimizers and running means stay with each rank. Source: Stich, ICLR 2019 (local SGD); with
    compression and feedback, Basu et al., NeurIPS 2019.

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
        self.steps = 0  # since the last meeting

    def after_step(self) -> bool:
        """Count a step; meet if it is the last one of a period, and tell whether it is."""
        self.steps += 1
        if self.steps < self._period:
            return False
        self.synchronize()
        return True

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make the weights those of the last meeting plus the mean change, on all ranks.

        Where a rank's change has NaN or Inf all ranks go back to the weights of the last meeting.
        Gradients are kept.
        """
        kept = [parameter.grad for _, parameter in self._pairs]
        for (_, parameter), last in zip(self._pairs, self._last, strict=True):
            parameter.grad = last - parameter
            parameter.copy_(last)  # equal on all ranks, as a check of replicas wants them
        try:
            means = self._means()
        finally:
            for (_, parameter), grad in zip(self._pairs, kept, strict=True):
                parameter.grad = grad
        if all(bool(torch.isfinite(mean).all()) for mean in means):
            for (_, parameter), last, mean in zip(self._pairs, self._last, means, strict=True):
                last.copy_(parameter.sub_(mean))
        self.steps = 0

    def _means(self) -> list[torch.Tensor]:
        """Return the means of what lies in the gradients, as Horovod's optimizer would."""
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
