"""Sharded exchange of payloads: two rounds of constant size, for any number of ranks.

Each rank owns a shard of a bucket, an equal part of its elements. It gets everybody's payloads of
its shard (alltoall), sums them, compresses the sum again and sends it to all (allgather). What the
second compression leaves unsent, the second residual, is added to the owner's next sum. Source:
Tang et al., ICML 2019 (DoubleSqueeze).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.adaptive import AdaptiveCodec
from horovod_fftcomp.codec.adaptive_methods import Wangni
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.scaled_sign import ScaledSign
from horovod_fftcomp.codec.methods.signs import SignMethod
from horovod_fftcomp.codec.methods.terngrad import TernGrad
from horovod_fftcomp.codec.quantizers import Float32, RangeFloat
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.ops import AnyCodec, Feedback, Flags, Ops
from horovod_fftcomp.schemes import (
    Context,
    Energy,
    Grads,
    Measured,
    OldState,
    Outcome,
    Round,
    Scheme,
    Second,
    State,
    Tensor,
    measures,
)
from horovod_fftcomp.schemes.state import new_state
from horovod_fftcomp.types import Shape

# Kinds of state of the part of a tensor that a rank owns: coefficients of the second residual, and
# the number of the first of them in the tensor.
SHARD_RESIDUAL, SHARD_BEGIN = "shard_residual", "shard_begin"

_GRAIN = 64  # elements: a piece of a tensor that is not transformed is a multiple of it


class Piece(NamedTuple):
    """What a tensor and a shard have in common: elements ``begin`` to ``end`` of the tensor."""

    number: int  # of the tensor in its bucket
    begin: int
    end: int


def cut(numels: Sequence[int], grains: Sequence[int], n_shards: int) -> list[list[Piece]]:
    """Return the pieces of each shard of tensors of these sizes, in the tensors' order.

    Shards are as equal as cuts at multiples of a tensor's ``grains``, counted from its start, let
    them be; what would remain of a tensor beside a cut is at least its grain.
    """
    starts = list(itertools.accumulate(numels, initial=0))
    cuts = [0, *(_cut_at(starts, grains, n, n_shards) for n in range(1, n_shards)), starts[-1]]
    return [
        [
            Piece(number, max(begin, start) - start, min(end, stop) - start)
            for number, (start, stop) in enumerate(itertools.pairwise(starts))
            if max(begin, start) < min(end, stop)
        ]
        for begin, end in itertools.pairwise(cuts)
    ]


def _cut_at(starts: Sequence[int], grains: Sequence[int], number: int, n_shards: int) -> int:
    wanted = starts[-1] * number // n_shards
    tensor = min(bisect.bisect_right(starts, wanted), len(starts) - 1) - 1
    begin, end, grain = starts[tensor], starts[tensor + 1], grains[tensor]
    at = begin + (wanted - begin + grain // 2) // grain * grain
    return end if end - at < grain else at


# The second density by default, as a multiple of the first; by whether there is no transform.
_TIMES = {True: 2.5, False: 2.2}


def second_codec(codec: AnyCodec, sign: bool | str, second: Second) -> AnyCodec:
    """Return the codec of the second round for the sums of payloads of ``codec``."""
    if sign:  # sums are -p, 0 and p; without a vote any may be 0
        return DenseCodec(ScaledSign() if sign == "vote" else TernGrad(clip=0.0))
    if isinstance(codec, AdaptiveCodec) and not isinstance(codec.method, Wangni):
        codec = Codec(Identity(), TopK(0.04), RangeFloat(4))  # its units are no larger sum's
    if not isinstance(codec, Codec):
        return codec
    quantizer = codec.quantizer
    if second.bits is not None:
        quantizer = Float32() if second.bits == 32 else RangeFloat(second.bits)
    sparsifier = codec.sparsifier
    if isinstance(sparsifier, TopK):
        times = _TIMES[type(codec.transform) is Identity]
        density = second.density or min(1.0, times * sparsifier.density)
        sparsifier = TopK(density)
    return replace(codec, sparsifier=sparsifier, quantizer=quantizer)


class ShardPlan:
    """Pieces of a bucket and their codecs; ``owners[rank]``: the numbers of a rank's pieces."""

    def __init__(
        self,
        codecs: Sequence[AnyCodec],
        seconds: Sequence[AnyCodec],
        tensors: Sequence[Tensor],
        n_shards: int,
    ) -> None:
        self._names = [tensor.name for tensor in tensors]
        numels = [math.prod(tensor.shape) for tensor in tensors]
        grains = [grain_of(*pair) for pair in zip(codecs, tensors, strict=True)]
        shards = cut(numels, grains, n_shards)
        ends = list(itertools.accumulate(map(len, shards), initial=0))
        self.owners = [range(*pair) for pair in itertools.pairwise(ends)]
        self.pieces = [piece for shard in shards for piece in shard]
        self.tensors = tuple(
            _tensor_of(tensors[p.number], p, numels[p.number], grains[p.number])
            for p in self.pieces
        )
        self.codecs = [codecs[piece.number] for piece in self.pieces]
        self.seconds = [seconds[piece.number] for piece in self.pieces]
        self.members = [
            [n for n, piece in enumerate(self.pieces) if piece.number == number]
            for number in range(len(tensors))
        ]
        self.bins = [self._bins(n) for n in range(len(self.pieces))]
        self.kind = np.complex64 if codecs[0].transform.reals_per_bin == 2 else np.float32
        self.numels = [piece.end - piece.begin for piece in self.pieces]
        self.n_bins = [bins.stop - bins.start for bins in self.bins]
        # By rank: the first coefficients of its pieces, by tensor, as its state has them.
        self.begins = [
            {tensors[self.pieces[n].number].name: np.array([self.bins[n].start]) for n in numbers}
            for numbers in self.owners
        ]
        self._splits: tuple[int, ...] | None = None
        if all(codec.has_fixed_size for codec in codecs):
            sizes = zip(self.codecs, self.tensors, strict=True)
            self._splits = self._by_owner([c.payload_nbytes(t.shape) for c, t in sizes])

    def owns(self, rank: int, name: str, begin: Any, part: Any) -> bool:
        """Return whether a second residual is of the piece of a tensor that ``rank`` owns."""
        sizes = {self._names[self.pieces[n].number]: self.n_bins[n] for n in self.owners[rank]}
        known = self.begins[rank].get(name)
        return known is not None and known[0] == begin[0] and sizes[name] == part.size

    def _bins(self, number: int) -> slice:
        """Return the part of a tensor's coefficients that are a piece's."""
        transform, (_, begin, end) = self.codecs[number].transform, self.pieces[number]
        return slice(transform.n_bins(begin), transform.n_bins(end))

    def _by_owner(self, sizes: Sequence[int]) -> tuple[int, ...]:
        aligned = [wire.align(size) for size in sizes]
        return tuple(sum(aligned[pieces.start : pieces.stop]) for pieces in self.owners)

    def splits(self, message: Any) -> tuple[int, ...]:
        """Return how many bytes of a first message go to each owner."""
        if self._splits is not None:
            return self._splits
        return self._by_owner([payload.size for _, payload in wire.split_payloads(message)])

    def grads(self, grads: Grads) -> list[Any]:
        """Return the parts of gradients that are the pieces; None of a frozen tensor."""
        parts = [(grads[piece.number], piece) for piece in self.pieces]
        return [None if grad is None else grad[p.begin : p.end] for grad, p in parts]

    def state(self, tensors: Sequence[Tensor], state: OldState) -> State:
        """Return the parts of residuals and velocities that are the pieces."""
        places = list(zip(self.tensors, self.pieces, self.bins, strict=True))
        old = state.get("residual", {})
        residuals = {
            tensor.name: old[name][bins]
            for tensor, piece, bins in places
            if (name := tensors[piece.number].name) in old
        }
        old = state.get("velocity", {})
        velocities = {
            tensor.name: old[name][piece.begin : piece.end]
            for tensor, piece, _ in places
            if (name := tensors[piece.number].name) in old
        }
        return {"residual": residuals, "velocity": velocities}

    def whole(
        self, ops: Ops, parts: Sequence[Any], sizes: Sequence[int], dtype: type = np.float32
    ) -> list[Any]:
        """Return an array for each tensor of those of its pieces; None if all of them are.

        ``sizes``: number of elements of each piece's array, which is zero where it is None.
        """
        return [
            parts[members[0]]
            if len(members) == 1
            else None
            if all(parts[n] is None for n in members)
            else ops.join([parts[n] for n in members], [sizes[n] for n in members], dtype)
            for members in self.members
        ]


def grain_of(codec: AnyCodec, tensor: Tensor) -> int:
    """Return the number of elements of which a piece of the tensor is a multiple.

    Blocks of a transform, or rows that share a scale, are not cut.
    """
    method = getattr(codec, "method", None)
    if isinstance(method, SignMethod):
        length = method.row_length(tensor.shape)
        if length < math.prod(tensor.shape):
            return length
    return max(_GRAIN, codec.transform.bins_per_block * codec.transform.reals_per_bin)


def _tensor_of(tensor: Tensor, piece: Piece, numel: int, grain: int) -> Tensor:
    """Return a piece as a tensor of its own; a tensor that is not cut is the piece itself."""
    n = piece.end - piece.begin
    if n == numel:
        return tensor
    has_rows = grain * tensor.shape[0] == numel
    shape: Shape = (n // grain, grain) if has_rows else (n,)
    return Tensor(f"{tensor.name}[{piece.begin}:{piece.end}]", shape)


class _Key:
    """Codecs as a key of a cache: their identities, which are compared faster than options."""

    def __init__(self, codecs: Sequence[AnyCodec]) -> None:
        self._codecs = tuple(codecs)  # kept, so that no other object gets their identities
        self._ids = tuple(map(id, codecs))

    def __hash__(self) -> int:
        return hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._ids == other._ids

    def plan(
        self, tensors: tuple[Tensor, ...], sign: bool | str, second: Second, n_shards: int
    ) -> ShardPlan:
        """Return the plan of a bucket, always the same object."""
        return _plan(self, tensors, sign, second, n_shards)


@functools.lru_cache(maxsize=1024)  # more than a training has buckets
def _plan(
    key: _Key, tensors: tuple[Tensor, ...], sign: bool | str, second: Second, n_shards: int
) -> ShardPlan:
    codecs = key._codecs
    seconds = {id(codec): second_codec(codec, sign, second) for codec in codecs}
    return ShardPlan(codecs, [seconds[id(codec)] for codec in codecs], tensors, n_shards)


class _Owned(NamedTuple):
    """Result of an owner: its second message and residuals, what it measured, and an error.

    ``state``: of its pieces, see ``SHARD_RESIDUAL``. ``flags``: of the payloads that it has summed.
    """

    message: Any
    state: State
    flags: Flags = Flags()
    squares: Callable[[], Mapping[int, tuple[float, float, float]]] | None = None
    error: PayloadError | None = None


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
    assert context.second is not None
    ops = context.ops
    key = _Key(codecs)
    plan = key.plan(tuple(tensors), feedback.sign, context.second, context.world_size)
    state = _moved(plan, codecs, tensors, grads, state, context.rank)
    measure = measures(context) and feedback.sign != "vote" and not feedback.keeps_sent
    first = ops.coder(plan.codecs, plan.tensors, 1)
    encoded = first.encode(
        plan.grads(grads),
        plan.state(tensors, state),
        (context.step, context.rank),
        feedback,
        measure,
    )
    received = yield Round("alltoall", encoded.message, splits=plan.splits(encoded.message))
    owned = _sum_and_encode(plan, received, tensors, grads, state, context, feedback, measure)
    gathered = yield Round("allgather", owned.message, divided=True)
    if owned.error is not None:
        raise owned.error
    summed = ops.coder(plan.seconds, plan.tensors, 1).decode_sum(gathered, False)
    sums = plan.whole(ops, summed.sums, plan.numels)
    if not summed.flags.finite:
        for total in sums:
            if np.isnan(total).any():
                total.fill(np.nan)  # the other pieces are no gradient without this one
    new: State = {}
    if feedback.keep:
        whole = plan.whole(ops, encoded.residuals, plan.n_bins, plan.kind)
        new["residual"] = new_state(tensors, grads, state.get("residual", {}), whole)
    if feedback.momentum is not None:
        whole = plan.whole(ops, encoded.velocities, plan.numels)
        new["velocity"] = new_state(tensors, grads, state.get("velocity", {}), whole)
    new |= owned.state
    mine = plan.owners[context.rank]
    flags = ops.both(summed.flags, owned.flags)
    return Outcome(sums, new, flags, _measured(plan, tensors, encoded.squares, owned.squares, mine))


def _sum_and_encode(
    plan: ShardPlan,
    received: Any,
    tensors: Sequence[Tensor],
    grads: Grads,
    state: OldState,
    context: Context,
    feedback: Feedback,
    measure: bool,
) -> _Owned:
    """Sum the payloads of this rank's pieces, and compress the sums again."""
    ops, mine = context.ops, plan.owners[context.rank]
    here = slice(mine.start, mine.stop)
    pieces, parts = plan.tensors[here], plan.pieces[here]
    if not pieces:
        return _Owned(ops.empty(0, np.uint8), {})
    error = None
    try:
        coder = ops.coder(plan.codecs[here], pieces, context.world_size)
        sums, flags, _ = coder.decode_sum(received, feedback.sign)
    except PayloadError as raised:  # the others wait for this rank's part of the second round
        error, flags = raised, Flags(False)
        sums = [np.full(p.end - p.begin, np.nan, np.float32) for p in parts]
    owners = [tensors[piece.number] for piece in parts]
    # A tensor that is frozen, here and elsewhere, keeps its residual and sends zeros.
    sums = [
        None if grads[piece.number] is None and not ops.get(total).any() else total
        for piece, total in zip(parts, sums, strict=True)
    ]
    keep = feedback.keep and not feedback.sign
    old = state.get(SHARD_RESIDUAL, {})
    residuals = {
        piece.name: old[tensor.name]
        for piece, tensor in zip(pieces, owners, strict=True)
        if tensor.name in old
    }
    again = ops.coder(plan.seconds[here], pieces, 1).encode(
        sums,
        {"residual": residuals},
        (context.step, context.world_size + context.rank),  # other draws than the first ones
        Feedback(keep),
        measure and keep,
    )
    if error is not None:
        wire.mark_corrupt(again.message)
    kept: State = {}
    if keep:
        left = new_state(owners, sums, old, again.residuals)
        begins = {name: begin for name, begin in plan.begins[context.rank].items() if name in left}
        kept = {SHARD_RESIDUAL: left, SHARD_BEGIN: begins}
    return _Owned(again.message, kept, flags, again.squares, error)


def _moved(
    plan: ShardPlan,
    codecs: Sequence[AnyCodec],
    tensors: Sequence[Tensor],
    grads: Grads,
    state: OldState,
    rank: int,
) -> OldState:
    """Return the state with second residuals of this rank's pieces alone.

    Those of other pieces, as after a change of the number of ranks, go into the residuals.
    """
    parts = state.get(SHARD_RESIDUAL, {})
    frozen = {tensor.name for tensor, grad in zip(tensors, grads, strict=True) if grad is None}
    others = [
        (codec, tensor)
        for codec, tensor in zip(codecs, tensors, strict=True)
        if tensor.name in parts
        and tensor.name not in frozen
        and not plan.owns(rank, tensor.name, state[SHARD_BEGIN][tensor.name], parts[tensor.name])
    ]
    for codec, tensor in others:
        state = _folded(state, tensor, codec.coeffs_format(tensor.shape))
    return state


def folded(scheme: Scheme, tensors: Sequence[Tensor], state: OldState) -> OldState:
    """Return the state of ``scheme``, which is not sharded: second residuals go into the others.

    ``state``: NumPy arrays; not changed.
    """
    for tensor in tensors:
        if tensor.name in state.get(SHARD_RESIDUAL, {}):
            state = _folded(state, tensor, scheme.state_arrays(tensor, state)["residual"])
    return {kind: arrays for kind, arrays in state.items() if arrays or "shard" not in kind}


def _folded(state: OldState, tensor: Tensor, form: tuple[np.dtype, int]) -> OldState:
    kinds = {kind: dict(state.get(kind, {})) for kind in ("residual", SHARD_RESIDUAL, SHARD_BEGIN)}
    part = kinds[SHARD_RESIDUAL].pop(tensor.name)
    begin = int(kinds[SHARD_BEGIN].pop(tensor.name)[0])
    residual = kinds["residual"].get(tensor.name)
    whole = np.zeros(form[1], form[0]) if residual is None else residual.copy()
    whole[begin : begin + part.size] += part
    kinds["residual"][tensor.name] = whole
    return {**state, **kinds}


def _measured(
    plan: ShardPlan,
    tensors: Sequence[Tensor],
    first: Callable[[], Mapping[int, tuple[float, float, float]]] | None,
    second: Callable[[], Mapping[int, tuple[float, float, float]]] | None,
    mine: range,
) -> Callable[[], Measured] | None:
    """Return the function ``measured`` of an outcome: unsent are both residuals."""
    if first is None:
        return None

    def read() -> Measured:
        energies: dict[str, Energy] = {}
        unsent = {} if second is None else second()
        for number, (gradient, wanted, left) in first().items():
            name = tensors[plan.pieces[number].number].name
            before = energies.get(name, Energy(0.0, 0.0, 0.0))
            both = left + (unsent[number - mine.start][2] if number - mine.start in unsent else 0.0)
            energies[name] = Energy(
                before.gradient + gradient, before.wanted + wanted, before.left + both
            )
        return Measured(energies)

    return read
