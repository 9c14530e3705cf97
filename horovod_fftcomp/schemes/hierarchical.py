"""Exchange between nodes: dense sums within a node, compressed ones between nodes.

A node is a number of consecutive ranks, each of which owns a share of every bucket. It gets the
node's sum of its share, exchanges it with the ranks of equal place in the other nodes by another
scheme, and all ranks of the node gather the sums; or the payloads of which they are sums, if these
have far fewer bytes and take little time to sum.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import UnsupportedError, check_whole
from horovod_fftcomp.kernels.ops import Ops
from horovod_fftcomp.kernels.plans import split
from horovod_fftcomp.schemes import (
    Context,
    Exchange,
    Grads,
    Measured,
    Outcome,
    Round,
    Scheme,
    State,
    Tuner,
    ops_of,
)
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.parts import (
    NodePlan,
    Part,
    Share,
    add_residuals,
    node_plan,
    of_names,
    parts_in,
)
from horovod_fftcomp.schemes.shard_plan import MOST_NBYTES
from horovod_fftcomp.schemes.shards import SHARD_RESIDUAL
from horovod_fftcomp.schemes.uncompressed import Uncompressed
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import Array, Choice, OldState, Tensor, Tensors

Ranks = tuple[int, ...]

# How many times fewer bytes than sums the payloads of all nodes have where ranks gather these.
FEWER = 4


class NodeLayout:
    """Assignment of ``world_size`` ranks to ``n_nodes`` nodes of ``node_size`` consecutive ranks.

    Fewer ranks than ``ranks_per_node`` are one node. Raises UnsupportedError if the nodes are not
    equal: ranks of a smaller node would own larger shares than those that they exchange with.
    """

    def __init__(self, ranks_per_node: int, world_size: int) -> None:
        self.node_size = min(ranks_per_node, world_size)
        self.n_nodes, rest = divmod(world_size, self.node_size)
        if rest:
            raise UnsupportedError(
                f"ranks_per_node={ranks_per_node} needs nodes of equal size, but {world_size} "
                f"ranks leave a node of {rest}: start a multiple of {ranks_per_node} ranks, give a "
                "number that divides them, or leave ranks_per_node out"
            )
        self._nodes = [self._node(number) for number in range(self.n_nodes)]

    def _node(self, number: int) -> Ranks:
        return tuple(range(number * self.node_size, (number + 1) * self.node_size))

    def groups(self) -> Iterator[Ranks]:
        """Yield all groups of two or more ranks that have collectives of their own."""
        groups = (*self._nodes, *zip(*self._nodes, strict=True))
        yield from (ranks for ranks in groups if len(ranks) > 1)

    def node_of(self, rank: int) -> Ranks:
        """Return the ranks of the node of ``rank``, itself included."""
        return self._nodes[rank // self.node_size]

    def peers_of(self, rank: int) -> Ranks:
        """Return the ranks with the place of ``rank`` in all nodes, itself included."""
        return tuple(range(rank % self.node_size, self.n_nodes * self.node_size, self.node_size))


def node_size_of(places: Sequence[tuple[int, int]]) -> int:
    """Return the number of ranks of each host, given (its ranks, number there) of each rank.

    1 if all ranks are on one host, or if hosts have unequal numbers or no consecutive ranks.
    """
    size = places[0][0]
    is_even = all(place == (size, rank % size) for rank, place in enumerate(places))
    return size if is_even and len(places) % size == 0 and size < len(places) else 1


@dataclass(frozen=True)
class Hierarchical(Wrapper):
    """Sum within each node of ``ranks_per_node`` ranks, and exchange the sums by ``scheme``.

    ``scheme`` runs once for each place in a node, with one rank of each node, on that place's share
    of a bucket; see ``NodePlan``. Its state belongs to the parts of tensors in this share, under
    their names. Residuals of anything else, which come from a state that was saved with other nodes
    or without any, are added to the sum of the node once.

    Raises UnsupportedError for a scheme with a momentum of its own or that sends signs: its result
    on one node would differ from that on two.
    """

    spec_name = "PerNode"
    ranks_per_node: int

    def __post_init__(self) -> None:
        hint = "; omit it for one rank per node"
        check_whole("ranks_per_node", self.ranks_per_node, 2, hint=hint)
        if self.scheme.traits.momentum or not self.scheme.traits.fits_differences:
            raise UnsupportedError(
                "ranks_per_node does not work with recipes that have their own momentum or send "
                "signs. Leave momentum out, or take another recipe, or dgc or sketchsgd with 0.0"
            )

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        return ("alltoall", *self.scheme.rounds, "allgather")

    @property
    def is_sharded(self) -> bool:
        """Whether sums between nodes are exchanged by shards; see ``Scheme``."""
        return self.scheme.is_sharded

    def possible_rounds(self) -> frozenset[tuple[str, ...]]:
        """Return every list of collectives that an exchange may have; see ``Scheme``."""
        between = self.scheme.possible_rounds()
        return frozenset(("alltoall", *rounds, "allgather") for rounds in between)

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        layout, ops = NodeLayout(self.ranks_per_node, context.world_size), context.ops
        node, peers = layout.node_of(context.rank), layout.peers_of(context.rank)
        plan = node_plan(tuple(tensors), layout.node_size)
        share = plan.shares[node.index(context.rank)]
        is_alone = len(peers) == 1 or not share.tensors
        own = set() if is_alone else {tensor.name for tensor in share.tensors}
        due, late = self._owed(tensors, grads, state, own)
        grads = self._compensated(tensors, grads, state, due, ops)
        within = yield from _scattered(grads, plan, node, context.rank, ops)
        passes_on = _passed_on_nbytes(self.scheme, plan, len(peers))
        if is_alone:
            outcome = yield from _nothing(self.scheme.rounds, within, ops)
        else:
            summed = _parts_of(share, within, grads, ops)
            place = context._replace(rank=peers.index(context.rank), world_size=len(peers))
            place = place._replace(into=None, arriving=plan.parts if passes_on else None)
            between = self.scheme.exchange(share.tensors, summed, of_names(state, own), place)
            passed_on = partial(_passed_on, passes_on, node, len(peers), ops) if passes_on else None
            outcome = yield from _between(peers, between, passed_on)
            within = ops.rejoin(outcome.sums, list(map(len, outcome.sums)))
        whole = within
        if not passes_on:
            gather = Round("allgather", within, inside=True, receives=plan.splits)
            whole = yield from _among(node, gather)
        # What was due is dropped by the host alone: a device restores arrays, but no names.
        if due or outcome.flags.not_finite is None:
            whole, ops = ops.get(whole), ops_of(None)
        flags = outcome.flags
        if due or not passes_on:  # else the payloads have told
            flags = ops.both(flags, ops.flags_of(whole))
        sums = split(whole, plan.offsets)
        kept = {kind: {**outcome.state.get(kind, {}), **arrays} for kind, arrays in late.items()}
        measured = outcome.measured and _of_wholes(outcome.measured, share)
        return outcome._replace(
            sums=sums, flags=flags, state={**outcome.state, **kept}, measured=measured
        )

    def _owed(
        self, tensors: Tensors, grads: Grads, state: OldState, own: set[str]
    ) -> tuple[list[Part], State]:
        """Return the parts whose residuals this step adds, and the state that waits for others.

        ``own``: names of the parts that this rank exchanges. Residuals of a frozen tensor wait, and
        in a step without compression all do.
        """
        residuals = {kind: state.get(kind, {}) for kind in ("residual", SHARD_RESIDUAL)}
        owed = [part for part in parts_in(residuals, tensors) if part.tensor.name not in own]
        frozen = {t.name for t, grad in zip(tensors, grads, strict=True) if grad is None}
        waits = isinstance(self.scheme, Uncompressed)
        late = {part.tensor.name for part in owed if waits or part.whole.name in frozen}
        return [part for part in owed if part.tensor.name not in late], of_names(state, late)

    def _compensated(
        self, tensors: Tensors, grads: Grads, state: OldState, due: list[Part], ops: Ops
    ) -> Grads:
        """Return the gradients, plus the residuals of the parts ``due``."""
        if not due:
            return grads
        compensated = list(grads)
        for number, tensor in enumerate(tensors):
            parts = [part for part in due if part.whole == tensor]
            if parts:
                compensated[number] = total = np.array(ops.get(grads[number]))
                add_residuals(self.scheme, parts, state, total)
        return compensated

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange of all shares; see ``Scheme``."""
        shares = node_plan(tuple(tensors), self.ranks_per_node).shares
        return all(self.scheme.runs_on_device(share.tensors) for share in shares if share.tensors)

    def share_nbytes(self, tensor: Tensor, state: OldState, world_size: int) -> float:
        """Return the mean over ranks of the bytes that one sends to other nodes; see ``Scheme``.

        If choices differ between parts, as with this rank's own part.
        """
        layout = NodeLayout(self.ranks_per_node, world_size)
        if layout.n_nodes == 1:
            return 0.0
        part = next(parts_in(state, [tensor]), Part(tensor, 0, tensor.numel))
        nbytes = self.scheme.share_nbytes(part.tensor, state, layout.n_nodes)
        share = tensor.numel / max(1, part.end - part.begin) / layout.node_size
        return share * nbytes

    def residual(self, state: OldState, tensor: Tensor) -> Array:
        """Return the residual of ``tensor``, zero where it belongs to other ranks of the node."""
        total = np.zeros(tensor.numel, np.float32)
        add_residuals(self.scheme, list(parts_in(state, [tensor])), state, total)
        return total.reshape(tensor.shape)

    def owned(self, tensors: Tensors, state: OldState, rank: int, world_size: int) -> OldState:
        """Return a loaded state, with second residuals of this rank's pieces; see ``Scheme``."""
        layout = NodeLayout(self.ranks_per_node, world_size)
        share = node_plan(tuple(tensors), layout.node_size).shares[rank % layout.node_size]
        return self.scheme.owned(share.tensors, state, rank // layout.node_size, layout.n_nodes)

    @property
    def tuner(self) -> Tuner | None:
        """That of the scheme, for the parts that this rank exchanges; see ``Scheme``."""
        tuner = self.scheme.tuner
        return tuner and tuner._replace(
            choose=partial(_choose, tuner), choice=partial(_choice, tuner)
        )


def _choose(tuner: Tuner, parts: Sequence[tuple[Tensors, OldState]]) -> Sequence[OldState]:
    found = [([p.tensor for p in parts_in(state, tensors)], state) for tensors, state in parts]
    return tuner.choose(found)


def _choice(tuner: Tuner, state: OldState, tensor: Tensor) -> Choice | None:
    part = next(parts_in(state, [tensor]), None)
    return part and tuner.choice(state, part.tensor)


def _check_nbytes(nbytes: int) -> None:
    """Raise UnsupportedError if a bucket is too long for an alltoall."""
    if nbytes > MOST_NBYTES:
        raise UnsupportedError(
            f"ranks_per_node sums at most {MOST_NBYTES} bytes of a bucket within a node, got "
            f"{nbytes}: send tensors of this size dense, by a rule, or leave ranks_per_node out"
        )


def _scattered(
    grads: Grads, plan: NodePlan, node: Ranks, rank: int, ops: Ops
) -> Generator[Round, Any, Any]:
    """Return the node's sums of the share of ``rank``, added in rank order.

    By an alltoall, which all networks have, and which Gloo's, MPI's and NCCL's ranks sum alike.
    """
    place = node.index(rank)
    parts, numels = [_cut(grads, share) for share in plan.shares], [s.numels for s in plan.shares]
    own, own_numels = parts.pop(place), numels.pop(place)
    _check_nbytes(4 * plan.offsets[-1])
    others = list(chain(*parts))
    joined = ops.join(others, list(chain(*numels))) if others else ops.empty(0)
    splits, receives = list(plan.splits), [plan.splits[place]] * len(node)
    splits[place] = receives[place] = 0
    sent = Round("alltoall", joined, inside=True, splits=tuple(splits), receives=tuple(receives))
    return ops.sum_rows((yield from _among(node, sent)), own, own_numels, place)


def _cut(grads: Grads, share: Share) -> list[Any]:
    """Return the parts of ``grads`` in ``share``; None of a frozen tensor."""
    pairs = [(grads[number], part) for number, part in zip(share.numbers, share.parts, strict=True)]
    return [None if grad is None else grad[part.begin : part.end] for grad, part in pairs]


def _parts_of(share: Share, within: Any, grads: Grads, ops: Ops) -> list[Any]:
    """Return the node's sums of the parts; None for a frozen tensor of which nothing came."""
    parts = zip(share.numbers, split(within, share.offsets), strict=True)
    return [None if grads[n] is None and not ops.get(part).any() else part for n, part in parts]


def _nothing(rounds: Sequence[str], within: Any, ops: Ops) -> Exchange:
    """Take part in no round between nodes: there is one node, or nothing to exchange."""
    for collective in rounds:
        yield Round(collective, within[:0], among=())
    return Outcome([], {}, ops.flags_of(within))


def _of_wholes(measured: Callable[[], Measured], share: Share) -> Callable[[], Measured]:
    """Return a function that returns the same energies by the names of whole tensors."""
    names = {part.tensor.name: part.whole.name for part in share.parts}

    def read() -> Measured:
        found = measured()
        energies = {names.get(name, name): energy for name, energy in found.energies.items()}
        return found._replace(energies=energies)

    return read


def _among(ranks: Ranks, round_: Round) -> Generator[Round, Array, Array]:
    """Run a round among ``ranks``; a single rank keeps its data and needs no collective."""
    if len(ranks) == 1:
        yield round_._replace(data=round_.data[:0], among=())
        return round_.data
    return (yield round_._replace(among=ranks))


def _between(
    ranks: Ranks, exchange: Exchange, passed_on: Callable[[Any], Generator[Round, Any, Any]] | None
) -> Exchange:
    """Run an exchange among ``ranks``; it gets ``passed_on(output)`` in place of each output."""
    round_ = next(exchange)
    while True:
        output = yield from _among(ranks, round_)
        if passed_on is not None:
            output = yield from passed_on(output)
        try:
            round_ = exchange.send(output)
        except StopIteration as stop:
            return stop.value


def _passed_on_nbytes(scheme: Scheme, plan: NodePlan, n_nodes: int) -> list[int]:
    """Return the bytes of a message of each share, if ranks of a node gather payloads, not sums.

    The same on all ranks; empty if they gather sums.
    """
    if n_nodes == 1 or not sends_few(scheme) or not all(share.tensors for share in plan.shares):
        return []
    sizes = [sum(map(scheme.sent_nbytes, share.tensors)) for share in plan.shares]
    is_less = FEWER * n_nodes * max(sizes) * len(sizes) <= 4 * plan.offsets[-1]
    return sizes if is_less else []


def sends_few(scheme: Scheme) -> bool:
    """Return whether payloads of fixed size hold few elements, and no coefficients.

    To sum these of all nodes takes a rank less time than to get sums, which are mostly zeros.
    """
    codec = scheme.codec if isinstance(scheme, Allgather) else None
    is_fixed = isinstance(codec, Codec) and codec.has_fixed_size
    return is_fixed and codec is not None and codec.transform == Identity()


def _passed_on(
    sizes: Sequence[int], node: Ranks, n_nodes: int, ops: Ops, gathered: Any
) -> Generator[Round, Any, Any]:
    """Return all nodes' messages of a whole bucket; ``gathered``: those of this rank's share.

    ``sizes``: bytes of a message of each share.
    """
    length = n_nodes * max(sizes)  # of what each rank hands in
    rest = length - len(gathered[:length])
    padded = ops.join([gathered[:length], None], [length - rest, rest], np.uint8)
    gather = Round("allgather", padded, inside=True, receives=(length,) * len(node))
    every = yield from _among(node, gather)
    begins = [
        (place * length + number * nbytes, nbytes)
        for number in range(n_nodes)
        for place, nbytes in enumerate(sizes)
    ]
    parts = [every[begin : begin + nbytes] for begin, nbytes in begins]
    return ops.join(parts, [nbytes for _, nbytes in begins], np.uint8)
