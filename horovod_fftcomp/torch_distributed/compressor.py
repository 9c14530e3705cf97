"""The compressors of this adapter."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.steps import Parts
from horovod_fftcomp.adapter.torch_tensors.compressor import TensorCompressor
from horovod_fftcomp.adapter.torch_tensors.device import device_of
from horovod_fftcomp.adapter.torch_tensors.optimizers import note_exchanged
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.engine.policy import Scheduled
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.schemes.hierarchical import NodeLayout, Ranks
from horovod_fftcomp.torch_distributed.hook import HookState, note_passes
from horovod_fftcomp.torch_distributed.rounds import (
    Network,
    RankGroup,
    node_groups,
    ranks_per_node,
)
from horovod_fftcomp.torch_distributed.side_stream import SideStream
from horovod_fftcomp.torch_distributed.steps import DDPStepDriver, Setup
from horovod_fftcomp.torch_distributed.streams import StreamNetwork, streams_wait

# Compressors of this process by their ranks; each of these makes its compressors in the same order.
_n_made: Counter[tuple[int, ...]] = Counter()


class DistributedCompressor(TensorCompressor):
    """Base class of the compressors of this adapter.

    ``group``: the ranks between which gradients are averaged; ``optimized``: the parameters that
    they compare; ``tensors``: names and shapes of the gradients.
    """

    _exchanged: Parameters  # set before ``__init__``
    _set: RankGroup
    driver: DDPStepDriver
    _streams: StreamNetwork | None = None  # of a GPU's data; None if the host carries out all

    def __init__(
        self,
        group: dist.ProcessGroup,
        optimized: OptimizedParameters,
        tensors: Sequence[Tensor],
        policy: Scheduled,
        settings: Settings,
    ) -> None:
        super().__init__(policy, settings)
        ranks = dist.get_process_group_ranks(group)
        self._parameters, self._tensors = optimized, tensors
        trainable = optimized.tensors[: len(tensors)]
        self._dtypes = [str(parameter.dtype) for parameter in trainable]
        place = _place_of(trainable)
        timeout_s = settings.timeout_s
        group_name = f"fftcomp.{_n_made[tuple(ranks)]}"
        _n_made[tuple(ranks)] += 1
        self._set = own = RankGroup(ranks, group_name, timeout_s)
        self._on_nodes(lambda: ranks_per_node(own))
        buckets = self._buckets_of(self._tensors)
        device = device_of(trainable, buckets)
        stream = SideStream(place)
        host = Network(device, stream.enter)
        # Else ranks of others would not make the process groups of nodes.
        has_all = self.policy.node_size == 1 or own.size() == dist.get_world_size()
        if device is not None and has_all and streams_wait(group, place):
            self._streams = StreamNetwork(host, group, place)
        network: StreamNetwork | Network = self._streams or host
        groups = functools.partial(self._node_groups, f"{group_name}.node")
        self._make_connection(network.send, network.abort, groups, by_order=True)
        if self._streams is not None:
            watch = self.connection.watch
            self._streams.limit_s = lambda: max(timeout_s, watch.limit_s)
        parts = self._make_parts(buckets, device, self.connection.send)
        setup = Setup(self._exchanged, stream, optimized, self._is_perturbed, self._streams)
        self.driver = self._make_steps(parts, setup)
        note_exchanged(trainable, parts.slots, self.engine)
        self._await_optimizer(always=True)

    def _node_groups(self, name: str) -> Mapping[Ranks, RankGroup]:
        """Make the groups of nodes; all ranks call it."""
        ranks, size = self._set.ranks, self.policy.node_size
        if self._streams is not None and size > 1:
            every = NodeLayout(size, len(ranks)).groups()
            self._streams.make_groups([ranks[member] for member in each] for each in every)
        return node_groups(size, ranks, name, self._settings.timeout_s)

    def _make_steps(self, parts: Parts, setup: Setup) -> DDPStepDriver:
        """Return the step driver."""
        raise NotImplementedError

    def _is_perturbed(self) -> bool:
        """Return whether weights are meant to differ between ranks in the present pass."""
        return False

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"messages on GPUs": self._streams is not None}

    def rejoin(self) -> list[int]:
        """Raise UnsupportedError: torch.distributed restarts all processes of an elastic job."""
        raise UnsupportedError(
            "elastic jobs of torchrun restart all processes; save gathered_state_dict() in a "
            "checkpoint and load it into the compressor of the restarted job"
        )


class DDPCompressor(DistributedCompressor):
    """Compressor of the gradients of a model under DDP; ``compress`` makes it.

    Gradients are averaged over the ranks of the model's process group. State is kept by the names
    that the parameters have in the wrapped model, so it does not depend on DDP's buckets.
    """

    def __init__(
        self, model: DistributedDataParallel, *, policy: Scheduled, settings: Settings
    ) -> None:
        self._model = weakref.ref(model)  # DDP holds this object, where no collector looks
        self._exchanged = exchanged(model)
        self._keeps_unused = model.find_unused_parameters or model.static_graph
        optimized = OptimizedParameters(self._exchanged)
        super().__init__(model.process_group, optimized, self._exchanged.specs(), policy, settings)
        self._note = note_passes(model)

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        super()._note_step(optimizer)
        self._note.forget()

    def _is_perturbed(self) -> bool:
        model = self._model()
        return model is not None and self._note.is_perturbed(model)

    def _make_steps(self, parts: Parts, setup: Setup) -> DDPStepDriver:
        return DDPStepDriver(parts, setup, self._keeps_unused)

    def hook_pair(self) -> tuple[Any, Any]:
        """Return state and function of the communication hook, as ``register_comm_hook`` takes."""
        return HookState(self), HookState.exchange

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket of DDP; return the future of its averages."""
        if not isinstance(bucket, dist.GradBucket):
            raise UnsupportedError(
                "torch.compile with optimize_ddp='python_reducer' passes no bucket to the hook and "
                "ignores its result; set torch._dynamo.config.optimize_ddp = 'ddp_optimizer'"
            )
        if not self.sends_gradients:
            raise UnsupportedError(
                "LocalSteps exchanges this model's changes, but DDP passes on its gradients too; "
                "leave model.require_backward_grad_sync False, as LocalSteps has set it"
            )
        model = self._model()
        if model is not None and model._join_config.enable:
            raise UnsupportedError(
                "DDP's join() lets ranks without data send zeros, to which their residuals would "
                "be added; give all ranks the same number of batches: DistributedSampler with "
                "drop_last=True"
            )
        return self.driver.exchange(bucket)

    def average(self, values: Sequence[torch.Tensor]) -> None:
        """Replace ``values``, one for each exchanged parameter, by their averages over ranks."""
        self.driver.average(values)


def _place_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of all ``parameters``; UnsupportedError unless it is a CPU or one GPU."""
    places = {parameter.device for parameter in parameters} or {torch.device("cpu")}
    if len(places) > 1 or not {place.type for place in places} <= {"cpu", "cuda"}:
        raise UnsupportedError(
            f"the model has parameters on {' and '.join(sorted(map(str, places)))}; compress() "
            "supports models that lie whole on the CPU or on one NVIDIA GPU"
        )
    return places.pop()


def exchanged(model: DistributedDataParallel) -> Parameters:
    """Return the parameters whose gradients DDP exchanges, by their names in the wrapped model."""
    ignored = model.parameters_to_ignore
    named = [pair for pair in model.module.named_parameters() if pair[0] not in ignored]
    return Parameters(named)
