"""Hierarchical exchange: dense sums within a node, compression between nodes.

A node is a number of consecutive ranks. Each bucket has one leader in every node, chosen by a hash
of its name, so that the work is spread over the ranks of a node. Leaders exchange by another
scheme.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

from horovod_fftcomp import wire
from horovod_fftcomp.codec.quantizers import is_whole
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels.ops import Ops
from horovod_fftcomp.kernels.plans import split
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round, Tuner, ops_of
from horovod_fftcomp.schemes.state import bucket_plan, new_state
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import Array, Choice, OldState, Tensor, Tensors

Ranks = tuple[int, ...]


class NodeLayout:
    """Assignment of ``world_size`` ranks to nodes, and groups of leaders with one of each node."""

    def __init__(self, ranks_per_node: int, world_size: int) -> None:
        firsts = range(0, world_size, ranks_per_node)
        self.nodes = [tuple(range(f, min(f + ranks_per_node, world_size))) for f in firsts]
        # The last node may be smaller than the others, so there are as many leader groups as it has
        # ranks. With a single node there are no leaders, since nothing needs compressing.
        self._leaders: list[Ranks] = (
            list(zip(*self.nodes, strict=False)) if len(firsts) > 1 else [()]
        )

    def groups(self) -> Iterator[Ranks]:
        """Yield all groups of two or more ranks that have collectives of their own."""
        yield from (ranks for ranks in (*self.nodes, *self._leaders) if len(ranks) > 1)

    def node_of(self, rank: int) -> Ranks:
        """Return the ranks of the node of ``rank``, itself included."""
        return next(node for node in self.nodes if rank in node)

    def leaders(self, tensors: Tensors) -> Ranks:
        """Return a bucket's leaders, one of each node; none if there is only one node."""
        return self._leaders[wire.fnv1a(tensors[0].name) % len(self._leaders)]


@dataclass(frozen=True)
class Hierarchical(Wrapper):
    """Sum within each node of ``ranks_per_node`` ranks, and exchange the sums by ``scheme``.

    ``scheme`` runs with one rank per node. Only a bucket's leaders have state. If a loaded state,
    from another number of ranks, gives a non-leader a residual, it is added to the sum of its node.
    Raises UnsupportedError for a scheme with a momentum of its own or that sends signs: its result
    on one node would differ from that on two.
    """

    spec_name = "PerNode"
    ranks_per_node: int

    def __post_init__(self) -> None:
        if not is_whole(self.ranks_per_node) or self.ranks_per_node < 2:
            raise ValueError(
                f"ranks_per_node must be a whole number from 2, got {self.ranks_per_node!r}; "
                "omit it for one rank per node"
            )
        if self.scheme.traits.momentum or not self.scheme.traits.fits_differences:
            raise UnsupportedError(
                "ranks_per_node does not work with recipes that have their own momentum or send "
                "signs. Leave momentum out, or take another recipe, or dgc or sketchsgd with 0.0"
            )

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        return ("allreduce", *self.scheme.rounds, "allgather")

    def possible_rounds(self) -> frozenset[tuple[str, ...]]:
        """Return every list of collectives that an exchange may have; see ``Scheme``."""
        between = self.scheme.possible_rounds()
        return frozenset(("allreduce", *rounds, "allgather") for rounds in between)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        layout, ops = NodeLayout(self.ranks_per_node, context.world_size), context.ops
        node, leaders = layout.node_of(context.rank), layout.leaders(tensors)
        leads, plan = context.rank in leaders, bucket_plan(tensors)
        own = grads if leads else self._compensated(tensors, grads, state, ops)
        mine = ops.join(own, plan.numels)
        within = yield from _among(node, Round("allreduce", mine, inside=True))
        if not leads:
            for collective in self.scheme.rounds:
                yield Round(collective, mine[:0], among=())
            last = Round("allgather", mine[:0], inside=True)
            if leaders:
                within = yield from _among(node, last)
            else:
                yield last._replace(among=(), inside=False)
            # Its leader has the same sums, so both decide alike. Trials are of leaders alone, who
            # would else decide about other tensors than those of other nodes.
            kinds = [kind for kind in state if kind != "errors"]
            kept = new_state(tensors, grads, state, {k: [None] * len(tensors) for k in kinds})
            if any(state.values()):  # all but that of frozen tensors is dropped, by the host alone
                within, ops = ops.get(within), ops_of(None)
            return Outcome(split(within, plan.offsets), kept, ops.flags_of(within))

        summed = [
            None if grad is None and not ops.get(part).any() else part
            for part, grad in zip(split(within, plan.offsets), grads, strict=True)
        ]
        place = context._replace(rank=leaders.index(context.rank), world_size=len(leaders))
        outcome = yield from _between(leaders, self.scheme.exchange(tensors, summed, state, place))
        result = ops.join(outcome.sums, plan.numels)
        yield from _among(node, Round("allgather", result, inside=True))
        if outcome.flags.not_finite is None:
            result, ops = ops.get(result), ops_of(None)
        return outcome._replace(flags=ops.both(outcome.flags, ops.flags_of(result)))

    def _compensated(
        self, tensors: Tensors, grads: Grads, state: OldState, ops: Ops
    ) -> list[Array | None]:
        """Return a non-leader's gradients, plus its residuals from a loaded state."""
        with_state = {name for arrays in state.values() for name in arrays}
        return [
            grad
            if grad is None or tensor.name not in with_state
            else ops.get(grad) + self.scheme.residual(state, tensor).reshape(-1)
            for tensor, grad in zip(tensors, grads, strict=True)
        ]

    def share_nbytes(self, tensor: Tensor, state: OldState, world_size: int) -> float:
        """Return the mean over nodes of the bytes that one sends to others; see ``Scheme``."""
        n_nodes = -(-world_size // self.ranks_per_node)
        return self.scheme.share_nbytes(tensor, state, n_nodes)

    @property
    def tuner(self) -> Tuner | None:
        """That of the scheme, without choices where this rank does not lead; see ``Scheme``."""
        tuner = self.scheme.tuner
        return tuner and tuner._replace(choice=partial(_choice_of_leader, tuner))


def _choice_of_leader(tuner: Tuner, state: OldState, tensor: Tensor) -> Choice | None:
    return tuner.choice(state, tensor) if any(state.values()) else None


def _among(ranks: Ranks, round_: Round) -> Generator[Round, Array, Array]:
    """Run a round among ``ranks``; a single rank keeps its data and needs no collective."""
    if len(ranks) == 1:
        yield round_._replace(data=round_.data[:0], among=())
        return round_.data
    return (yield round_._replace(among=ranks))


def _between(ranks: Ranks, exchange: Exchange) -> Exchange:
    """Run an exchange among ``ranks``."""
    round_ = next(exchange)
    while True:
        output = yield from _among(ranks, round_)
        try:
            round_ = exchange.send(output)
        except StopIteration as stop:
            return stop.value
