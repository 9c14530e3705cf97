"""FSDP2 with replicas (HSDP): sums the gradients of equal shards, compressed, between replicas.

``fully_shard`` reduces gradients within a replica; when it has written a shard's gradients, they
are exchanged with the ranks that hold the same shard of the other replicas.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from horovod_fftcomp.adapter import steps
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.engine.policy import Scheduled
from horovod_fftcomp.errors import UnsupportedError, warn
from horovod_fftcomp.schemes import Round, Tensor
from horovod_fftcomp.torch_distributed.compressor import DistributedCompressor
from horovod_fftcomp.torch_distributed.gradients import Arrival
from horovod_fftcomp.torch_distributed.rounds import RankGroup
from horovod_fftcomp.torch_distributed.steps import DDPStepDriver, Setup

Replicas: TypeAlias = "DeviceMesh | dist.ProcessGroup"

_compressed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_MEND = (
    "shard over the inner dimension alone, fully_shard(model, mesh=mesh['shard']), and give "
    "compress(model, recipe, replicate=mesh['replicate'])"
)


class HSDPCompressor(DistributedCompressor):
    """Compressor between the replicas of a model under ``fully_shard``; ``compress`` makes it.

    Each rank has the state of its shards, by the names that the parameters have in the model.
    """

    driver: ShardDriver

    def __init__(
        self, model: torch.nn.Module, replicate: Replicas, *, policy: Scheduled, settings: Settings
    ) -> None:
        if model in _compressed:
            raise ValueError(
                "compress() was called with this model before; keep the compressor that it returned"
            )
        self._model = model
        self._exchanged, mesh = _sharded(model)
        group, self._peers = _group(replicate), mesh.mesh.flatten().tolist()
        ranks = dist.get_process_group_ranks(group)
        if set(ranks) & set(self._peers) != {dist.get_rank()}:
            raise ValueError(
                f"replicate has ranks {ranks}, but this rank's shards are on ranks {self._peers}: "
                f"only this rank may be in both; {_MEND}"
            )
        if len(self._peers) > 1:
            self._shard = f"shard {self._peers.index(dist.get_rank())} of {len(self._peers)}"
        tensors = [
            Tensor(name, tuple(_local(parameter).shape))
            for name, parameter in zip(self._exchanged.names, self._exchanged.tensors, strict=True)
        ]
        super().__init__(group, _Shards(self._exchanged), tensors, policy, settings)
        for number, parameter in enumerate(self._exchanged.tensors):
            parameter.register_post_accumulate_grad_hook(self.driver.noter(number))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(self.driver.note_reduced)
        _compressed.add(model)

    def _writes(self, rank: int) -> bool:
        """Return whether this rank writes for all: the first of the first shard's replicas."""
        return super()._writes(rank) and self._peers[0] == dist.get_rank()

    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"shard": self._shard or "whole"}

    def _make_steps(self, parts: steps.Parts, setup: Setup) -> ShardDriver:
        peers = RankGroup(self._peers, f"{parts.connection.name}.peers", self._settings.timeout_s)
        return ShardDriver(parts, setup, self._model, peers)


class ShardDriver(DDPStepDriver):
    """Step driver of one model under ``fully_shard``.

    FSDP may reduce a module several times in a backward pass, and calls its hook before the
    gradients are in their tensors, so the exchange begins when the backward pass has ended.
    ``peers``: the ranks that hold the shards of this replica.
    """

    def __init__(
        self, parts: steps.Parts, setup: Setup, model: torch.nn.Module, peers: RankGroup
    ) -> None:
        self._model, self._peers = weakref.ref(model), peers
        self._parameters = setup.parameters.tensors
        self._known = set(map(id, self._parameters))
        self._reduced: set[int] = set()  # numbers of the parameters with gradients in this step
        self._backward = -1  # number of the backward pass under way
        self._writer: torch.cuda.Stream | None = None  # on which FSDP writes gradients
        super().__init__(parts, setup, keeps_unused=False)
        self.thrown_away.stop()  # FSDP replaces gradients of shards itself

    def _reset(self) -> None:
        super()._reset()
        self._reduced.clear()

    # Called in the training thread.

    def note_reduced(self, shards: torch.Tensor) -> None:
        """Note that FSDP has reduced a module's gradients; FSDP calls it before it writes them."""
        self._connection.watch.check()
        self.check_unbroken()
        backward = torch._C._current_graph_task_id()
        if _is_nested(shards.is_cuda):
            self._broken_by = "checkpoint(use_reentrant=True)"
            raise UnsupportedError(
                "a backward pass runs within another, so a step would end several times; call "
                "checkpoint(use_reentrant=False)"
            )
        if self._inside and backward != self._backward:
            self._broken_by = "an error in the backward pass"
            self.check_unbroken()
        if not self._inside:
            self._inside, self._backward = True, backward
            self._writer = torch.cuda.current_stream(shards.device) if shards.is_cuda else None
            # FSDP reduces the first layers in callbacks of its own, which may be queued later.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._close))

    def noter(self, number: int) -> Callable[[torch.Tensor], None]:
        """Return the hook of a parameter that notes that its gradient has been written.

        It holds nothing else of this object: no collector looks into hooks of tensors.
        """
        reduced = self._reduced
        return lambda parameter: reduced.add(number)

    def _close(self) -> None:
        """Exchange the gradients and commit the step; the end of a backward pass."""
        model = self._model()
        for name, parameter in () if model is None else model.named_parameters():
            if isinstance(parameter.grad, DTensor) and id(parameter) not in self._known:
                self._broken_by = f"the gradient of {name!r}, which was frozen or another object"
                raise UnsupportedError(
                    f"{name!r} was frozen, or another object, when compress() was called; call it "
                    "with all parameters trainable, after load_state_dict(assign=True)"
                )
        if self._writer is not None:  # FSDP waits for it in the last backward pass alone
            torch.cuda.current_stream(self._writer.device).wait_stream(self._writer)
        gradients = {n: _local(self._parameters[n].grad) for n in sorted(self._reduced)}
        arrival = Arrival(torch.empty(0), gradients, is_last=True)
        self._worker.submit(self._take, arrival, True, self._stream.mark())
        super()._close()

    # Called in the worker's thread.

    def _exchange(self, arrival: Arrival, begins: bool) -> None:
        self._begin()
        self._check_used(arrival)
        for number, slot in enumerate(self._slots):
            if slot is not None and number not in arrival.gradients:
                self._arrived[slot.bucket][slot.position] = None
        super()._exchange(arrival, begins=False)

    def _check_used(self, arrival: Arrival) -> None:
        """Raise UnsupportedError, on all replicas, if they have gradients of other parameters."""
        own = np.packbits([number in arrival.gradients for number in range(len(self._names))])
        self.other_nbytes += own.nbytes
        sent = self._send(Round("allgather", own), "used").wait(self._settings.timeout_s)
        used = np.unpackbits(sent.reshape(-1, own.size), axis=1)[:, : len(self._names)]
        if (used != used[0]).any():
            number = int((used != used[0]).any(axis=0).argmax())
            raise UnsupportedError(
                f"some replicas have a gradient of {self._names[number]!r} and others have none; "
                "call model.set_reduce_scatter_unused_params(True), which makes it zero there"
            )

    def _finish(self) -> None:
        """Complete the exchanges; drop the step on all ranks if it is not finite on any."""
        super()._finish()
        own = np.array([self._engine.is_finite()], np.uint8)
        name = f"{self._name}.finite in step {self._engine.step}"
        flags = self._connection.send(Round("allgather", own), name, self._peers)
        self._engine.observe(bool(flags.wait(self._settings.timeout_s).all()))


class _Shards(OptimizedParameters):
    """Shards that the replica check compares."""

    def _values(self, number: int) -> torch.Tensor:
        return _local(self.tensors[number])


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a distributed tensor, in its memory."""
    with torch.no_grad():
        return tensor.to_local()


def _is_nested(is_cuda: bool) -> bool:
    """Return whether the backward pass under way was started by another one.

    Hooks of CUDA tensors run in a thread of PyTorch's own, in which no backward pass was started.
    """
    begin = _engine_run_backward.__code__
    started = sum(frame.f_code is begin for frame, _ in traceback.walk_stack(None))
    is_foreign = is_cuda and isinstance(threading.current_thread(), threading._DummyThread)
    return started > (0 if is_foreign else 1)


def _group(replicate: Replicas) -> dist.ProcessGroup:
    """Return the process group of ``replicate``."""
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ValueError(f"replicate is a mesh of {replicate.ndim} dimensions; {_MEND}")
        replicate = replicate.get_group()
    if not isinstance(replicate, dist.ProcessGroup):
        raise TypeError(
            "replicate must be a 1-d DeviceMesh or a process group of the ranks that hold the same "
            f"shards, got a {type(replicate).__name__}; {_MEND}"
        )
    return replicate


def _sharded(model: torch.nn.Module) -> tuple[Parameters, DeviceMesh]:
    """Return the parameters that ``fully_shard`` has sharded, and their mesh."""
    every: dict[str, Any] = dict(model.named_parameters())
    named = [pair for pair in every.items() if isinstance(pair[1], DTensor)]
    if not named or not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TypeError(f"replicate needs a model whose parameters are sharded: {_MEND}")
    rest = [n for n, p in every.items() if p.requires_grad and not isinstance(p, DTensor)]
    if rest:
        warn(
            f"fully_shard does not shard {', '.join(map(repr, rest[:8]))}: nobody sums their "
            "gradients, so ranks train them apart; call fully_shard(model, mesh=mesh['shard']) too"
        )
    mesh: DeviceMesh = named[0][1].device_mesh
    for name, parameter in named:
        if parameter.placements[0].is_replicate():
            raise UnsupportedError(
                f"{name!r} is replicated by fully_shard or replicate(), which sum gradients dense "
                f"before any hook; {_MEND}"
            )
        if parameter.device_mesh != mesh:
            raise UnsupportedError(
                f"{named[0][0]!r} is sharded over {mesh}, but {name!r} over "
                f"{parameter.device_mesh}; compress() needs one mesh for all parameters"
            )
    return Parameters(named), mesh
