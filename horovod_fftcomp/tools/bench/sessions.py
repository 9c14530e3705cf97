"""Sessions: a compressor and one tensor, split into steps that are timed and steps that are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from horovod_fftcomp.engine.buckets import Bucket, decided_states
from horovod_fftcomp.engine.checkpoint import common
from horovod_fftcomp.engine.drive import drive
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.engine.work import Work
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Context, Exchange, Outcome, Round, Scheme, Tensor
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.types import Array, OldState
from horovod_fftcomp.wire.header import Plan

# A usual step: it measures no energies (step 0 and every 53rd do), `auto` does not try candidates,
# and where ranks take turns in leading, rank 0 leads, which is timed. Where all ranks choose a part
# of the positions, rank 0 is alone and chooses all: the most time that choosing takes. In a
# sharded exchange it is alone too, and owns all shards.
_USUAL_STEP = 6


class Session(Protocol):
    """A compressor and one tensor, on rank 0 of two; only ``encode`` and ``decode`` are timed.

    The second rank sends the payload of one other gradient in every step.
    """

    label: str
    has_feedback: bool
    sent_nbytes: int

    def encode(self, grad: Array, feedback: bool) -> Any:
        """Return the message of ``grad``, with ``feedback`` that of ``grad`` plus residual.

        ``grad``: flat float32, not changed. The residual is not changed either.
        """

    def collect(self, message: Any) -> Any:
        """Return the output of the collective of ``message`` and the second rank's message."""

    def decode(self, received: Any) -> object:
        """Return the sum over both ranks."""

    def alone(self, grad: Array) -> Array:
        """Return ``grad`` encoded and decoded without feedback, flat float32."""

    def advance(self, grad: Array) -> None:
        """Exchange ``grad`` with feedback and keep the new residual."""

    def residual(self) -> Array:
        """Return the residual, flat float32."""


class RecipeSession:
    """Session of a recipe, run through ``Scheme.exchange`` as by an engine, in a usual step."""

    def __init__(
        self, label: str, recipe: str, options: Mapping[str, Any], tensor: Tensor, other_grad: Array
    ) -> None:
        self.label = label
        options = of_usual_step(recipe, options)
        policy = make_policy(recipe, **options)
        self.scheme = policy.at(_USUAL_STEP)
        self.has_feedback = bool(policy.in_force().get("error_feedback"))
        off: dict[str, object] = {}
        if self.has_feedback:  # without it there is no residual to decay or to filter
            off = {"error_feedback": False, **dict.fromkeys({"decay", "beta"} & set(options), 1.0)}
        plain = make_policy(recipe, **{**options, **off})
        self._plain = plain.at(_USUAL_STEP)
        self._tensor = tensor
        self._known: OldState = {}
        found = common(self._outcome_alone(other_grad, plain.after_warmup, 0).state)
        self._known = decided_states([Bucket((tensor,), plain)], 0, lambda _: found).get(0, found)
        self._state: OldState = self._known
        self._n_ranks = 2
        first = next(self._exchange(other_grad, self._plain, self._known))
        if first.divided or first.collective == "alltoall":
            self._n_ranks = 1
        sent = self._sent_by_the_other(other_grad)
        self.sent_nbytes = sum(data.nbytes for data in sent)
        self._others: list[Array | None] = [data if self._n_ranks > 1 else None for data in sent]

    @property
    def plan(self) -> Plan | None:
        """Plan of the payload; None if there is no payload or its size depends on the values."""
        if not isinstance(self.scheme, Allgather) or not self.scheme.codec.has_fixed_size:
            return None
        return self.scheme.codec.plan(self._tensor.shape)

    def _sent_by_the_other(self, grad: Array) -> list[Array]:
        """Return the data of each round of the second rank, if both ranks had ``grad``.

        With one rank alone, its own data.
        """
        sent: list[Array] = []

        def network(round_: Round) -> Array:
            sent.append(round_.data)
            return _completed(round_, round_.data if self._n_ranks > 1 else None)

        drive(self._exchange(grad, self._plain, self._known), network)
        return sent

    def encode(self, grad: Array, feedback: bool) -> tuple[Exchange, Round]:
        """Return the exchange of ``grad`` with the second rank, and its last round."""
        how = (self.scheme, self._state) if feedback else (self._plain, self._known)
        return _start(self._exchange(grad, *how), self._others)

    def collect(self, message: tuple[Exchange, Round]) -> tuple[Exchange, Array]:
        """Return the exchange and the output of its last collective."""
        exchange, last = message
        return exchange, _completed(last, self._others[-1])

    def decode(self, received: tuple[Exchange, Array]) -> Outcome:
        """Return the outcome of the exchange."""
        outcome = Work(*received).run().made
        assert isinstance(outcome, Outcome)  # the scheme has no more rounds than it lists
        return outcome

    def alone(self, grad: Array) -> Array:
        """Return ``grad`` encoded and decoded without feedback, flat float32."""
        return self._outcome_alone(grad, self._plain, _USUAL_STEP).sums[0]

    def _outcome_alone(self, grad: Array, scheme: Scheme, step: int) -> Outcome:
        exchange = scheme.exchange([self._tensor], [grad], self._known, Context(step, 0, 1))
        return drive(exchange, lambda round_: round_.data)

    def advance(self, grad: Array) -> None:
        """Exchange ``grad`` with feedback and keep the new residual."""
        self._state = self.decode(self.collect(self.encode(grad, feedback=True))).state

    def residual(self) -> Array:
        """Return the residual, flat float32."""
        return self.scheme.residual(self._state, self._tensor).reshape(-1)

    def _exchange(self, grad: Array, scheme: Scheme, state: OldState) -> Exchange:
        context = Context(_USUAL_STEP, 0, self._n_ranks)
        return scheme.exchange([self._tensor], [grad], state, context)


def of_usual_step(recipe: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without a calibration, a warm-up, dense steps soon and nodes."""
    usual = {"calibrate_steps": 1, "dense_every": 1_000_000, "ranks_per_node": 1}
    known = {name: usual[name] for name in usual.keys() & {*RECIPES[recipe].options, *options}}
    return {**options, **known, "warmup_steps": 0}


def _start(exchange: Exchange, others: Sequence[Array | None]) -> tuple[Exchange, Round]:
    last = next(exchange)
    for other in others[:-1]:
        last = exchange.send(_completed(last, other))
    return exchange, last


def _completed(own: Round, other: Array | None) -> Array:
    """Return the output of a collective of this rank and one more, or of this rank alone."""
    if other is None or own.collective == "broadcast":
        return own.data
    if own.collective == "allgather":
        return np.concatenate([own.data, other])
    return own.data + other
