"""Compressed sums of NumPy arrays over the ranks of an MPI job, without a framework.

>>> from horovod_fftcomp.mpi import Reducer  # under mpirun
>>> reducer = Reducer("topk", density=0.01)  # doctest: +SKIP
>>> total = reducer.sum({"weights": gradient})["weights"]  # doctest: +SKIP
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_fftcomp import wire
from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine.buckets import MIN_NUMEL, Bucket
from horovod_fftcomp.engine.drive import drive, exchange_of
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import Scheduled, make_policy
from horovod_fftcomp.engine.work import Costs
from horovod_fftcomp.errors import check_whole
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.schemes.hierarchical import node_size_of
from horovod_fftcomp.types import Array, Tensor, refuse_masked


class Reducer:
    """Compressed sum of the same named arrays in every step, over the ranks of ``comm``.

    ``recipe``, ``options``: as for ``get_scheme``, and ``warmup_steps``, ``density_schedule`` and
    ``ranks_per_node``. They must be equal on all ranks, else the first sum raises
    ConfigMismatchError on all of them. Arrays of fewer than ``min_numel`` elements are sent dense,
    unless the recipe sends signs. While ``sum`` runs, no receive with any source and any tag may be
    pending on ``comm``.

    Start the job by ``mpirun -np 4 python -m mpi4py script.py``. Then an error on one rank ends all
    ranks; with MPI alone the others would wait for ever.
    """

    def __init__(
        self,
        recipe: str,
        comm: MPI.Intracomm = MPI.COMM_WORLD,
        min_numel: int = MIN_NUMEL,
        **options: Any,
    ) -> None:
        self._policy = make_policy(recipe, **options).on_nodes(lambda: _ranks_per_host(comm))
        self._policy.after_warmup.check_optimizer(f"recipe {recipe!r}")
        self._comm = comm
        self._min_numel = Settings(min_numel).min_numel
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._engine = Engine([], comm.Get_rank(), comm.Get_size())
        self._saved: dict[str, Any] | None = None
        self._groups: dict[tuple[int, ...], MPI.Intracomm] = {}
        self.wait_s = 0.0  # in collectives, sums of ``sparcml`` included, since the start

    @property
    def costs(self) -> Costs:
        """Bytes and seconds of this rank so far."""
        return self._engine.costs

    def sum(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the sums of the compressed arrays over ranks, float32 in the arrays' shapes.

        ``arrays``: the same names and shapes in every step and on every rank; float16, float32 or
        float64; not changed. Unsent values are added to the arrays of the next step (error
        feedback). If a rank has NaN or Inf in an array, its sum is not finite on all ranks, and
        no residual changes in this step. ValueError for names or shapes that differ from those of
        the first step, TypeError for an array of another type.
        """
        flat = {name: _flat(name, array) for name, array in arrays.items()}
        shapes = {name: np.shape(array) for name, array in arrays.items()}
        if not self._shapes:
            self._begin(shapes)
        elif shapes != self._shapes:
            raise ValueError(f"arrays are {shapes}, but in the first step were {self._shapes}")
        sums: dict[str, Array] = {}
        for number, bucket in enumerate(self._engine.buckets):
            grads = [flat[tensor.name] for tensor in bucket.tensors]
            outcome = drive(exchange_of(self._engine, number, grads), self._completed)
            for tensor, total in zip(bucket.tensors, outcome.sums, strict=True):
                sums[tensor.name] = total.reshape(tensor.shape)
        self._engine.settle()
        return {name: sums[name] for name in arrays}

    def mean(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``sum`` divided by the number of ranks."""
        size = np.float32(self._engine.world_size)
        return {name: np.divide(total, size, out=total) for name, total in self.sum(arrays).items()}

    def check_differences(self) -> None:
        """Raise UnsupportedError if the recipe cannot send differences of weights."""
        self._policy.after_warmup.check_differences(f"recipe {self._policy.recipe!r}")

    def residual(self, name: str) -> Array:
        """Return the residual of an array, float32 in its shape."""
        return self._engine.residual(name)

    def discard(self) -> None:
        """Undo the last ``sum``, whose result was not used; call it on every rank.

        Residuals and byte counts become what they were before. ValueError if there is none.
        """
        self._engine.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""
        return self._engine.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the ``state_dict`` of the same rank; before the first ``sum``, in that call."""
        if self._shapes:
            self._engine.load_state_dict(saved)
        else:
            self._saved = saved

    def _begin(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Compare all ranks' settings, then lay out the buckets."""
        facts = {**self._policy.facts(), "names and shapes": f"{wire.fnv1a(str(shapes)):x} (hash)"}
        mine = handshake.pack(facts | {"min_numel": self._min_numel})
        everyone = np.empty(mine.size * self._engine.world_size, np.uint8)
        self._comm.Allgather(mine, everyone)
        handshake.compare(everyone)
        tensors = [Tensor(name, shape) for name, shape in shapes.items()]
        least = 0 if self._policy.after_warmup.traits.sends_signs else self._min_numel
        large = tuple(t for t in tensors if t.numel >= least)
        small = tuple(t for t in tensors if t.numel < least)
        policy = self._policy.decided(large, self._engine.world_size)
        buckets = [Bucket(large, policy), Bucket(small, Scheduled("none"))]
        used = [bucket for bucket in buckets if bucket.tensors]
        engine = Engine(used, self._engine.rank, self._engine.world_size)
        if self._saved is not None:
            engine.load_state_dict(self._saved)
        self._engine, self._shapes, self._saved = engine, shapes, None

    def _completed(self, round_: Round) -> Array:
        if round_.among == ():
            return round_.data[:0]
        begin = time.perf_counter()
        comm = self._comm_of(round_.among)
        if round_.merge is None:
            output = _COLLECTIVES[round_.collective](comm, round_)
        else:
            pairs = _Pairs(comm, round_.merge)
            output = pairs.merged(round_.data)
            # The engine counts what went into the round and what comes out.
            self.costs.sent_nbytes += pairs.sent_nbytes - round_.data.nbytes
            others_nbytes = output.nbytes - round_.data.nbytes
            self.costs.received_nbytes += pairs.received_nbytes - others_nbytes
        self.wait_s += time.perf_counter() - begin
        return output

    def _comm_of(self, ranks: tuple[int, ...] | None) -> MPI.Intracomm:
        """Return the communicator of ``ranks``, created at first use."""
        if ranks is None:
            return self._comm
        if ranks not in self._groups:
            group = self._comm.Get_group().Incl(ranks)
            self._groups[ranks] = self._comm.Create_group(group)
        return self._groups[ranks]


def _ranks_per_host(comm: MPI.Intracomm) -> int:
    """Return what ``ranks_per_node="auto"`` stands for."""
    here = comm.Split_type(MPI.COMM_TYPE_SHARED)
    places = comm.allgather((here.Get_size(), here.Get_rank()))
    here.Free()
    return node_size_of(places)


_TAG = 0x4643  # "FC"; see ``Reducer``


class _Pairs:
    """Recursive doubling: after log2(p) pairwise exchanges all ranks have the same merged bytes.

    Ranks from the largest power of two on send their data first and receive the result at the end.
    The order of merges is that of ``sparcml.merge_all``. Source: Renggli et al., SC 2019;
    Thakur, Rabenseifner and Gropp 2005.
    """

    def __init__(self, comm: MPI.Comm, merge: Callable[[Array, Array], Array]) -> None:
        self._comm, self._merge = comm, merge
        self.sent_nbytes = self.received_nbytes = 0

    def merged(self, data: Array) -> Array:
        """Return all ranks' ``data`` (uint8, of any lengths) merged by ``merge``."""
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        pairs = 1 << (size.bit_length() - 1)
        if rank >= pairs:
            self._send(data, rank - pairs).Wait()
            return self._receive(rank - pairs)
        if rank + pairs < size:
            data = self._merge(data, self._receive(rank + pairs))
        for bit in range(pairs.bit_length() - 1):
            partner = rank ^ (1 << bit)
            sending = self._send(data, partner)
            theirs = self._receive(partner)
            sending.Wait()
            data = self._merge(*((data, theirs) if rank < partner else (theirs, data)))
        if rank + pairs < size:
            self._send(data, rank + pairs).Wait()
        return data

    def _send(self, data: Array, to: int) -> MPI.Request:
        self.sent_nbytes += data.nbytes
        return self._comm.Isend([data, MPI.BYTE], to, _TAG)

    def _receive(self, source: int) -> Array:
        status = MPI.Status()
        self._comm.Probe(source, _TAG, status)
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._comm.Recv([data, MPI.BYTE], source, _TAG)
        self.received_nbytes += data.nbytes
        return data


class LocalSteps:
    """Local SGD: average the changes of ``arrays`` over ranks after every ``period`` local steps.

    ``arrays``: float32, equal on all ranks at the start; not changed. ``reducer`` sums the changes
    since the last synchronization, compressed; its residual is added to the next one. Source:
    Stich, ICLR 2019 (local SGD); Basu et al., NeurIPS 2019.
    """

    def __init__(self, reducer: Reducer, arrays: Mapping[str, Array], period: int) -> None:
        check_whole("period", period, 1)
        reducer.check_differences()
        self._reducer, self._period = reducer, period
        self._last = {name: np.array(array, np.float32) for name, array in arrays.items()}
        self.steps = 0  # since the last synchronization

    def after_step(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the arrays to continue with: ``arrays``, or the synchronized ones after a period.

        If any rank's arrays have NaN or Inf, all ranks return to those of the last synchronization.
        """
        self.steps += 1
        if self.steps < self._period:
            return dict(arrays)
        changes = {name: array - self._last[name] for name, array in arrays.items()}
        means = self._reducer.mean(changes)
        if all(np.isfinite(mean).all() for mean in means.values()):
            self._last = {name: self._last[name] + mean for name, mean in means.items()}
        self.steps = 0
        return {name: array.copy() for name, array in self._last.items()}


_DTYPES = ("float16", "float32", "float64")


def _flat(name: str, array: Array) -> Array:
    if type(array) is np.ndarray and array.dtype == np.float32 and array.flags.carray:
        return array.reshape(-1)  # the usual case, in a microsecond
    refuse_masked(array)
    is_numpy = isinstance(array, (np.ndarray, np.generic))
    if not is_numpy or array.dtype.name not in _DTYPES:
        raise TypeError(
            f"array {name!r} is {array.dtype if is_numpy else type(array).__name__}; sums are of "
            f"NumPy arrays of {', '.join(_DTYPES)}"
        )
    with np.errstate(over="ignore"):  # float64 may become Inf, on all ranks
        return np.require(array, np.float32, ["C", "A", "W"]).reshape(-1)


def _gathered(comm: MPI.Comm, round_: Round) -> Array:
    sizes = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([round_.data.size]), sizes)
    output = np.empty(sizes.sum(), round_.data.dtype)
    kind = _kind(output)
    comm.Allgatherv(round_.data, [output, sizes, np.cumsum(sizes) - sizes, kind])
    return output


def _kind(array: Array) -> MPI.Datatype:
    return MPI.BYTE if array.dtype == np.uint8 else MPI.FLOAT


def _reduced(comm: MPI.Comm, round_: Round) -> Array:
    output = np.empty_like(round_.data)
    if round_.data.dtype == np.float16:  # no MPI type: 2 bytes, our own sum
        comm.Allreduce([round_.data, MPI.SHORT], [output, MPI.SHORT], _HALF_SUM)
    else:
        comm.Allreduce(round_.data, output, MPI.SUM)
    return output


def _add_halves(a: Any, b: Any, kind: MPI.Datatype) -> None:
    total = np.frombuffer(b, np.float16)
    np.add(total, np.frombuffer(a, np.float16), out=total)


_HALF_SUM = MPI.Op.Create(_add_halves, commute=True)


def _broadcast(comm: MPI.Comm, round_: Round) -> Array:
    output = round_.data.copy()
    comm.Bcast(output, round_.root)
    return output


def _all_to_all(comm: MPI.Comm, round_: Round) -> Array:
    splits = np.array(round_.splits, np.int64)
    sizes = np.empty_like(splits)
    comm.Alltoall(splits, sizes)
    output = np.empty(sizes.sum(), round_.data.dtype)
    comm.Alltoallv(
        [round_.data, splits, np.cumsum(splits) - splits, _kind(output)],
        [output, sizes, np.cumsum(sizes) - sizes, _kind(output)],
    )
    return output


_COLLECTIVES = {
    "allgather": _gathered,
    "allreduce": _reduced,
    "alltoall": _all_to_all,
    "broadcast": _broadcast,
}
