"""Rounds of a GPU's data as collectives that streams wait for, on the process group of DDP.

Two communicators of NCCL may wait for each other for good if two ranks launch their collectives in
different orders. So one thread launches all of them: the one in which DDP calls its hook, whose own
collectives, and those of the backward pass, come in the same order on all ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from horovod_fftcomp.engine.overlap import Pending
from horovod_fftcomp.kernels.cuda import is_on_host
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch_distributed.rounds import (
    Network,
    RankGroup,
    StartedRound,
    started_on,
)
from horovod_fftcomp.types import Array

_SWITCH = "HOROVOD_FFTCOMP_NCCL"
# The first is its name in later versions.
_all_gather: Any = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
_ON_HOST = ("gloo", "mpi", "ucc")  # for whose collectives the host waits


def streams_wait(group: dist.ProcessGroup, place: torch.device) -> bool:
    """Return whether streams of ``place`` wait for the collectives of ``group``, as for NCCL's.

    False too if the variable HOROVOD_FFTCOMP_NCCL is 0.
    """
    if place.type == "cpu" or os.environ.get(_SWITCH) == "0":
        return False
    return group._get_backend(place).name().lower() not in _ON_HOST


class StreamRound(StartedRound):
    """Round that was launched; its data are kept until the present stream waits for the works.

    The host need not wait until it ``is_done``.
    """

    def join(self) -> None:
        """Make the present stream wait for the works."""
        for work in self._works:
            work.wait()

    def wait(self, timeout_s: float) -> Any:
        """Return the output, for work that is launched on the present stream from now on."""
        self.join()
        return self._output()


class StreamNetwork:
    """Carries out rounds whose data are on a GPU by ``group``, all others by ``host``.

    ``group``: the process group of the ranks of a compressor. Call ``send`` in one thread, in the
    same order on all ranks. The host waits only for sizes that other ranks do not know, at most
    ``limit_s()`` seconds.
    """

    limit_s: Callable[[], float]  # set once there is a watch

    def __init__(self, host: Network, group: dist.ProcessGroup, place: torch.device) -> None:
        self._host, self._place, self._last = host, place, group
        ranks = tuple(dist.get_process_group_ranks(group))
        self._groups = {ranks: group}
        self._pending: StreamRound | None = None

    def send(self, round_: Round, name: str, group: RankGroup) -> Pending:
        """Start a round without waiting; ``group``: its participants."""
        if is_on_host(round_.data):
            return self._host.send(round_, name, group)
        given: Any = round_.data
        on = self._groups[tuple(group.ranks)]
        if on is not self._last and self._pending is not None:
            self._pending.join()  # so that no two communicators are at work at a time
        sizes = functools.partial(self._sizes, name, group)
        started = started_on(_StreamGroup(on, group), given, round_, sizes)
        self._last, self._pending = on, StreamRound(started, name)
        return self._pending

    def make_groups(self, every: Iterable[Sequence[int]]) -> None:
        """Make process groups of these ranks for their rounds; call it on all ranks of the job."""
        backend = dist.get_backend(self._last)
        for ranks in every:
            made = dist.new_group(list(ranks), backend=backend)
            if dist.get_rank() in ranks:
                self._groups[tuple(ranks)] = made

    def is_under_way(self) -> bool:
        """Return whether the GPU has not ended the last round; safe to call in other threads."""
        pending = self._pending
        return pending is not None and not pending.is_done()

    def _sizes(self, name: str, group: RankGroup, own: Sequence[int]) -> Array:
        """Return every rank's sizes, ``[ranks, sizes]``; by the host, which keeps the order."""
        return self._host.sizes(name, group, own).wait(self.limit_s())

    def abort(self) -> None:
        """Make all waits for rounds fail, and end kernels that wait for other ranks."""
        self._host.abort()
        for group in self._groups.values():
            backend: Any = group._get_backend(self._place)
            if hasattr(backend, "abort"):
                backend.abort()


class _StreamGroup(NamedTuple):
    """The collectives of a ``RankGroup``, by the process group ``on``, for streams to wait."""

    on: dist.ProcessGroup
    group: RankGroup

    def rank(self) -> int:
        return self.group.rank()

    def size(self) -> int:
        return self.group.size()

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        return dist.all_reduce(tensors[0], group=self.on, async_op=True)

    def broadcast(self, output: torch.Tensor, root: int) -> Any:
        return dist.broadcast(output, self.group.ranks[root], group=self.on, async_op=True)

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> Any:
        return _all_gather(output, own, group=self.on, async_op=True)

    def alltoall_base(
        self, output: torch.Tensor, data: torch.Tensor, sizes: list[int], splits: list[int]
    ) -> Any:
        return dist.all_to_all_single(output, data, sizes, splits, group=self.on, async_op=True)
