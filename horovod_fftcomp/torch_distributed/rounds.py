"""Rounds as collectives of ``torch.distributed``, which are started in the same order on all ranks.

Horovod matches operations by name, ``torch.distributed`` by order. Collectives that gather data of
sizes that other ranks do not know begin with a header that holds sizes, name and the number of
those without a header before it, so ranks that run different operations get an error instead of
each other's data; a thread waits for it. All others have a communicator of their own, in which
nothing meets a header. A step with compressed tensors begins with a header.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from horovod_fftcomp import wire
from horovod_fftcomp.adapter.handshake import compare_facts
from horovod_fftcomp.adapter.stalls import no_answer, ranges
from horovod_fftcomp.adapter.threads import ThreadRound, Worker
from horovod_fftcomp.adapter.watch import NOTICE_S, write_line
from horovod_fftcomp.engine.overlap import Pending
from horovod_fftcomp.errors import ConfigMismatchError, UnsupportedError
from horovod_fftcomp.kernels.cpu import buffer_pool
from horovod_fftcomp.kernels.cuda import Device, is_on_host
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.schemes.hierarchical import NodeLayout, Ranks, node_size_of
from horovod_fftcomp.types import Array

_NAME_NBYTES = 64
# Time after ``timeout_s`` in which the watch reports which rank is late, before Gloo gives up.
_MARGIN_S = 60.0
_LOOK_S = 0.25  # how often a wait looks whether to give up
_PATIENCE_S = 5.0  # how long an exit waits for threads to look
_LONGEST_S = 365 * 86400.0
_GATHERS = ("allgather", "alltoall")

_Group: TypeAlias = Any  # ``dist.ProcessGroupGloo``, whose stubs lack most methods

# A collective: its works, none if nothing is sent; its output; data that are kept until it ends.
Started: TypeAlias = tuple[Sequence[Any], Callable[[], torch.Tensor], torch.Tensor]
SizesOf: TypeAlias = Callable[[Sequence[int]], Array]  # those of every rank, given this rank's

_under_way: set[Any] = set()  # collectives for which threads wait
_parking = threading.Event()


@atexit.register
def _park_waits() -> None:
    """Let no wait under way end any more: that would abort an interpreter that exits."""
    limit = time.monotonic() + _PATIENCE_S
    _parking.set()
    while _under_way and time.monotonic() < limit:
        time.sleep(0.01)
    _parking.clear()  # exit handlers that come later may exchange something


def _meet(store: dist.Store, ranks: Sequence[int], timeout_s: float) -> None:
    """Wait until all ``ranks`` are here; after a while tell for which of them."""
    own, begin, next_s = dist.get_rank(), time.monotonic(), min(NOTICE_S, timeout_s)
    store.set(str(own), "here")
    store.add("count", 1)
    while store.add("count", 0) < len(ranks):
        if (waited_s := time.monotonic() - begin) > next_s:
            late = ranges(rank for rank in ranks if not store.check([str(rank)]))
            waits = f"a new compressor has waited {waited_s:.0f} s for ranks {late}"
            advice = "Make the same compressors, in the same order, on all ranks"
            if waited_s > timeout_s:
                raise ConfigMismatchError(
                    f"{waits}. {advice}; if one is only slow, raise timeout_s"
                )
            write_line(f"{waits}, and will wait up to {timeout_s:.0f} s. {advice}", own)
            next_s = timeout_s
        time.sleep(min(_LOOK_S, 0.01 + waited_s))


def construct_under_run(construct: Callable[[], None], model: Any) -> None:
    """Call ``construct``, by which ``model`` becomes a DDP model as soon as all ranks do so.

    UnsupportedError names ranks that do not do so here: they will not have a compressor.
    """
    store = dist.PrefixStore("fftcomp.run/", dist.distributed_c10d._get_default_store())
    store.set(str(dist.get_rank()), "here")
    construct()
    ranks = dist.get_process_group_ranks(model.process_group)
    if others := ranges(rank for rank in ranks if not store.check([str(rank)])):
        raise UnsupportedError(
            f"ranks {others} do not run under `horovod-fftcomp run`, as processes do that a script "
            "starts by commands of its own (Lightning with devices=2): start all by a launcher, "
            "torchrun --nproc-per-node 2 -m horovod_fftcomp run ..."
        )


class RankGroup:
    """Process group of a compressor alone, with the interface of Horovod's process sets.

    ``ranks``: global ranks, this one included; each of them has to make the group, under the same
    ``name``. ``timeout_s``: how long they wait for each other; ConfigMismatchError names the ranks
    that did not come. ``dist.new_group`` would need the other ranks of the job too, or as many
    groups on each rank.
    """

    gathers: _Group  # for collectives that begin with a header
    sums: _Group  # for all others
    n_started = 0  # how many others this rank has started itself

    def __init__(self, ranks: Sequence[int], name: str, timeout_s: float) -> None:
        self.ranks = list(ranks)
        self.process_set_id = 0 if len(self.ranks) == dist.get_world_size() else 1
        limit = datetime.timedelta(seconds=min(timeout_s + _MARGIN_S, _LONGEST_S))
        place = self.ranks.index(dist.get_rank()), len(self.ranks), limit
        prefix = f"{name}/{wire.fnv1a(str(self.ranks)):x}"
        store = dist.distributed_c10d._get_default_store()
        _meet(dist.PrefixStore(f"{prefix}/here/", store), self.ranks, timeout_s)
        self.gathers, self.sums = (
            dist.ProcessGroupGloo(dist.PrefixStore(f"{prefix}/{use}/", store), *place)
            for use in ("gathers", "sums")
        )

    def rank(self) -> int:
        """Return this rank's index in ``ranks``."""
        return self.sums.rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def included(self) -> bool:
        """Return True: only ranks that take part have this object."""
        return True

    def sizes(self, name: str, own: Sequence[int]) -> Array:
        """Return every rank's sizes, int64 ``[ranks, sizes]``; ``name`` must be equal.

        By an alltoall, which Gloo does in one go, while its allgather is a ring.
        """
        label = name.encode()[-_NAME_NBYTES:].ljust(_NAME_NBYTES)
        header = np.concatenate([np.frombuffer(label, np.int64), np.array(own, np.int64)])
        to_each = torch.from_numpy(np.tile(header, (len(self.ranks), 1)))
        rows, splits = torch.empty_like(to_each), [1] * len(self.ranks)
        works = [self.gathers.alltoall_base(rows, to_each, splits, splits)]
        filled = StartedRound((works, lambda: rows, to_each), name).wait(math.inf)
        names, sizes = np.split(filled, [_NAME_NBYTES // 8], axis=1)
        if (names != names[0]).any():
            compare_facts([{"operation": each.tobytes().decode().strip()} for each in names])
        return sizes


class StartedRound:
    """Round that was started: ``output`` returns what ``works`` have written.

    ``data`` are kept as long as this object. Waits fail from when ``aborted`` is set.
    """

    def __init__(self, started: Started, name: str, aborted: threading.Event | None = None) -> None:
        (self._works, self._output, self._data), self._name = started, name
        self._aborted = aborted or threading.Event()

    def is_done(self) -> bool:
        """Return whether the output is there."""
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout_s: float) -> Any:
        """Return the output; ConfigMismatchError if it is not there after ``timeout_s`` seconds.

        Does not return if the interpreter exits meanwhile.
        """
        limit = time.monotonic() + timeout_s
        for work in self._works:
            _under_way.add(work)
            try:
                while not (work.is_completed() or _parking.is_set()):
                    if self._aborted.is_set() or time.monotonic() > limit:
                        raise ConfigMismatchError(no_answer(repr(self._name), timeout_s))
                    with contextlib.suppress(RuntimeError):  # this look's end; others: see below
                        work.wait(datetime.timedelta(seconds=_LOOK_S))
            finally:
                _under_way.discard(work)
            if not work.is_completed():
                threading.Event().wait()
            with _told(self._name):
                work.wait()
        return self._output().numpy()


class Network:
    """Carries out a compressor's rounds, those of one communicator in the order of their sending.

    A thread for each group waits for headers. Data of ``device``, the GPU that computes steps, go
    through the host's memory: that thread waits for them too, and all gathers have headers.
    ``prepare`` is called in each thread first.
    """

    def __init__(
        self, device: Device | None = None, prepare: Callable[[], None] = lambda: None
    ) -> None:
        self._device, self._prepare = device, prepare
        self._workers: Any = weakref.WeakKeyDictionary()  # by group
        self._aborted = threading.Event()

    def _worker(self, group: RankGroup) -> Worker:
        if group not in self._workers:
            # Which outlives an exit: a communicator that is freed waits for what is under way.
            self._workers[group] = Worker("fftcomp-network", (group.gathers, group.sums))
            self._workers[group].submit(self._prepare)
        return self._workers[group]

    def send(self, round_: Round, name: str, group: RankGroup) -> Pending:
        """Start a round without waiting; ``group``: its participants."""
        worker = self._worker(group)
        if self._device is None and (round_.receives or round_.collective not in _GATHERS):
            group.n_started += 1
            data, sizes_of = torch.from_numpy(round_.data), partial(group.sizes, name)
            with _told(name):
                started = started_on(group.sums, data, round_, sizes_of)
            return StartedRound(started, name, self._aborted)
        device = None if is_on_host(round_.data) else self._device
        fetched = device.fetch(round_.data) if device else lambda: round_.data
        told = f"{name} after {group.n_started} rounds" if group.n_started else name
        output = worker.submit(_completed, fetched, round_, told, group)
        return ThreadRound(output, name, self._aborted, *([device.upload] if device else []))

    def sizes(self, name: str, group: RankGroup, own: Sequence[int]) -> ThreadRound:
        """Start to gather every rank's sizes, int64 ``[ranks, sizes]``; see ``RankGroup``."""
        return ThreadRound(self._worker(group).submit(group.sizes, name, own), name, self._aborted)

    def abort(self) -> None:
        """Make all waits for rounds fail; an abort of Gloo does not end its waits."""
        self._aborted.set()


def ranks_per_node(group: RankGroup) -> int:
    """Return what "auto" stands for: the ranks of a host as torchrun tells them, or 1."""
    own = [int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK")]
    return node_size_of([(n, rank) for n, rank in group.sizes("ranks per node", own).tolist()])


def node_groups(
    node_size: int, ranks: Sequence[int], name: str, timeout_s: float
) -> Mapping[Ranks, RankGroup]:
    """Return the groups of this rank's node and of its place in all, by indices into ``ranks``.

    Empty if each node has one rank.
    """
    if node_size == 1:
        return {}
    own = list(ranks).index(dist.get_rank())
    return {
        members: RankGroup([ranks[member] for member in members], name, timeout_s)
        for members in NodeLayout(node_size, len(ranks)).groups()
        if own in members
    }


def _completed(fetched: Callable[[], Array], round_: Round, name: str, group: RankGroup) -> Any:
    on = group.gathers if round_.collective in _GATHERS else group.sums
    asked, sizes_of = round_._replace(receives=()), partial(group.sizes, name)
    with _told(name):
        started = started_on(on, torch.from_numpy(fetched()), asked, sizes_of)
    return StartedRound(started, name).wait(math.inf)


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Raise ConfigMismatchError in place of an error of Gloo."""
    try:
        yield
    except RuntimeError as error:
        raise ConfigMismatchError(
            f"{name!r} failed, since a rank has ended or cannot be reached; look at the other "
            f"ranks' output for the first error ({error})"
        ) from error


def started_on(group: Any, data: torch.Tensor, round_: Round, sizes_of: SizesOf) -> Started:
    """Start a collective of ``group``; ``sizes_of``: gathers sizes that not all ranks know."""
    sizes: Sequence[int] = round_.receives
    if round_.collective in _GATHERS and not sizes:
        to_each = sizes_of(round_.splits or [data.numel()] * group.size())
        if not to_each.any():
            return [], lambda: data, data
        sizes = to_each[:, group.rank()].tolist()
    return _STARTS[round_.collective](data, round_, group, sizes)


def _reduced(data: torch.Tensor, round_: Round, group: Any, sizes: Sequence[int]) -> Started:
    total = data if round_.in_place else data.clone()
    return [group.allreduce([total])] if total.numel() else [], lambda: total, data


def _broadcast(data: torch.Tensor, round_: Round, group: Any, sizes: Sequence[int]) -> Started:
    output = data.clone()
    works = [group.broadcast(output, round_.root)] if output.numel() else []
    return works, lambda: output, data


def _exchanged(data: torch.Tensor, round_: Round, group: Any, sizes: Sequence[int]) -> Started:
    output = _empty(data, sum(sizes))
    works = [group.alltoall_base(output, data, list(sizes), list(round_.splits))]
    return works, lambda: output, data


def _empty(data: torch.Tensor, numel: int) -> torch.Tensor:
    """Return an uninitialized tensor like ``data``; on the host in memory of earlier steps."""
    if data.is_cuda:
        return data.new_empty(numel)
    return torch.from_numpy(buffer_pool.empty(numel, data.numpy().dtype.type))


def _gathered(data: torch.Tensor, round_: Round, group: Any, sizes: Sequence[int]) -> Started:
    """Gather all ranks' data. Equal sizes only can be gathered, so shorter data are padded.

    Within a node, whose ranks gather many values, each broadcasts its own instead.
    """
    longest, is_even = max(sizes), min(sizes) == max(sizes)
    if round_.inside and not is_even:
        every = _empty(data, sum(sizes))
        parts = every.split(list(sizes))
        parts[group.rank()].copy_(data)
        works = [group.broadcast(part, root) for root, part in enumerate(parts) if part.numel()]
        return works, lambda: every, every
    every = _empty(data, len(sizes) * longest)
    missing = longest - data.numel()
    padded = torch.cat([data, data.new_zeros(missing)]) if missing else data
    rows = zip(every.view(len(sizes), longest), sizes, strict=True)
    parts = [] if is_even else [row[:size] for row, size in rows]
    works = [group._allgather_base(every, padded)] if longest else []
    return works, lambda: every if is_even else torch.cat(parts), padded


_STARTS: Mapping[str, Callable[[torch.Tensor, Round, Any, Sequence[int]], Started]] = {
    "allgather": _gathered,
    "allreduce": _reduced,
    "alltoall": _exchanged,
    "broadcast": _broadcast,
}
