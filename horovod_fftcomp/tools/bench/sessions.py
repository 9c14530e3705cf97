"""A compressor at work on one tensor, taken apart into what costs time and what does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovod_fftcomp.engine.checkpoint import common
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Context, Exchange, Outcome, Round, Scheme, State, Tensor
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import Plan

# Step 0 and every 53rd measure energies on top; a usual step does not. Where ranks take turns in
# leading, it is the turn of rank 0, whose work is measured; and no recipe tries anything any more.
# Where they share the lead, rank 0 is alone and has all of it: the most that choosing takes.
_USUAL_STEP = 6


class Session(Protocol):
    """One compressor and one tensor; only ``encode`` and ``decode`` are timed.

    A second rank takes part, which always sends the same other gradient.
    """

    label: str
    has_feedback: bool
    sent_nbytes: int

    def encode(self, grad: Array, feedback: bool) -> Any:
        """Return what is sent for ``grad``, with ``feedback`` plus the residual; commit nothing.

        ``grad``: flat float32, left unchanged.
        """
        ...

    def collect(self, message: Any) -> Any:
        """Return what the network would make of ``message`` and the second rank's."""
        ...

    def decode(self, received: Any) -> object:
        """Return the sum over both ranks."""
        ...

    def alone(self, grad: Array) -> Array:
        """Return what arrives of ``grad`` without feedback, flat float32."""
        ...

    def advance(self, grad: Array) -> None:
        """Exchange ``grad`` with feedback and keep the new residual."""
        ...

    def residual(self) -> Array:
        """Return what is not sent yet, flat float32."""
        ...


class _Received(NamedTuple):
    """An exchange that waits for the output of its last collective, and that output."""

    exchange: Exchange
    output: Array


class _Started(NamedTuple):
    """An exchange that waits for its last collective, and its part of it."""

    exchange: Exchange
    last: Round


class RecipeSession:
    """A recipe of this package, driven as an engine drives it, from a usual step on."""

    def __init__(
        self, label: str, recipe: str, options: Mapping[str, Any], tensor: Tensor, other_grad: Array
    ) -> None:
        self.label = label
        if "calibrate_steps" in RECIPES[recipe].options:
            options = {**options, "calibrate_steps": 1}  # what follows after is measured
        policy = make_policy(recipe, **options)
        self.scheme = policy.at(_USUAL_STEP)
        self.has_feedback = bool(
            {**RECIPES[recipe].options, **options}.get("error_feedback", False)
        )
        off = {"error_feedback": False} if self.has_feedback else {}
        plain = make_policy(recipe, **{**options, **off})
        self._plain = plain.at(_USUAL_STEP)
        self._tensor = tensor
        self._known: State = {}
        self._known = common(self._outcome_alone(other_grad, plain.at(0), 0).state)
        self._state: State = self._known
        self._n_ranks = 2
        if next(self._exchange(self._plain, other_grad, self._known)).divided:
            self._n_ranks = 1
        sent = self._sent_by_the_other(other_grad)
        self.sent_nbytes = sum(data.nbytes for data in sent)
        self._others: list[Array | None] = [data if self._n_ranks > 1 else None for data in sent]

    @property
    def plan(self) -> Plan | None:
        """Sizes of the payload; None where there is none, or the values decide."""
        codec = self.scheme.codec if isinstance(self.scheme, Allgather) else None
        if codec is None or not codec.has_fixed_size:
            return None
        return codec.plan(self._tensor.shape)

    def _sent_by_the_other(self, grad: Array) -> list[Array]:
        """Return what the second rank hands to each round, as if the first sent the same.

        What the first does, if it is alone.
        """
        exchange = self._exchange(self._plain, grad, self._known)
        rounds = [next(exchange)]
        for _ in self.scheme.rounds[1:]:
            other = rounds[-1].data if self._n_ranks > 1 else None
            rounds.append(exchange.send(_completed(rounds[-1], other)))
        exchange.close()
        return [round_.data for round_ in rounds]

    def encode(self, grad: Array, feedback: bool) -> _Started:
        """Return the exchange of ``grad`` with the second rank, as far as the last collective."""
        if feedback:
            return _start(self._exchange(self.scheme, grad, self._state), self._others)
        return _start(self._exchange(self._plain, grad, self._known), self._others)

    def collect(self, message: _Started) -> _Received:
        """Return the exchange and what its last collective makes of both ranks' parts."""
        return _Received(message.exchange, _completed(message.last, self._others[-1]))

    def decode(self, received: _Received) -> Outcome:
        """Return what the exchange ends in."""
        return _finish(received)

    def alone(self, grad: Array) -> Array:
        """Return what arrives of ``grad`` without feedback, flat float32."""
        return self._outcome_alone(grad, self._plain, _USUAL_STEP).sums[0]

    def _outcome_alone(self, grad: Array, scheme: Scheme, step: int) -> Outcome:
        nobody = [None] * len(scheme.rounds)
        context = Context(step, 0, 1)
        exchange = scheme.exchange([self._tensor], [grad], self._known, context)
        started = _start(exchange, nobody)
        return _finish(_Received(exchange, _completed(started.last, None)))

    def advance(self, grad: Array) -> None:
        """Exchange ``grad`` with feedback and keep the new residual."""
        self._state = self.decode(self.collect(self.encode(grad, feedback=True))).state

    def residual(self) -> Array:
        """Return what is not sent yet, flat float32."""
        return self.scheme.residual(self._state, self._tensor).reshape(-1)

    def _exchange(self, scheme: Scheme, grad: Array, state: State) -> Exchange:
        context = Context(_USUAL_STEP, 0, self._n_ranks)
        return scheme.exchange([self._tensor], [grad], state, context)


def _start(exchange: Exchange, others: Sequence[Array | None]) -> _Started:
    last = next(exchange)
    for other in others[:-1]:
        last = exchange.send(_completed(last, other))
    return _Started(exchange, last)


def _finish(received: _Received) -> Outcome:
    try:
        received.exchange.send(received.output)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the scheme has more rounds than it lists")


def _completed(own: Round, other: Array | None) -> Array:
    """Return the output of a collective of this rank and one more, or of this rank alone."""
    if other is None or own.collective == "broadcast":
        return own.data
    if own.collective == "allgather":
        return np.concatenate([own.data, other])
    return own.data + other
