"""Simulated ranks whose gradients stay on a GPU, which computes what they would send."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from horovod_fftcomp.adapter.torch_tensors import arrays
from horovod_fftcomp.adapter.torch_tensors.optimizers import note_exchanged
from horovod_fftcomp.adapter.torch_tensors.simulated_ranks import SimulatedLearners
from horovod_fftcomp.engine.drive import drive_all, exchange_of
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Slot
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.simulation import InProcessWorld


class LearnersOnDevice(SimulatedLearners):
    """Simulated learners of a model without buffers whose exchanges ``device`` computes."""

    def __init__(
        self, model: torch.nn.Module, n_learners: int, recipe: str, device: Any, **options: Any
    ) -> None:
        super().__init__(model, n_learners, recipe, **options)
        buckets = self.engines[0].buckets
        self.engines = [Engine(buckets, rank, n_learners, device) for rank in range(n_learners)]
        slots = {
            name: Slot(number, place)
            for number, names in enumerate(self._buckets)
            for place, name in enumerate(names)
        }
        found = [slots.get(name) for name in self._parameters.names]
        note_exchanged(self._parameters.tensors, found, self.engines[0])
        self._placed: list[dict[str, torch.Tensor]] = [{} for _ in range(n_learners)]

    @contextmanager
    def turn_of(self, rank: int) -> Iterator[None]:
        """Return a context for one learner's forward and backward pass."""
        for parameter in self._parameters.tensors:
            parameter.grad = None
        yield
        grads = arrays.flat_float32(
            (parameter.grad for parameter in self._parameters.tensors), in_place=True
        )
        self._placed[rank] = dict(zip(self._parameters.names, grads, strict=True))

    def reduce(self) -> None:
        """Exchange the learners' gradients and set the parameters' gradients to the means."""
        totals: dict[str, torch.Tensor] = {}
        for number, names in enumerate(self._buckets):
            exchanges = {
                engine.rank: exchange_of(engine, number, [grads[name] for name in names])
                for engine, grads in zip(self.engines, self._placed, strict=True)
            }
            drive_all(exchanges, lambda rounds: dict(enumerate(outputs_of([*rounds.values()]))))
            totals |= zip(names, self.engines[0].sums(number), strict=True)
        for name in self._dense:
            totals[name] = torch.stack([grads[name] for grads in self._placed]).sum(0)
            self.dense_nbytes += totals[name].nbytes
            for engine in self.engines:
                arrays.observe(engine, totals[name])
        for name, parameter in zip(self._parameters.names, self._parameters.tensors, strict=True):
            total = totals[name]
            total = torch.from_numpy(total) if isinstance(total, np.ndarray) else total
            mean = total.to(parameter) / len(self.engines)
            parameter.grad = mean.view(parameter.shape)
        for engine in self.engines:
            engine.settle()


def outputs_of(rounds: Sequence[Round]) -> list[Any]:
    """Return what a network would give to each rank, on the device where the data are there."""
    if isinstance(rounds[0].data, np.ndarray):
        world = InProcessWorld(len(rounds))
        for rank, round_ in enumerate(rounds):
            world.submit(rank, "round", round_)
        return world.complete("round")
    data = [round_.data for round_ in rounds]
    if rounds[0].collective == "allgather":
        return [torch.cat(data)] * len(data)
    if rounds[0].collective == "broadcast":
        return [data[rounds[0].root].clone() for _ in data]
    if rounds[0].collective == "allreduce":
        total = torch.stack(data).sum(0)
        return [total.clone() for _ in data]
    pieces = [round_.data.split(round_.splits) for round_ in rounds]
    return [torch.cat(to_one) for to_one in zip(*pieces, strict=True)]


@functools.cache
def kernels_on(place: torch.device) -> Any:
    """Return the device of kernels on a GPU, all compiled in one module; runs share it."""
    from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice

    device = TorchDevice(place)
    device.functions(cuda.source(), cuda.NAMES)
    return device
