"""Shards of a bucket: its pieces, their codecs, and the second codecs of a sharded exchange."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.codec.adaptive import Adaptive, Wangni
from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.methods.dither import Dither
from horovod_fftcomp.codec.methods.signs import SignMethod
from horovod_fftcomp.codec.methods.terngrad import TernGrad
from horovod_fftcomp.codec.quantizers import Float32, RangeFloat
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels.ops import AnyCodec, Codecs, Feedback, Ops
from horovod_fftcomp.schemes import Grads, OldState, Second, State, Tensor
from horovod_fftcomp.types import Shape

# Of a shard. Everyone waits for the largest shard, but a piece of a tensor selects its own largest
# values, not those of the tensor: with equal shards charlm's loss was 0.1 to 0.3 % higher.
_NEAR = 0.4
MOST_NBYTES = (1 << 31) - 1  # of a message: Horovod counts the bytes of an alltoall in 32 bits
_GRAIN = 64  # elements: a piece of a tensor that is not transformed is a multiple of it


class Piece(NamedTuple):
    """What a tensor and a shard have in common: elements ``begin`` to ``end`` of the tensor."""

    number: int  # of the tensor in its bucket
    begin: int
    end: int


def cut(numels: Sequence[int], grains: Sequence[int], n_shards: int) -> list[list[Piece]]:
    """Return the pieces of each shard of tensors of these sizes, in the tensors' order.

    A shard ends between two tensors if one ends within 0.4 of a shard's size. Otherwise the tensor
    is cut, at a multiple of its grain from its start; its parts have at least that size.
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
    near = min(starts, key=lambda start: abs(start - wanted))
    if abs(near - wanted) <= _NEAR * starts[-1] / n_shards:
        return near
    tensor = min(bisect.bisect_right(starts, wanted), len(starts) - 1) - 1
    begin, end, grain = starts[tensor], starts[tensor + 1], grains[tensor]
    at = begin + (wanted - begin + grain // 2) // grain * grain
    return end if end - at < grain else at


# The second density by default, as a multiple of the first; by whether there is no transform. A sum
# of many ranks' choices has more that counts, and spectra gain by a bit more in each value:
# benchmarks/results/convergence.md.
_TIMES = {True: 4.0, False: 2.4}


def are_votes(codecs: Codecs, feedback: Feedback) -> bool:
    """Return whether ranks send signs, one bit for each element, and the majority's are wanted."""
    return feedback.sign and isinstance(codecs[0], DenseCodec)


def second_codec(codec: AnyCodec, sign: bool, second: Second) -> AnyCodec:
    """Return the codec of the second round for the sums of payloads of ``codec``."""
    if sign:  # sums are -p, 0 and p
        return codec if isinstance(codec, DenseCodec) else DenseCodec(TernGrad(clip=0.0))
    if isinstance(codec, DenseCodec) and isinstance(codec.method, Dither):
        return replace(
            codec, method=replace(codec.method, ratio=16)
        )  # no other rank's errors cancel
    if not isinstance(codec, Codec) or isinstance(codec.sparsifier, Wangni):
        return codec
    if isinstance(codec.sparsifier, Adaptive):  # its units are no larger sum's
        density, bits = second.density or 0.04, second.bits or 4
        return Codec(Identity(), TopK(density), Float32() if bits == 32 else RangeFloat(bits))
    quantizer, is_plain = codec.quantizer, type(codec.transform) is Identity
    if second.bits is not None:
        quantizer = Float32() if second.bits == 32 else RangeFloat(second.bits)
    elif isinstance(quantizer, RangeFloat) and not is_plain:
        quantizer = RangeFloat(min(16, quantizer.bits + 1))
    sparsifier = codec.sparsifier
    if isinstance(sparsifier, TopK):
        density = second.density or min(1.0, _TIMES[is_plain] * sparsifier.density)
        sparsifier = TopK(density)
    return replace(codec, sparsifier=sparsifier, quantizer=quantizer)


class ShardPlan:
    """Pieces of a bucket and their codecs; ``owners[rank]``: the numbers of a rank's pieces.

    ``second_sizes``: bytes of each owner's second message; empty if they depend on values.
    """

    def __init__(
        self,
        codecs: Sequence[AnyCodec],
        seconds: Sequence[AnyCodec],
        tensors: Sequence[Tensor],
        n_shards: int,
    ) -> None:
        self._names = [tensor.name for tensor in tensors]
        numels = [tensor.numel for tensor in tensors]
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
        self.numels = [piece.end - piece.begin for piece in self.pieces]
        self.n_bins = [bins.stop - bins.start for bins in self.bins]
        self.forms = [codec.coeffs_format((0,))[0].type for codec in codecs]  # of residuals
        # By rank: the first coefficients of its pieces, by tensor, as its state has them.
        self.begins = [
            {tensors[self.pieces[n].number].name: np.array([self.bins[n].start]) for n in numbers}
            for numbers in self.owners
        ]
        self._splits = self._sizes(self.codecs)
        self.second_sizes = self._sizes(self.seconds)

    def owns(self, rank: int, name: str, begin: Any, part: Any) -> bool:
        """Return whether a second residual is of the piece of a tensor that ``rank`` owns."""
        sizes = {self._names[self.pieces[n].number]: self.n_bins[n] for n in self.owners[rank]}
        known = self.begins[rank].get(name)
        return known is not None and known[0] == begin[0] and sizes[name] == len(part)

    def _bins(self, number: int) -> slice:
        """Return the part of a tensor's coefficients that are a piece's."""
        transform, (_, begin, end) = self.codecs[number].transform, self.pieces[number]
        return slice(transform.n_bins(begin), transform.n_bins(end))

    def _sizes(self, codecs: Codecs) -> tuple[int, ...]:
        """Return the bytes of each owner's pieces by these codecs; empty if these do not tell."""
        if not all(codec.has_fixed_size for codec in codecs):
            return ()
        pairs = zip(codecs, self.tensors, strict=True)
        return self._by_owner([codec.payload_nbytes(tensor.shape) for codec, tensor in pairs])

    def received(self, rank: int) -> tuple[int, ...]:
        """Return the bytes of each rank's first message to this one; empty if unknown."""
        return (self._splits[rank],) * len(self.owners) if self._splits else ()

    def _by_owner(self, sizes: Sequence[int]) -> tuple[int, ...]:
        aligned = [wire.align(size) for size in sizes]
        return tuple(sum(aligned[pieces.start : pieces.stop]) for pieces in self.owners)

    def splits(self, ops: Ops, message: Any) -> tuple[int, ...]:
        """Return how many bytes of a first message go to each owner.

        Waits for a device's message if sizes depend on values. Raises UnsupportedError if the
        message is too long for an alltoall.
        """
        splits = self._splits
        if not splits:
            payloads = wire.split_payloads(ops.get(message))
            splits = self._by_owner([payload.size for _, payload in payloads])
        if sum(splits) > MOST_NBYTES:
            raise UnsupportedError(
                f"a sharded exchange sends at most {MOST_NBYTES} bytes of a bucket, got "
                f'{sum(splits)}: use exchange="gather" for tensors of this size'
            )
        return splits

    def grads(self, grads: Grads) -> list[Any]:
        """Return the parts of gradients that are the pieces; None of a frozen tensor."""
        parts = [(grads[piece.number], piece) for piece in self.pieces]
        return [None if grad is None else grad[p.begin : p.end] for grad, p in parts]

    def state(self, tensors: Sequence[Tensor], state: OldState) -> State:
        """Return the parts of residuals and velocities that are the pieces."""
        elements = [slice(piece.begin, piece.end) for piece in self.pieces]
        found: State = {}
        for kind, parts in (("residual", self.bins), ("velocity", elements)):
            old, places = state.get(kind, {}), zip(self.tensors, self.pieces, parts, strict=True)
            found[kind] = {
                tensor.name: old[name][part]
                for tensor, piece, part in places
                if (name := tensors[piece.number].name) in old
            }
        return found

    def whole(
        self,
        ops: Ops,
        parts: Sequence[Any],
        sizes: Sequence[int],
        dtypes: Iterable[type] = itertools.repeat(np.float32),
    ) -> list[Any]:
        """Return an array for each tensor of those of its pieces; None if all of them are.

        ``sizes``: number of elements of each piece's array, which is zero where it is None.
        """

        def joined(members: Sequence[int], dtype: type) -> Any:
            if not members:  # an empty tensor
                return ops.empty(0, dtype)
            arrays = [parts[n] for n in members]
            if len(arrays) == 1 or all(array is None for array in arrays):
                return arrays[0]
            return ops.rejoin(arrays, [sizes[n] for n in members], dtype)

        return list(map(joined, self.members, dtypes))


def grain_of(codec: AnyCodec, tensor: Tensor) -> int:
    """Return the number of elements of which a piece of the tensor is a multiple.

    Blocks of a transform, or rows that share a scale, are not cut.
    """
    method = getattr(codec, "method", None)
    if isinstance(method, SignMethod):
        length = method.row_length(tensor.shape)
        if length < tensor.numel:
            return length
    return max(_GRAIN, codec.transform.bins_per_block * codec.transform.reals_per_bin)


def _tensor_of(tensor: Tensor, piece: Piece, numel: int, grain: int) -> Tensor:
    """Return a piece as a tensor of its own; a tensor that is not cut is the piece itself."""
    n = piece.end - piece.begin
    if n == numel:
        return tensor
    has_rows = grain * tensor.shape[0] == numel
    # With as many dimensions, as far as codecs look at them.
    shape: Shape = (n // grain, grain) if has_rows else (n, 1, 1) if len(tensor.shape) > 2 else (n,)
    return Tensor(f"{tensor.name}[{piece.begin}:{piece.end}]", shape)


class Key:
    """Codecs as a key of a cache: their identities, which are compared faster than options."""

    def __init__(self, codecs: Sequence[AnyCodec]) -> None:
        self.codecs = tuple(codecs)  # kept, so that no other object gets their identities
        self._ids = tuple(map(id, codecs))

    def __hash__(self) -> int:
        return hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._ids == other._ids

    def plan(
        self, tensors: tuple[Tensor, ...], sign: bool, second: Second, n_shards: int
    ) -> ShardPlan:
        """Return the plan of a bucket, always the same object."""
        return _plan(self, tensors, sign, second, n_shards)


@functools.lru_cache(maxsize=1024)  # more than a training has buckets
def _plan(
    key: Key, tensors: tuple[Tensor, ...], sign: bool, second: Second, n_shards: int
) -> ShardPlan:
    codecs = key.codecs
    seconds = {id(codec): second_codec(codec, sign, second) for codec in codecs}
    return ShardPlan(codecs, [seconds[id(codec)] for codec in codecs], tensors, n_shards)
