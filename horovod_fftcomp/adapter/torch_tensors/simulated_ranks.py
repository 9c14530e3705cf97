"""Simulation of a job of several ranks that train one PyTorch model, in one process."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from horovod_fftcomp.adapter.compressor import slots_of
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.torch_tensors import arrays
from horovod_fftcomp.adapter.torch_tensors.optimizers import note_exchanged
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.engine.buckets import BUCKET_NBYTES, MIN_NUMEL, make_buckets, with_policy
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import Rule, check_rules, make_policy
from horovod_fftcomp.engine.work import Costs
from horovod_fftcomp.simulation import exchange_once


class SimulatedLearners:
    """``n_learners`` simulated ranks; gradients are exchanged as by Horovod with a compressor.

    ``recipe`` and ``options`` as for ``Compression``; ``rules``, ``min_numel`` and
    ``bucket_nbytes`` as in ``Settings``. Each learner has its own residuals and buffers (running
    means of batch norm); all share the weights, which are equal on all ranks of a job.

    >>> model = torch.nn.Linear(50, 30)
    >>> learners = SimulatedLearners(model, 4, "topk", density=0.05)
    >>> for rank in range(4):
    ...     with learners.turn_of(rank):
    ...         model(torch.randn(8, 50)).square().mean().backward()
    >>> learners.reduce()  # the gradients are the means now: optimizer.step() comes next
    >>> learners.costs[0].sent_nbytes < 0.1 * 4 * 50 * 30
    True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        n_learners: int,
        recipe: str,
        *,
        rules: Sequence[Rule] = (),
        min_numel: int = MIN_NUMEL,
        bucket_nbytes: int = BUCKET_NBYTES,
        **options: Any,
    ) -> None:
        self._policy = policy = make_policy(recipe, **options)
        self._model = model
        self._parameters = Parameters(model)
        specs = self._parameters.specs()
        settings = Settings(min_numel, bucket_nbytes, rules)
        rules = check_rules(settings.rules, policy)
        sizes = settings.min_numel, settings.bucket_nbytes, n_learners
        buckets = make_buckets(specs, policy, rules, *sizes)
        self.engines = [Engine(buckets, rank, n_learners) for rank in range(n_learners)]
        self._buckets = [[tensor.name for tensor in bucket.tensors] for bucket in buckets]
        note_exchanged(self._parameters.tensors, slots_of(specs, buckets), self.engines[0])
        self._numels = {t.name: math.prod(t.shape) for t in specs}
        self._dense = {t.name for t in specs}.difference(*self._buckets)
        self._grads: list[dict[str, np.ndarray]] = [{} for _ in range(n_learners)]
        self._buffers = [self._copied_buffers() for _ in range(n_learners)]
        self.dense_nbytes = 0  # sent by each rank for dense tensors, since the start

    @property
    def costs(self) -> list[Costs]:
        """Bytes, times and errors of each rank since the start."""
        return [engine.costs for engine in self.engines]

    @contextmanager
    def turn_of(self, rank: int) -> Iterator[None]:
        """Return a context for one learner's forward and backward pass; gradients start as None."""
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._buffers[rank][name])
        for parameter in self._parameters.tensors:
            parameter.grad = None
        yield
        self._buffers[rank] = self._copied_buffers()
        flat = arrays.flat_float32(parameter.grad for parameter in self._parameters.tensors)
        self._grads[rank] = {
            name: grad.copy()
            for name, grad in zip(self._parameters.names, flat, strict=True)
            if grad is not None
        }

    def reduce(self) -> None:
        """Exchange the learners' gradients and set the parameters' gradients to the means."""
        bucketed = [
            [
                [grads.get(name, np.zeros(self._numels[name], np.float32)) for name in bucket]
                for bucket in self._buckets
            ]
            for grads in self._grads
        ]
        exchange_once(self.engines, bucketed, random.Random(0))
        totals = {
            name: total
            for number, bucket in enumerate(self._buckets)
            for name, total in zip(bucket, self.engines[0].sums(number), strict=True)
        }
        for name in self._dense:
            addends = [grads[name] for grads in self._grads if name in grads]
            if addends:
                totals[name] = np.add.reduce(addends, axis=0, dtype=np.float32)
                self.dense_nbytes += totals[name].nbytes
        finite = all(np.isfinite(totals[name]).all() for name in self._dense & set(totals))
        for name, parameter in zip(self._parameters.names, self._parameters.tensors, strict=True):
            parameter.grad = None
            if name in totals:
                mean = totals[name] / np.float32(len(self.engines))
                parameter.grad = torch.from_numpy(mean.reshape(parameter.shape)).to(parameter)
        for engine in self.engines:
            engine.observe(finite)
            engine.settle()
        self._grads = [{} for _ in self.engines]

    def discard(self) -> None:
        """Undo the last ``reduce``, whose means were not used; see ``Engine.discard``."""
        for engine in self.engines:
            engine.discard()

    def residual_norms(self) -> list[float]:
        """Return the L2 norm of each rank's residuals, of all tensors together."""
        return [engine.residual_norm() for engine in self.engines]

    def set_density(self, density: float) -> None:
        """Compress with ``density`` from the next step on, except for tensors under a rule."""
        for engine in self.engines:
            engine.buckets = with_policy(engine.buckets, self._policy.with_density(density))

    def _copied_buffers(self) -> dict[str, torch.Tensor]:
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}
