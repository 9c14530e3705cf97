"""Sharded exchange of a scheme that gathers payloads; see ``shards``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_fftcomp import wire
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels.ops import AnyCodec
from horovod_fftcomp.schemes import (
    Context,
    Exchange,
    Grads,
    OldState,
    Second,
    Tensor,
    ops_of,
)
from horovod_fftcomp.schemes.allgather import Allgather, serves
from horovod_fftcomp.schemes.auto import EVEN, SHARES, Auto
from horovod_fftcomp.schemes.dgc import Dgc
from horovod_fftcomp.schemes.hard_threshold import HardThreshold, calibrating
from horovod_fftcomp.schemes.shard_plan import MOST_NBYTES, Key, grain_of, second_codec
from horovod_fftcomp.schemes.shards import SHARD_BEGIN, SHARD_RESIDUAL, folded, moved
from horovod_fftcomp.schemes.state_array import INT64, StateArray, StateArrays
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import Array

DEFAULT = Second()
_ROUND_NBYTES = 64_000  # what a network receives in the time of a round without data


@dataclass(frozen=True)
class Sharded(Wrapper):
    """Exchange the payloads of ``scheme`` in two rounds of constant size, by shards.

    With error feedback, for every tensor: sum over ranks of (sent + residuals) == sum of (gradients
    + old residuals), second residuals included. ``second``: options of the second compression.
    """

    spec_name = "Sharded"
    scheme: Allgather | Auto | Dgc | HardThreshold
    second: Second = DEFAULT

    def __post_init__(self) -> None:
        if not isinstance(self.scheme, (Allgather, Auto, Dgc, HardThreshold)):
            raise UnsupportedError('exchange="sharded" needs scope="tensor"')
        if isinstance(self.scheme, Dgc) and self.scheme.correction.max_norm is not None:
            raise UnsupportedError('exchange="sharded" does not work with max_norm')

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        return (*self.scheme.rounds[:-1], "alltoall", "allgather")

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        there = context._replace(second=self.second)
        return (yield from self.scheme.exchange(tensors, grads, state, there))

    def is_smaller(self, tensors: Sequence[Tensor], world_size: int) -> bool:
        """Return whether a rank receives fewer bytes than by a gather, one round more included."""
        sharded = sum(self.received_nbytes(tensor, world_size) for tensor in tensors)
        gathered = sum(self.scheme.received_nbytes(tensor, world_size) for tensor in tensors)
        fits = sum(map(self.sent_nbytes, tensors)) <= MOST_NBYTES
        return fits and sharded + _ROUND_NBYTES < gathered

    def received_nbytes(self, tensor: Tensor, world_size: int) -> float:
        """Return the bytes of ``tensor`` that a rank receives from others; see ``Scheme``.

        Infinite under a threshold, which may select in every rank's part of a sum other elements.
        """
        if isinstance(self.scheme, HardThreshold):
            return math.inf
        both = self.sent_nbytes(tensor) + self._second_nbytes(tensor, self._codecs(tensor)[0])
        return (world_size - 1) / world_size * both

    def _second_nbytes(self, tensor: Tensor, first: AnyCodec) -> int:
        """Return the bytes that all ranks together send of ``tensor`` in the second round."""
        return wire.align(self._second(first).expected_nbytes(tensor.shape))

    def share_nbytes(self, tensor: Tensor, state: OldState, world_size: int) -> float:
        """Return the bytes that a rank sends of a tensor, second round included; see ``Scheme``."""
        scheme = self.scheme
        if isinstance(scheme, HardThreshold):
            return super().share_nbytes(tensor, state, world_size)
        nbytes = scheme.share_nbytes(tensor, state, world_size)
        return nbytes + self._second_nbytes(tensor, self._first(tensor, state)) / world_size

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a GPU can compute this step's exchange, with pieces of any size."""
        scheme = self.scheme
        if isinstance(scheme, HardThreshold):  # a piece's threshold is its tensor's
            return scheme.runs_on_device(tensors)
        for tensor in tensors:
            codecs = self._codecs(tensor)
            pieces = [tensor, *(Tensor("", (grain_of(codec, tensor),)) for codec in codecs)]
            if not all(serves(codec, pieces) for codec in (*codecs, *map(self._second, codecs))):
                return False
        return scheme.runs_on_device(tensors)

    def _codecs(self, tensor: Tensor) -> Sequence[AnyCodec]:
        """Return the codecs of the first round of which one is used; at first the first one."""
        if isinstance(self.scheme, Auto):
            shares = (EVEN, len(SHARES) - 1)  # with the most bytes it may be sent as it is
            samples = (self.scheme.samples(tensor.shape, share) for share in shares)
            return [self.scheme.codec(tensor.shape), *itertools.chain(*samples)]
        assert not isinstance(self.scheme, HardThreshold)
        return [self.scheme.codec]

    def _first(self, tensor: Tensor, state: OldState) -> AnyCodec:
        """Return the codec of the first round; under a threshold another with the same pieces."""
        scheme = self.scheme
        if isinstance(scheme, HardThreshold):
            return calibrating(scheme.density)
        return scheme.codec_of(tensor, state) if isinstance(scheme, Auto) else scheme.codec

    @property
    def _sign(self) -> bool:
        return getattr(self.scheme, "sign", False)

    def _second(self, codec: AnyCodec) -> AnyCodec:
        """Return the codec of the second round."""
        return second_codec(codec, self._sign, self.second)

    def owned(
        self, tensors: Sequence[Tensor], state: OldState, rank: int, world_size: int
    ) -> OldState:
        """Return a state, NumPy arrays, with second residuals of this rank's pieces alone.

        Those of other pieces go into the residuals; see ``shards.moved``.
        """
        codecs = [self._first(tensor, state) for tensor in tensors]
        plan = Key(codecs).plan(tuple(tensors), self._sign, self.second, world_size)
        return moved(plan, codecs, tensors, state, rank, ops_of(None))

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return the arrays of the state; see ``Scheme``.

        The second residual, of the part of a tensor that this rank owns, has the size of that part.
        """
        arrays = dict(self.scheme.state_arrays(tensor, state))
        part, whole = state.get(SHARD_RESIDUAL, {}).get(tensor.name), arrays["residual"]
        if part is not None and whole.is_kept:
            begin = int(state.get(SHARD_BEGIN, {}).get(tensor.name, [whole.numel])[0])
            numel = max(0, min(part.size, whole.numel - begin))
            arrays[SHARD_RESIDUAL] = StateArray(numel, dtype=whole.dtype)
            arrays[SHARD_BEGIN] = StateArray(1, dtype=INT64)
        return arrays

    def residual(self, state: OldState, tensor: Tensor) -> Array:
        """Return the residual of ``tensor``, float32 in its shape, with that of its shard."""
        return self.scheme.residual(folded(self.scheme, [tensor], state), tensor)
