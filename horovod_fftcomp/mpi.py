"""Sums of NumPy arrays over the ranks of an MPI job, compressed; no deep-learning framework.

>>> from horovod_fftcomp.mpi import Reducer  # under mpirun
>>> reducer = Reducer("topk", density=0.01)  # doctest: +SKIP
>>> total = reducer.sum({"weights": gradient})["weights"]  # doctest: +SKIP
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from horovod_fftcomp import handshake, wire
from horovod_fftcomp.backends import Array
from horovod_fftcomp.buckets import MIN_NUMEL, Bucket
from horovod_fftcomp.engine import Costs, Engine
from horovod_fftcomp.policy import Always, make_policy
from horovod_fftcomp.schemes import Round, Tensor
from horovod_fftcomp.schemes.dense import Dense


class Reducer:
    """Sums of the same named arrays, step after step, over the ranks of ``comm``.

    ``recipe`` and ``options`` as for ``get_scheme`` and ``make_policy``; equal on all ranks, or
    the first sum raises ConfigMismatchError on all of them. Arrays of fewer than ``min_numel``
    elements are sent as they are.

    Start the job by ``mpirun -np 4 python -m mpi4py script.py``: then an error on one rank ends
    all of them, where MPI by itself would let the others wait for ever.
    """

    def __init__(
        self,
        recipe: str,
        comm: MPI.Comm = MPI.COMM_WORLD,
        min_numel: int = MIN_NUMEL,
        **options: Any,
    ) -> None:
        self._policy = make_policy(recipe, **options)
        self._comm = comm
        self._min_numel = min_numel
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._engine = Engine([], comm.Get_rank(), comm.Get_size())
        self._saved: dict[str, Any] | None = None
        self.wait_s = 0.0  # in collectives, since the start

    @property
    def costs(self) -> Costs:
        """What this rank has sent and spent so far."""
        return self._engine.costs

    def sum(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the sums over ranks of what each of them sends, float32 in the arrays' shapes.

        ``arrays``: the same names and shapes in every step and on every rank; float16, float32 or
        float64; not changed. What is not sent is added to the next step's. Where a rank has NaN or
        Inf, so has the sum, on all ranks, and the step leaves no trace in the residuals.
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
            following: Round | None = self._engine.start(number, grads)
            while following is not None:
                following = self._engine.advance(number, self._completed(following))
            totals = self._engine.sums(number)
            for tensor, total in zip(bucket.tensors, totals, strict=True):
                sums[tensor.name] = total.reshape(tensor.shape)
        self._engine.settle()
        return {name: sums[name] for name in arrays}

    def mean(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return ``sum`` divided by the number of ranks."""
        size = np.float32(self._engine.world_size)
        return {name: np.divide(total, size, out=total) for name, total in self.sum(arrays).items()}

    def residual(self, name: str) -> Array:
        """Return what is not sent yet of an array, float32 in its shape."""
        return self._engine.residual(name)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""
        return self._engine.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned on the same rank; before a first sum, during it."""
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
        large = tuple(t for t in tensors if math.prod(t.shape) >= self._min_numel)
        small = tuple(t for t in tensors if math.prod(t.shape) < self._min_numel)
        buckets = [Bucket(large, self._policy), Bucket(small, Always(Dense()))]
        used = [bucket for bucket in buckets if bucket.tensors]
        engine = Engine(used, self._engine.rank, self._engine.world_size)
        if self._saved is not None:
            engine.load_state_dict(self._saved)
        self._engine, self._shapes, self._saved = engine, shapes, None

    def _completed(self, round_: Round) -> Array:
        begin = time.perf_counter()
        output = _COLLECTIVES[round_.collective](self._comm, round_)
        self.wait_s += time.perf_counter() - begin
        return output


_DTYPES = ("float16", "float32", "float64")


def _flat(name: str, array: Array) -> Array:
    is_numpy = isinstance(array, (np.ndarray, np.generic))
    if not is_numpy or array.dtype.name not in _DTYPES:
        raise TypeError(
            f"array {name!r} is {array.dtype if is_numpy else type(array).__name__}; sums are of "
            f"NumPy arrays of {', '.join(_DTYPES)}"
        )
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes Inf and is told to all
        return np.require(array, np.float32, ["C", "A", "W"]).reshape(-1)


def _gathered(comm: MPI.Comm, round_: Round) -> Array:
    sizes = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(np.array([round_.data.size]), sizes)
    output = np.empty(sizes.sum(), round_.data.dtype)
    kind = MPI.BYTE if round_.data.dtype == np.uint8 else MPI.FLOAT
    comm.Allgatherv(round_.data, [output, sizes, np.cumsum(sizes) - sizes, kind])
    return output


def _reduced(comm: MPI.Comm, round_: Round) -> Array:
    output = np.empty_like(round_.data)
    if round_.data.dtype == np.float16:  # which MPI does not know: two bytes, and a sum of ours
        comm.Allreduce([round_.data, MPI.SHORT], [output, MPI.SHORT], _HALF_SUM)
    else:
        comm.Allreduce(round_.data, output, MPI.SUM)
    return output


def _add_halves(a: Any, b: Any, kind: MPI.Datatype) -> None:
    del kind
    total = np.frombuffer(b, np.float16)
    np.add(total, np.frombuffer(a, np.float16), out=total)


_HALF_SUM = MPI.Op.Create(_add_halves, commute=True)


def _broadcast(comm: MPI.Comm, round_: Round) -> Array:
    output = round_.data.copy()
    comm.Bcast(output, round_.root)
    return output


_COLLECTIVES = {"allgather": _gathered, "allreduce": _reduced, "broadcast": _broadcast}
