"""Horovod for PyTorch within one process: its ranks are threads, its C++ core is replaced.

All of Horovod's Python code runs as it is, its optimizer too; below it are two objects of the
functions that Horovod would call in C++: ``mpi_ops.mpi_lib`` and ``_basics.MPI_LIB_CTYPES``.

Like Horovod it matches operations by kind, name and process set, copies at the end of an operation
and not at its begin, and fails on all ranks if dtypes or shapes differ, if a name comes twice or if
a rank has joined that an operation needs. Unlike it, a job whose ranks all wait fails by
``WouldHangError``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import horovod.torch as hvd
import pytest
import torch
from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from tests.rank_threads import Ranks, WouldHangError

__all__ = ["FakeHorovod", "HorovodInternalError", "WouldHangError", "run"]

_FUNCTION = re.compile(
    r"horovod_torch_(grouped_)?(allreduce|allgather|broadcast|alltoall)_async_(torch_\w+)"
)


class Request(NamedTuple):
    """What one rank brings into an operation."""

    handle: int
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]
    same: tuple[Any, ...]  # what has to be the same on all ranks, beside dtypes and shapes
    splits: torch.Tensor | None = None  # of an alltoall
    received: torch.Tensor | None = None


def run(size: int, work: Callable[[int], None], **options: Any) -> None:
    """Call ``work(rank)`` on each of ``size`` ranks; raise the first error of one of them."""
    with FakeHorovod(size, **options) as fake:
        fake.ranks.run(work)


class FakeHorovod:
    """The core of a job of ``size`` ranks on one host; while it is entered, Horovod has no other.

    ``options``: of ``Ranks``.
    """

    def __init__(self, size: int, **options: Any) -> None:
        self.ranks = Ranks(size, **options)
        self.sets: dict[int, list[int]] = {0: list(range(size))}
        self._adding: dict[tuple[int, ...], set[int]] = {}
        self._counts = [itertools.count() for _ in range(size)]
        self._begun: dict[tuple[int, str, str], dict[int, Request]] = {}
        self._names: dict[int, str] = {}  # of operations that are not done, by handle
        self._errors: dict[int, str] = {}  # of operations that are done; "" if it went well
        self._joined: dict[int, Request] = {}
        self._is_down = False
        self._patched = pytest.MonkeyPatch()

    def __enter__(self) -> FakeHorovod:
        self.ranks.__enter__()
        n_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._restore = lambda: torch.set_num_threads(n_threads)
        basics, patched = mpi_ops._basics, self._patched
        patched.setattr(mpi_ops, "mpi_lib", _Operations(self, mpi_ops.mpi_lib))
        patched.setattr(basics, "MPI_LIB_CTYPES", _Basics(self, basics.MPI_LIB_CTYPES))
        patched.setattr(process_sets, "_basics", basics)  # TensorFlow's, if it came later
        patched.setattr(mpi_ops, "_handle_map", {})
        patched.setattr(hvd.global_process_set, "ranks", self.sets[0])
        patched.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()
        self._patched.undo()
        self.ranks.__exit__(*error)

    def begin(self, kind: str, name: bytes | str, set_id: int, make: Callable[..., Request]) -> int:
        """Begin an operation of the calling rank; return its handle."""
        rank = self.ranks.current()
        assert rank is not None
        self._check_is_up()
        if rank not in self.sets[set_id]:
            raise RuntimeError(f"rank {rank} is not in process set {set_id}")
        count = next(self._counts[rank])
        handle = count * self.ranks.size + rank
        text = name.decode() if isinstance(name, bytes) else name
        text = text or f"noname.{count}"
        requests = self._begun.setdefault((set_id, kind, text), {})
        if rank in requests:
            raise RuntimeError(
                f"Requested to {kind} a tensor with the same name as another tensor that is "
                f"currently being processed: {text}"
            )
        requests[rank] = make(handle)
        self._names[handle] = f"{kind} {text!r}" + (f" of set {set_id}" if set_id else "")
        self._complete()
        self.ranks.progressed()
        return handle

    def join(self, output: torch.Tensor) -> int:
        """Take part with zeros in whatever the others allreduce, until all have joined."""
        rank = self.ranks.current()
        assert rank is not None
        self._check_is_up()
        handle = next(self._counts[rank]) * self.ranks.size + rank
        self._joined[rank] = Request(handle, [], [output], ())
        self._names[handle] = "join"
        self._complete()
        if len(self._joined) == self.ranks.size:
            for request in self._joined.values():
                request.outputs[0].fill_(rank)
                self._end(request, "")
            self._joined.clear()
        self.ranks.progressed()
        return handle

    def is_done(self, handle: int) -> bool:
        """Tell whether an operation is done; let other ranks run if not."""
        if handle not in self._errors:
            self.ranks.look(self._names[handle])
        return handle in self._errors

    def wait(self, handle: int) -> None:
        """Wait for an operation; RuntimeError if it has failed."""
        self.ranks.wait(lambda: handle in self._errors, lambda: self._names[handle])
        if error := self._errors.pop(handle):
            raise RuntimeError(error)

    def add_set(self, ranks: list[int]) -> int:
        """Add a process set when all ranks do so; return its number, or Horovod's -6 for a twin."""
        own, members = self.ranks.current(), tuple(sorted(ranks))
        assert own is not None
        self._check_is_up()
        if list(members) in self.sets.values():
            return -6
        adding = self._adding.setdefault(members, set())
        adding.add(own)
        self.ranks.progressed()
        if len(adding) == self.ranks.size:
            self.sets[len(self.sets)] = list(members)
            del self._adding[members]
        self.ranks.wait(
            lambda: list(members) in self.sets.values(), lambda: f"process set {members}"
        )
        return next(number for number, have in self.sets.items() if have == list(members))

    def shut_down(self) -> None:
        """Fail everything that is under way."""
        self._is_down = True
        for requests in list(self._begun.values()):
            for request in requests.values():
                self._end(request, _DOWN)
        for request in self._joined.values():
            self._end(request, _DOWN)
        self._begun.clear()
        self._joined.clear()
        self.ranks.progressed()

    def _check_is_up(self) -> None:
        if self._is_down:
            raise RuntimeError(_DOWN)

    def _complete(self) -> None:
        """Carry out the operations for which all ranks are there."""
        for key, requests in list(self._begun.items()):
            set_id, kind, name = key
            members = self.sets[set_id]
            absent = [rank for rank in members if rank not in requests]
            if requests and all(rank in self._joined for rank in absent):
                del self._begun[key]
                ordered = [requests[rank] for rank in members if rank in requests]
                error = _difference(kind, name, ordered)
                if absent and kind != "allreduce":
                    error = f"{kind} is not supported with Join at this time."
                if not error:
                    _KINDS[kind](ordered, members)
                for request in ordered:
                    self._end(request, error)

    def _end(self, request: Request, error: str) -> None:
        self._errors[request.handle] = error
        self._names.pop(request.handle, None)


_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt "
    "to allreduce, allgather or broadcast a tensor after one of the ranks finished execution."
)


def _difference(kind: str, name: str, requests: list[Request]) -> str:
    """Return how the ranks' requests differ in what has to be the same; "" if in nothing."""
    first_is_free = kind in ("allgather", "alltoall")

    def described(request: Request) -> dict[str, object]:
        shapes = [tuple(tensor.shape) for tensor in request.tensors]
        return {
            "data types": [tensor.dtype for tensor in request.tensors],
            "tensor shapes": [shape[1:] if first_is_free else shape for shape in shapes],
            "operations": request.same,
        }

    first = described(requests[0])
    for other in map(described, requests[1:]):
        for what, value in first.items():
            if other[what] != value:
                return f"Mismatched {kind} {what} of {name}: {value} and {other[what]} on ranks"
    return ""


def _allreduce(requests: list[Request], members: list[int]) -> None:
    op, before, after, _ = requests[0].same
    if op == mpi_ops.Average:
        op, after = mpi_ops.Sum, after / len(members)
    sums = []
    for position in range(len(requests[0].tensors)):
        parts = [_scaled(request.tensors[position], before) for request in requests]
        total = parts[0].clone()
        for part in parts[1:]:
            if op == mpi_ops.Sum:
                total += part
            elif op in (mpi_ops.Min, mpi_ops.Max):
                total = (torch.minimum if op == mpi_ops.Min else torch.maximum)(total, part)
            else:
                raise NotImplementedError("the fake has Sum, Average, Min and Max")
        sums.append(_scaled(total, after))
    for request in requests:
        for output, total in zip(request.outputs, sums, strict=True):
            output.data.copy_(total)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    values = tensor.detach()
    if factor == 1.0:
        return values
    if values.is_floating_point():
        return values * factor
    return (values.double() * factor).to(values.dtype)


def _allgather(requests: list[Request], members: list[int]) -> None:
    del members
    gathered = [
        torch.cat([request.tensors[position].detach() for request in requests])
        for position in range(len(requests[0].tensors))
    ]
    for request in requests:
        for output, whole in zip(request.outputs, gathered, strict=True):
            output.resize_(whole.shape).copy_(whole)


def _broadcast(requests: list[Request], members: list[int]) -> None:
    root = requests[members.index(requests[0].same[0])]
    values = root.tensors[0].detach().clone()
    for request in requests:
        request.outputs[0].data.copy_(values)


def _alltoall(requests: list[Request], members: list[int]) -> None:
    sent = []
    for request in requests:
        tensor, splits = request.tensors[0].detach(), request.splits
        assert splits is not None
        counts = splits.tolist() or [len(tensor) // len(members)] * len(members)
        sent.append(torch.split(tensor, counts))
    for number, request in enumerate(requests):
        parts = [pieces[number] for pieces in sent]
        whole = torch.cat(parts)
        request.outputs[0].resize_(whole.shape).copy_(whole)
        assert request.received is not None
        received = torch.tensor([len(part) for part in parts], dtype=torch.int32)
        request.received.resize_(received.shape).copy_(received)


def _barrier(requests: list[Request], members: list[int]) -> None:
    del requests, members


_KINDS: dict[str, Callable[[list[Request], list[int]], None]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "barrier": _barrier,
}


class _Operations:
    """Stands for ``horovod.torch.mpi_lib_v2``, the functions of tensors."""

    def __init__(self, fake: FakeHorovod, real: Any) -> None:
        self._fake, self._real = fake, real
        self.horovod_torch_poll = fake.is_done
        self.horovod_torch_wait_and_clear = fake.wait

    def horovod_torch_join(self, output: torch.Tensor, device: int) -> int:
        del device
        return self._fake.join(output)

    def horovod_torch_barrier(self, set_id: int) -> int:
        return self._fake.begin("barrier", "", set_id, lambda handle: Request(handle, [], [], ()))

    def horovod_torch_reset(self) -> None:
        pass

    def __getattr__(self, function: str) -> Callable[..., int]:
        found = _FUNCTION.fullmatch(function)
        if found is None or not hasattr(self._real, function):  # of a dtype that it does not have
            raise AttributeError(function)
        grouped, kind, _ = found.groups()
        begin: Callable[..., int] = getattr(self, f"_{kind}")
        if grouped:
            return begin
        return lambda tensor, *others: begin([tensor], *others)

    def _allreduce(self, tensors, outputs, divisor, name, op, before, after, set_id) -> int:
        same = (op, before, after, divisor)
        return self._begin("allreduce", tensors, outputs, same, name, set_id)

    def _allgather(self, tensors, outputs, name, set_id) -> int:
        return self._begin("allgather", tensors, outputs, (), name, set_id)

    def _broadcast(self, tensors, output, root, name, set_id) -> int:
        if root not in self._fake.sets[set_id]:
            raise RuntimeError(f"rank {root} is not in process set {set_id}")
        return self._begin("broadcast", tensors, output, (root,), name, set_id)

    def _alltoall(self, tensors, splits, output, received, name, set_id) -> int:
        return self._begin("alltoall", tensors, output, (), name, set_id, splits, received)

    def _begin(self, kind, tensors, outputs, same, name, set_id, *splits) -> int:
        several = list(outputs) if isinstance(outputs, list | tuple) else [outputs]

        def make(handle: int) -> Request:
            return Request(handle, list(tensors), several, same, *splits)

        return self._fake.begin(kind, name, set_id, make)


class _Basics:
    """Stands for the library of Horovod's other functions; what has no ranks is the real one's."""

    def __init__(self, fake: FakeHorovod, real: Any) -> None:
        self._fake, self._real = fake, real
        self.horovod_rank = self.horovod_local_rank = lambda: _or_error(fake.ranks.current())
        self.horovod_size = self.horovod_local_size = lambda: fake.ranks.size
        self.horovod_cross_rank = lambda: 0
        self.horovod_cross_size = self.horovod_is_initialized = lambda: 1
        self.horovod_is_homogeneous = lambda: 1
        self.horovod_mpi_enabled = self.horovod_gloo_enabled = lambda: 0
        self.horovod_shutdown = fake.shut_down
        self.horovod_number_of_process_sets = lambda: len(fake.sets)

    def horovod_init(self, *arguments: object) -> int:
        return 1

    def horovod_add_process_set(self, ranks: Any, n: Any) -> int:
        return self._fake.add_set(list(ranks))

    def horovod_process_set_ids(self, ids: Any) -> None:
        ids[:] = list(self._fake.sets)

    def horovod_process_set_size(self, number: Any) -> int:
        return len(self._fake.sets[number.value])

    def horovod_process_set_ranks(self, number: Any, ranks: Any) -> int:
        ranks[:] = self._fake.sets[number.value]
        return 0

    def horovod_process_set_rank(self, number: Any) -> int:
        members = self._fake.sets[number.value]
        own = self._fake.ranks.current()
        return members.index(own) if own in members else -4

    def __getattr__(self, function: str) -> Any:
        if function.endswith("_built") or function.startswith("horovod_reduce_op"):
            return getattr(self._real, function)
        raise AttributeError(f"the fake has no {function}")


def _or_error(rank: int | None) -> int:
    return -1 if rank is None else rank
