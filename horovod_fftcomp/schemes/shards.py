"""Sharded exchange of payloads: two rounds of constant size, for any number of ranks.

Each rank owns a shard of a bucket, an equal part of its elements. It gets everybody's payloads of
its shard (alltoall), sums them, compresses the sum again and sends it to all (allgather). What the
second compression leaves unsent, the second residual, is added to the owner's next sum. Source:
Tang et al., ICML 2019 (DoubleSqueeze).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.ops import AnyCodec, EncodedBucket, Feedback, Flags, Ops, Summed
from horovod_fftcomp.schemes import Context, Grads, OldState, Outcome, Round, Scheme, State
from horovod_fftcomp.schemes.meter import Squares, measured_by
from horovod_fftcomp.schemes.shard_plan import Key, ShardPlan, are_votes
from horovod_fftcomp.schemes.state import low_passed, multiply, new_state
from horovod_fftcomp.types import Tensor

# Kinds of state of the part of a tensor that a rank owns: coefficients of the second residual, and
# the number of the first of them in the tensor.
SHARD_RESIDUAL, SHARD_BEGIN = "shard_residual", "shard_begin"

Measurement = Callable[[], Mapping[int, Squares]]


class _Owned(NamedTuple):
    """Result of an owner: its second message and residuals, and what it has seen.

    ``state``: of its pieces, see ``SHARD_RESIDUAL``. ``flags``: of the payloads that it has summed.
    ``error``: None, or what was wrong with them. ``squares``: as of ``EncodedBucket``.
    """

    message: Any
    state: State
    flags: Flags = Flags()
    error: PayloadError | None = None
    squares: Measurement | None = None


class _ShardedBucket:
    """A bucket in one step; arguments as for ``gather``."""

    def __init__(
        self,
        codecs: Sequence[AnyCodec],
        tensors: Sequence[Tensor],
        grads: Grads,
        state: OldState,
        context: Context,
        feedback: Feedback,
    ) -> None:
        assert context.second is not None
        options = feedback.sign, context.second, context.world_size
        self.plan = plan = Key(codecs).plan(tuple(tensors), *options)
        self.tensors, self.grads, self.context, self.ops = tensors, grads, context, context.ops
        self.state = moved(plan, codecs, tensors, state, context.rank, self.ops)
        self.feedback = feedback
        self._are_votes = are_votes(codecs, feedback)
        self.measure = context.measures and not self._are_votes and not feedback.keeps_sent
        pieces = plan.owners[context.rank]
        self.mine = slice(pieces.start, pieces.stop)

    def encode(self) -> EncodedBucket:
        """Return the first message, of all pieces, and their residuals."""
        plan, at = self.plan, (self.context.step, self.context.rank)
        coder = self.ops.coder(plan.codecs, plan.tensors, 1)
        old = plan.state(self.tensors, self.state)
        return coder.encode(plan.grads(self.grads), old, at, self.feedback, self.measure)

    def own(self, received: Any) -> _Owned:
        """Sum the payloads of this rank's pieces, and compress the sums again."""
        plan, context, here = self.plan, self.context, self.mine
        pieces, parts = plan.tensors[here], plan.pieces[here]
        if not pieces:
            return _Owned(self.ops.empty(0, np.uint8), {})
        sums, flags, error = self._sum(received)
        owners = [self.tensors[piece.number] for piece in parts]
        old = self.state.get(SHARD_RESIDUAL, {})
        residuals = {
            piece.name: old[tensor.name]
            for piece, tensor in zip(pieces, owners, strict=True)
            if tensor.name in old
        }
        keep = self.feedback.keep and not self.feedback.sign
        again = self.ops.coder(plan.seconds[here], pieces, 1).encode(
            sums,
            {"residual": residuals},
            (context.step | 1 << 63, context.rank),  # other draws than the first ones
            Feedback(keep, self.feedback.decay, beta=self.feedback.beta),
            self.measure and keep,
        )
        if error is not None:
            wire.mark_corrupt(again.message)
        state: State = {}
        if keep:
            kept = low_passed(
                self.ops, pieces, {"residual": residuals}, again.residuals, self.feedback.beta
            )
            state = new_state(owners, sums, self.state, {SHARD_RESIDUAL: kept})
            begins = plan.begins[context.rank].items()
            known = state[SHARD_RESIDUAL]
            state[SHARD_BEGIN] = {name: begin for name, begin in begins if name in known}
        return _Owned(again.message, state, flags, error, again.squares)

    def _sum(self, received: Any) -> tuple[list[Any], Flags, PayloadError | None]:
        """Return the sums of this rank's pieces, None for a frozen tensor of which nothing came."""
        plan, here, error = self.plan, self.mine, None
        try:
            coder = self.ops.coder(plan.codecs[here], plan.tensors[here], self.context.world_size)
            sums, flags, _ = coder.decode_sum(received, self.feedback.sign)
        except PayloadError as raised:  # the others wait for this rank's part of the second round
            error, flags = raised, Flags(False)
            sums = [np.full(numel, np.nan, np.float32) for numel in plan.numels[here]]
        pairs = zip(plan.pieces[here], sums, strict=True)
        sums = [
            None if self.grads[piece.number] is None and not self.ops.get(total).any() else total
            for piece, total in pairs
        ]
        return sums, flags, error

    def decode(self, gathered: Any) -> Summed:
        """Return the sums of all tensors."""
        plan = self.plan
        summed = self.ops.coder(plan.seconds, plan.tensors, 1).decode_sum(gathered, False)
        sums = plan.whole(self.ops, summed.sums, plan.numels)
        if self._are_votes:
            multiply(sums, self.context.world_size, self.context.device)
        if not summed.flags.finite:
            for total in sums:
                if np.isnan(total).any():
                    total.fill(np.nan)  # the other pieces are no gradient without this one
        return Summed(sums, summed.flags)

    def new_state(self, encoded: EncodedBucket) -> State:
        """Return the new state of the first compression."""
        plan, found = self.plan, {}
        if self.feedback.keep:
            whole = plan.whole(self.ops, encoded.residuals, plan.n_bins, plan.forms)
            found["residual"] = low_passed(
                self.ops, self.tensors, self.state, whole, self.feedback.beta
            )
        if self.feedback.momentum is not None:
            found["velocity"] = plan.whole(self.ops, encoded.velocities, plan.numels)
        return new_state(self.tensors, self.grads, self.state, found)

    def squares(self, first: Measurement | None, second: Measurement | None) -> Measurement | None:
        """Return the squares by tensor from those by piece; unsent are both residuals."""
        if first is None:
            return None
        pieces, begin = self.plan.pieces, self.mine.start

        def read() -> dict[int, Squares]:
            unsent = {} if second is None else {begin + n: sums[2] for n, sums in second().items()}
            found: dict[int, Squares] = {}
            for number, (gradient, wanted, left) in first().items():
                sums = found.get(tensor := pieces[number].number, (0.0, 0.0, 0.0))
                left += unsent.get(number, 0.0)
                found[tensor] = (sums[0] + gradient, sums[1] + wanted, sums[2] + left)
            return found

        return read


def exchange_shards(
    codecs: Sequence[AnyCodec],
    tensors: Sequence[Tensor],
    grads: Grads,
    state: OldState,
    context: Context,
    feedback: Feedback,
) -> Generator[Round, Any, Outcome]:
    """Sum a bucket's tensors over all ranks in two rounds; arguments as for ``gather``.

    ``context.second``: options of the second round. The state has two kinds more, of the pieces
    that this rank owns; see ``SHARD_RESIDUAL``.
    """
    bucket = _ShardedBucket(codecs, tensors, grads, state, context, feedback)
    encoded = bucket.encode()
    plan = bucket.plan
    splits, sizes = plan.splits(context.ops, encoded.message), plan.received(context.rank)
    owned = bucket.own((yield Round("alltoall", encoded.message, splits=splits, receives=sizes)))
    gathered = yield Round("allgather", owned.message, divided=True, receives=plan.second_sizes)
    if owned.error is not None:
        raise owned.error
    summed = bucket.decode(gathered)
    return Outcome(
        summed.sums,
        bucket.new_state(encoded) | owned.state,
        context.ops.both(summed.flags, owned.flags),
        measured_by(tensors, bucket.squares(encoded.squares, owned.squares)),
    )


def moved(
    plan: ShardPlan,
    codecs: Sequence[AnyCodec],
    tensors: Sequence[Tensor],
    state: OldState,
    rank: int,
    ops: Ops,
) -> OldState:
    """Return the state with second residuals of this rank's pieces alone.

    Those of other pieces, as after a change of the number of ranks, go into the residuals.
    """
    parts = state.get(SHARD_RESIDUAL, {})
    for codec, tensor in zip(codecs, tensors, strict=True):
        part = parts.get(tensor.name)
        if part is not None and not plan.owns(
            rank, tensor.name, state[SHARD_BEGIN][tensor.name], part
        ):
            here = {
                kind: {n: ops.get(a) if n == tensor.name else a for n, a in arrays.items()}
                for kind, arrays in state.items()
            }
            state = fold(here, tensor, *codec.coeffs_format(tensor.shape))
    return state


def folded(scheme: Scheme, tensors: Sequence[Tensor], state: OldState) -> OldState:
    """Return a state of ``scheme`` without second residuals, which go into the others.

    ``state``: NumPy arrays; not changed.
    """
    for tensor in tensors:
        if tensor.name in state.get(SHARD_RESIDUAL, {}):
            whole = scheme.state_arrays(tensor, state).get("residual")
            if whole is not None and whole.is_kept:
                state = fold(state, tensor, whole.dtype, whole.numel)
    return {kind: arrays for kind, arrays in state.items() if arrays or "shard" not in kind}


def fold(state: OldState, tensor: Tensor, dtype: np.dtype, numel: int) -> OldState:
    """Return the state with the second residual of ``tensor`` in its residual of ``numel``."""
    kinds = {kind: dict(state.get(kind, {})) for kind in ("residual", SHARD_RESIDUAL, SHARD_BEGIN)}
    part = kinds[SHARD_RESIDUAL].pop(tensor.name)
    begin = int(kinds[SHARD_BEGIN].pop(tensor.name)[0])
    residual = kinds["residual"].get(tensor.name)
    whole = np.zeros(numel, dtype) if residual is None else residual.copy()
    whole[begin : begin + part.size] += part
    kinds["residual"][tensor.name] = whole
    return {**state, **kinds}
