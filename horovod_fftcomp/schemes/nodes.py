"""Two levels: gradients are summed within a node as they are, and compressed between nodes.

A node is a number of ranks in a row. Each bucket has one leader in every node, chosen by its name,
so that the ranks of a node share the work; leaders exchange by another scheme.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.backends import Array
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.quantizers import is_whole
from horovod_fftcomp.schemes import (
    Context,
    Exchange,
    Grads,
    OldState,
    Outcome,
    Round,
    Scheme,
    Tensor,
)
from horovod_fftcomp.schemes.around import Around

Ranks = tuple[int, ...]


class Layout:
    """Who is in which node, of ``world_size`` ranks, and who may lead together."""

    def __init__(self, ranks_per_node: int, world_size: int) -> None:
        firsts = range(0, world_size, ranks_per_node)
        self.nodes = [tuple(range(f, min(f + ranks_per_node, world_size))) for f in firsts]
        # The last node may be smaller than the others; every node has so many leaders. Where there
        # is but one node, nothing is worth compressing.
        self._leaders: list[Ranks] = (
            list(zip(*self.nodes, strict=False)) if len(firsts) > 1 else [()]
        )

    def groups(self) -> Iterator[Ranks]:
        """Yield all groups of two ranks or more that exchange something of their own."""
        yield from (ranks for ranks in (*self.nodes, *self._leaders) if len(ranks) > 1)

    def node_of(self, rank: int) -> Ranks:
        """Return the ranks of a rank's node, itself included."""
        return next(node for node in self.nodes if rank in node)

    def leaders(self, tensors: Sequence[Tensor]) -> Ranks:
        """Return a bucket's leaders, one of each node; none where there is but one node."""
        return self._leaders[wire.fnv1a(tensors[0].name) % len(self._leaders)]


@dataclass(frozen=True)
class PerNode(Around):
    """Sum within each node of ``ranks_per_node`` ranks, and exchange the sums by ``scheme``.

    To ``scheme`` nodes are what ranks are otherwise: it sees as many ranks as there are nodes.
    Only a bucket's leaders have state; what another rank has not sent, from a state of other
    numbers of ranks, goes into the sum of its node. A scheme with a momentum of its own, or of
    signs, is refused: on one node it would do something else than on two.
    """

    scheme: Scheme
    ranks_per_node: int

    def __post_init__(self) -> None:
        if not is_whole(self.ranks_per_node) or self.ranks_per_node < 2:
            raise ValueError(
                f"ranks_per_node must be a whole number from 2, got {self.ranks_per_node!r}; "
                "with one rank on every node leave it out"
            )
        if not self.scheme.fits_differences():
            raise UnsupportedError(
                "ranks_per_node is for recipes without a momentum of their own that send no signs. "
                "Take another recipe, or sketchsgd or dgc with momentum=0.0"
            )

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        return ("allreduce", *self.scheme.rounds, "allgather")

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        layout = Layout(self.ranks_per_node, context.world_size)
        node, leaders = layout.node_of(context.rank), layout.leaders(tensors)
        leads = context.rank in leaders
        numels = [math.prod(tensor.shape) for tensor in tensors]
        ends = np.cumsum(numels)[:-1]

        mine = np.zeros(sum(numels), np.float32)
        for part, tensor, grad in zip(np.split(mine, ends), tensors, grads, strict=True):
            if grad is not None:
                part[:] = grad
                if not leads and state:
                    part += self.scheme.residual(state, tensor).reshape(-1)
        within = yield from _among(node, Round("allreduce", mine, inside=True))
        if not leads:
            kept = _kept(tensors, grads, state)
            for collective in self.scheme.rounds:
                yield Round(collective, mine[:0], among=())
            if not leaders:
                yield Round("allgather", mine[:0], among=())
                return Outcome(np.split(within, ends), kept, bool(np.isfinite(within).all()))
            result = yield from _among(node, Round("allgather", mine[:0], inside=True))
            return Outcome(np.split(result[:-1], ends), kept, bool(result[-1]))

        summed = [
            None if grad is None and not part.any() else part
            for part, grad in zip(np.split(within, ends), grads, strict=True)
        ]
        place = context._replace(rank=leaders.index(context.rank), world_size=len(leaders))
        outcome = yield from _between(leaders, self.scheme.exchange(tensors, summed, state, place))
        result = np.concatenate([*outcome.sums, [np.float32(outcome.finite)]], dtype=np.float32)
        yield from _among(node, Round("allgather", result, inside=True))
        return outcome

    def choice_of(self, state: OldState, tensor: Tensor) -> str | None:
        """Return in words what is chosen for a tensor; None where this rank does not lead."""
        return self.scheme.choice_of(state, tensor) if any(state.values()) else None


def _kept(tensors: Sequence[Tensor], grads: Grads, state: OldState) -> dict[str, dict[str, Array]]:
    """Return the state of frozen tensors, which are not summed, of a rank that does not lead."""
    frozen = {t.name for t, grad in zip(tensors, grads, strict=True) if grad is None}
    return {
        kind: {name: array for name, array in arrays.items() if name in frozen}
        for kind, arrays in state.items()
    }


def _among(ranks: Ranks, round_: Round) -> Generator[Round, Array, Array]:
    """Carry out a round among ``ranks``; nobody is asked to by a rank that is alone."""
    if len(ranks) == 1:
        yield round_._replace(data=round_.data[:0], among=())
        return round_.data
    return (yield round_._replace(among=ranks))


def _between(ranks: Ranks, exchange: Exchange) -> Exchange:
    """Carry out an exchange among ``ranks``."""
    round_ = next(exchange)
    while True:
        output = yield from _among(ranks, round_)
        try:
            round_ = exchange.send(output)
        except StopIteration as stop:
            return stop.value
