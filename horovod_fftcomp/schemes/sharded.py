"""Sharded exchange of a scheme that gathers payloads; see ``shards``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from horovod_fftcomp.schemes import (
    Context,
    Exchange,
    Grads,
    OldState,
    Scheme,
    Second,
    Tensor,
)
from horovod_fftcomp.schemes.shards import SHARD_BEGIN, SHARD_RESIDUAL, folded
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import Array


@dataclass(frozen=True)
class Sharded(Wrapper):
    """Exchange the payloads of ``scheme`` in two rounds of constant size, by shards.

    With error feedback, for every tensor: sum over ranks of (sent + residuals) == sum of (gradients
    + old residuals), second residuals included. ``second``: options of the second compression.
    """

    spec_name = "Sharded"
    scheme: Scheme
    second: Second = Second()

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        return (*self.scheme.rounds[:-1], "alltoall", "allgather")

    def possible_rounds(self) -> frozenset[tuple[str, ...]]:
        """Return every list of collectives that an exchange may have; see ``Scheme``."""
        return frozenset(
            (*rounds[:-1], "alltoall", "allgather") for rounds in self.scheme.possible_rounds()
        )

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        there = context._replace(second=self.second)
        return (yield from self.scheme.exchange(tensors, grads, state, there))

    def at(self, step: int) -> Sharded:
        """Return the scheme to run at a step, counted from the first compressed one."""
        return replace(self, scheme=self.scheme.at(step))

    def in_warmup(self) -> Scheme | None:
        """Return the scheme of dense warm-up steps; see ``Scheme``."""
        return self.scheme.in_warmup()

    def state_arrays(self, tensor: Tensor, state: OldState) -> Mapping[str, tuple[np.dtype, int]]:
        """Return (dtype, elements) of each array of the state; see ``Scheme``.

        The second residual, of the part of a tensor that this rank owns, has the size of that part.
        """
        arrays = dict(self.scheme.state_arrays(tensor, state))
        part = state.get(SHARD_RESIDUAL, {}).get(tensor.name)
        if part is not None and "residual" in arrays:
            kind, most = arrays["residual"]
            begin = int(state.get(SHARD_BEGIN, {}).get(tensor.name, [most])[0])
            arrays[SHARD_RESIDUAL] = kind, max(0, min(part.size, most - begin))
            arrays[SHARD_BEGIN] = np.dtype(np.int64), 1
        return arrays

    def residual(self, state: OldState, tensor: Tensor) -> Array:
        """Return the residual of ``tensor``, float32 in its shape, with that of its shard."""
        return self.scheme.residual(folded(self.scheme, [tensor], state), tensor)
