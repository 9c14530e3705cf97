"""Simulation of all ranks in one process; what would hang a real job raises an error."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.drive import drive_all, exchange_of
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import Scheduled, always, make_policy
from horovod_fftcomp.errors import ConfigMismatchError
from horovod_fftcomp.schemes import Round, Scheme
from horovod_fftcomp.types import Array, Arrays, Tensor, refuse_masked


class SimulatedStep(NamedTuple):
    """Result of one step of ``simulate``.

    ``average``: float32 ``[n]``, the same on every rank. ``sent_bytes``: bytes
    of each rank into its collectives. ``received_bytes``: bytes out of them that come from other
    ranks; of a sum all. ``residual``: float32 ``[ranks, n]``, the residual
    of each rank after the step.
    """

    average: Array
    sent_bytes: list[int]
    received_bytes: list[int]
    residual: Array


class InProcessWorld:
    """Named collectives between ``size`` simulated ranks, which submit in any order.

    Raises ConfigMismatchError where a real job would hang or mix data: if a rank did not submit a
    name, or if collectives, dtypes, roots or (except for allgather) shapes differ.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._submitted: dict[str, dict[int, Round]] = {}

    def submit(self, rank: int, name: str, round_: Round) -> None:
        """Submit one rank's input to the collective called ``name``."""
        parts = self._submitted.setdefault(name, {})
        if rank in parts:
            raise ConfigMismatchError(f"rank {rank} submitted {name!r} twice")
        parts[rank] = round_

    def complete(self, name: str) -> list[Array]:
        """Return the output of a collective for every rank, in rank order."""
        parts = self._submitted.pop(name, {})
        everybody = tuple(range(self.size))
        missing = sorted(set(everybody) - set(parts))
        if missing:
            raise ConfigMismatchError(f"ranks {missing} did not submit {name!r}: a job would hang")
        among = [parts[rank].among for rank in everybody]
        groups = [everybody if ranks is None else ranks for ranks in among]
        outputs = [parts[rank].data[:0] for rank in everybody]
        for group in set(groups) - {()}:
            if any(groups[rank] != group for rank in group):
                raise ConfigMismatchError(f"{name!r}: the ranks' groups differ: {set(groups)}")
            taking_part = [parts[rank] for rank in group]
            for rank, output in zip(group, _outputs(name, taking_part), strict=True):
                outputs[rank] = output
        return outputs

    def outputs(self, rounds: Mapping[tuple[int, str], Round]) -> dict[tuple[int, str], Array]:
        """Return the output of each round, in the order of names; keys: (rank, name)."""
        for (rank, name), round_ in rounds.items():
            self.submit(rank, name, round_)
        names = sorted({name for _, name in rounds})
        return {(rank, n): output for n in names for rank, output in enumerate(self.complete(n))}


def _outputs(name: str, rounds: Sequence[Round]) -> Sequence[Array]:
    """Return the output of a collective for each participant."""
    for what, values in (
        ("collective", {part.collective for part in rounds}),
        ("dtype", {part.data.dtype.name for part in rounds}),
        ("root", {part.root for part in rounds}),
    ):
        if len(values) > 1:
            listed = sorted(map(str, values))
            raise ConfigMismatchError(f"{name!r}: the ranks' {what}s differ: {listed}")
    if rounds[0].collective == "alltoall":
        return _exchanged(name, rounds)
    if rounds[0].collective == "allgather":
        return len(rounds) * [np.concatenate([part.data for part in rounds])]
    shapes = {part.data.shape for part in rounds}
    if len(shapes) > 1:
        raise ConfigMismatchError(f"{name!r}: the ranks' shapes differ: {sorted(shapes)}")
    if rounds[0].collective == "broadcast":
        return len(rounds) * [rounds[rounds[0].root].data.copy()]
    total = rounds[0].data.copy()
    with np.errstate(over="ignore"):  # as in a network, without a warning
        for part in rounds[1:]:
            total += part.data
    return len(rounds) * [total]


def _exchanged(name: str, rounds: Sequence[Round]) -> list[Array]:
    """Return the output of an alltoall for each participant."""
    for rank, part in enumerate(rounds):
        if len(part.splits) != len(rounds) or sum(part.splits) != part.data.size:
            raise ConfigMismatchError(
                f"{name!r}: rank {rank} splits {part.data.size} elements into {part.splits}, for "
                f"{len(rounds)} ranks"
            )
    pieces = [np.split(part.data, np.cumsum(part.splits)[:-1]) for part in rounds]
    return [np.concatenate(to_one) for to_one in zip(*pieces, strict=True)]


def exchange_once(
    engines: Sequence[Engine], grads: Sequence[Sequence[Arrays]], shuffle: random.Random
) -> None:
    """Run one step on all ranks; ``grads[rank][bucket]`` are that bucket's flat gradients.

    Each rank starts its buckets in a random order, as hooks of a real model may.
    """
    n_buckets = len(engines[0].buckets)
    exchanges = {
        (rank, f"bucket {bucket}"): exchange_of(engine, bucket, grads[rank][bucket])
        for rank, engine in enumerate(engines)
        for bucket in shuffle.sample(range(n_buckets), n_buckets)
    }
    drive_all(exchanges, InProcessWorld(len(engines)).outputs)


def simulate(
    recipe: str | Scheme, gradients: Array | Iterable[Array], **options: Any
) -> Iterator[SimulatedStep]:
    """Simulate the compressed exchange of ``gradients``; yield the result of each step.

    ``recipe``: a recipe's name with its ``options``, or a scheme. Options are those of the recipe,
    and ``warmup_steps`` (here 0 by default), ``density_schedule`` and ``ranks_per_node`` (bytes
    within a node are not counted). ``gradients``: array ``[steps, ranks, n]`` or an iterable of
    arrays ``[ranks, n]``; not changed. Raises ValueError for other shapes.

    >>> import numpy as np, horovod_fftcomp as hfc
    >>> steps = hfc.simulate("topk", np.ones((3, 2, 8), np.float32), density=0.25, bits=32)
    >>> [int(step.average.sum()) for step in steps]
    [2, 4, 6]
    """
    if isinstance(recipe, str):
        return _steps(make_policy(recipe, **{"warmup_steps": 0, **options}), gradients)
    if options:
        raise TypeError("options belong to a recipe's name; a scheme already contains its options")
    return _steps(always(recipe), gradients)


def _steps(policy: Scheduled, gradients: Iterable[Array]) -> Iterator[SimulatedStep]:
    engines: list[Engine] = []
    shape: tuple[int, ...] | None = None
    for step_grads in gradients:
        refuse_masked(step_grads)
        step_grads = np.ascontiguousarray(step_grads, np.float32)
        if step_grads.ndim != 2 or (shape is not None and step_grads.shape != shape):
            raise ValueError(
                f"gradients must be [ranks, n] in every step, got {step_grads.shape}"
                + (f" after {shape}" if shape else "")
            )
        if shape is None:
            shape = step_grads.shape
            tensors = (Tensor("gradient", (shape[1],)),)
            bucket = Bucket(tensors, policy.decided(tensors, shape[0]))
            engines = [Engine([bucket], rank, shape[0]) for rank in range(shape[0])]
        before = _traffic(engines)
        exchange_once(engines, [[[grad]] for grad in step_grads], random.Random(0))
        sums = [engine.sums(0)[0] for engine in engines]
        if any(total.tobytes() != sums[0].tobytes() for total in sums):
            raise AssertionError("ranks computed different sums from the same payloads")
        for engine in engines:
            engine.settle()
        sent, received = (_traffic(engines) - before).tolist()
        residual = np.stack([engine.residual("gradient") for engine in engines])
        yield SimulatedStep(sums[0] / np.float32(shape[0]), sent, received, residual)


def _traffic(engines: Sequence[Engine]) -> Array:
    """Return the bytes that each rank has sent and received so far, ``[2, ranks]``."""
    costs = [engine.costs for engine in engines]
    return np.array([[c.sent_nbytes for c in costs], [c.received_nbytes for c in costs]])
