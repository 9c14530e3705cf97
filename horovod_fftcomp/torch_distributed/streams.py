"""Rounds of a GPU's data as collectives that streams wait for, on the process group of DDP.

Two communicators of NCCL may wait for each other for good if two ranks launch their collectives in
different orders. So one thread launches all of them: the one in which DDP calls its hook, whose own
collectives, and those of the backward pass, come in the same order on all ranks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from horovod_fftcomp.engine.overlap import Pending
from horovod_fftcomp.kernels.cuda import is_on_host
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch_distributed.rounds import NetworkThread, RankGroup
from horovod_fftcomp.types import Array

_Sizes: TypeAlias = Callable[[Sequence[int]], Array]  # of every rank, given this rank's
_SWITCH = "HOROVOD_FFTCOMP_NCCL"
_ON_HOST = ("gloo", "mpi", "ucc")  # for whose collectives the host waits
_all_gather: Any = getattr(dist, "all_gather_single", None)  # its name in later versions
_all_gather = _all_gather or dist.all_gather_into_tensor


def stream_group(group: dist.ProcessGroup, place: torch.device) -> dist.ProcessGroup | None:
    """Return ``group`` if streams of ``place`` wait for its collectives, as for NCCL's, or None.

    None too if the variable HOROVOD_FFTCOMP_NCCL is 0.
    """
    if place.type == "cpu" or os.environ.get(_SWITCH) == "0":
        return None
    return None if group._get_backend(place).name().lower() in _ON_HOST else group


class StreamRound:
    """Round that was launched: ``output`` returns what ``work`` has written; None: nothing is sent.

    ``data`` are kept until the present stream waits for the work.
    """

    def __init__(self, work: Any, output: Callable[[], torch.Tensor], data: torch.Tensor) -> None:
        self._work, self._output, self._data = work, output, data

    def is_done(self) -> bool:
        """Return whether the GPU has the output; the host need not wait for that."""
        return self._work is None or bool(self._work.is_completed())

    def join(self) -> None:
        """Make the present stream wait for the work."""
        if self._work is not None:
            self._work.wait()

    def wait(self, timeout_s: float) -> Any:
        """Return the output, for work that is launched on the present stream from now on."""
        self.join()
        return self._output()


class StreamNetwork:
    """Carries out rounds whose data are on a GPU by ``group``, all others by ``thread``.

    ``group``: the process group of the ranks of a compressor. Call ``send`` in one thread, in the
    same order on all ranks. The host waits only for sizes that other ranks do not know, at most
    ``limit_s()`` seconds.
    """

    limit_s: Callable[[], float]  # set once there is a watch

    def __init__(
        self, thread: NetworkThread, group: dist.ProcessGroup, place: torch.device
    ) -> None:
        self._thread, self._place, self._last = thread, place, group
        ranks = tuple(dist.get_process_group_ranks(group))
        self._groups = {ranks: group}
        self._pending: StreamRound | None = None

    def send(self, round_: Round, name: str, group: RankGroup) -> Pending:
        """Start a round without waiting; ``group``: its participants."""
        if is_on_host(round_.data):
            return self._thread.send(round_, name, group)
        given: Any = round_.data
        on = self._groups[tuple(group.ranks)]
        if on is not self._last and self._pending is not None:
            self._pending.join()  # so that no two communicators are at work at a time
        sizes = functools.partial(self._sizes, name, group)
        self._last, self._pending = on, _LAUNCH[round_.collective](given, round_, group, on, sizes)
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
        """Return every rank's sizes, ``[ranks, sizes]``; by the thread, which keeps the order."""
        return self._thread.sizes(name, group, own).wait(self.limit_s())

    def abort(self) -> None:
        """Make all waits for rounds fail, and end kernels that wait for other ranks."""
        self._thread.abort()
        for group in self._groups.values():
            backend: Any = group._get_backend(self._place)
            if hasattr(backend, "abort"):
                backend.abort()


def _reduced(
    data: torch.Tensor, round_: Round, group: RankGroup, on: dist.ProcessGroup, sizes_of: _Sizes
) -> StreamRound:
    total = data if round_.in_place else data.clone()
    work = dist.all_reduce(total, group=on, async_op=True) if len(total) else None
    return StreamRound(work, lambda: total, data)


def _broadcast(
    data: torch.Tensor, round_: Round, group: RankGroup, on: dist.ProcessGroup, sizes_of: _Sizes
) -> StreamRound:
    output, root = data.clone(), group.ranks[round_.root]
    work = dist.broadcast(output, root, group=on, async_op=True) if len(output) else None
    return StreamRound(work, lambda: output, data)


def _exchanged(
    data: torch.Tensor, round_: Round, group: RankGroup, on: dist.ProcessGroup, sizes_of: _Sizes
) -> StreamRound:
    own, to_each = list(round_.splits), sizes_of(round_.splits)
    sizes = to_each[:, group.rank()].tolist()
    output = data.new_empty(sum(sizes))
    if not to_each.any():
        return StreamRound(None, lambda: output, data)
    work = dist.all_to_all_single(output, data, sizes, own, group=on, async_op=True)
    return StreamRound(work, lambda: output, data)


def _gathered(
    data: torch.Tensor, round_: Round, group: RankGroup, on: dist.ProcessGroup, sizes_of: _Sizes
) -> StreamRound:
    """Gather all ranks' data; shorter ones are padded."""
    sizes = [len(data)] * group.size()
    if not round_.equal:
        sizes = sizes_of(sizes)[:, 0].tolist()
    longest = max(sizes)
    rows = data.new_empty(group.size(), longest)
    if not longest:
        return StreamRound(None, lambda: rows.view(-1), data)
    padded = data
    if len(data) < longest:
        padded = torch.cat([data, data.new_zeros(longest - len(data))])
    work = _all_gather(rows.view(-1), padded, group=on, async_op=True)

    def output() -> torch.Tensor:
        if min(sizes) == longest:
            return rows.view(-1)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    return StreamRound(work, output, padded)


_LAUNCH = {
    "allgather": _gathered,
    "allreduce": _reduced,
    "alltoall": _exchanged,
    "broadcast": _broadcast,
}
