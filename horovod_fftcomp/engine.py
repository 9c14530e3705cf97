"""One rank's exchanges, step by step: state that commits or vanishes, and what it all cost.

The engine runs a scheme's rounds for whoever owns a network; it never calls one. Schemes are
pure, so everything that lasts longer than a step lies here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_fftcomp.backends import Array
from horovod_fftcomp.schemes import (
    Context,
    Exchange,
    Outcome,
    Round,
    Scheme,
    State,
    Tensor,
)


@dataclass
class Costs:
    """Sums since the start, on this rank."""

    sent_nbytes: int = 0
    collectives: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    skipped_steps: int = 0
    relative_error: float = 0.0


class Engine:
    """All buckets of one compressor on one rank.

    A step is: ``start`` each bucket, ``advance`` it with the output of each of its rounds, read
    ``sums``. The new state waits until ``settle``: it is committed if every part of the step was
    finite on every rank, and dropped otherwise, so a step that an AMP scaler skips leaves no
    trace. All ranks see the same facts and decide alike without another message.
    """

    def __init__(
        self,
        scheme: Scheme,
        buckets: Sequence[Sequence[Tensor]],
        rank: int,
        world_size: int,
    ) -> None:
        self.scheme = scheme
        self.buckets = [tuple(bucket) for bucket in buckets]
        self.costs = Costs()
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self._state: list[State] = [{} for _ in self.buckets]
        self._running: dict[int, Exchange] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._finite = True

    def start(self, bucket: int, grads: Sequence[Array]) -> Round:
        """Begin this step's exchange of a bucket; ``grads``: flat float32, one for each tensor."""
        if bucket in self._running or bucket in self._outcomes:
            raise ValueError(f"bucket {bucket} has been started in this step already")
        context = Context(self.step, self.rank, self.world_size)
        exchange = self.scheme.exchange(self.buckets[bucket], grads, self._state[bucket], context)
        self._running[bucket] = exchange
        begin = time.perf_counter()
        first = next(exchange)
        self.costs.encode_s += time.perf_counter() - begin
        return self._count(first)

    def advance(self, bucket: int, output: Array) -> Round | None:
        """Hand over a round's output; return the next round, or None when the sums are ready."""
        begin = time.perf_counter()
        try:
            following = self._running[bucket].send(output)
        except StopIteration as stop:
            self._outcomes[bucket] = stop.value
            del self._running[bucket]
            return None
        finally:
            self.costs.decode_s += time.perf_counter() - begin
        return self._count(following)

    def _count(self, round_: Round) -> Round:
        self.costs.sent_nbytes += round_.data.nbytes
        self.costs.collectives += 1
        return round_

    def sums(self, bucket: int) -> list[Array]:
        """Return the sums over ranks of a bucket whose rounds are done."""
        return self._outcomes[bucket].sums

    def observe(self, finite: bool) -> None:
        """Report whether a tensor that was exchanged elsewhere came out finite."""
        self._finite &= finite

    def settle(self) -> None:
        """End the step: commit its new state if all of it was finite, else drop it."""
        if self._running:
            raise ValueError(f"buckets {sorted(self._running)} are still under way")
        outcomes, finite = self._outcomes, self._finite
        self._outcomes, self._finite = {}, True
        if not outcomes:
            return
        if finite and all(outcome.finite for outcome in outcomes.values()):
            for bucket, outcome in outcomes.items():
                self._state[bucket] = outcome.state
        else:
            self.costs.skipped_steps += 1
        self._measure([outcome.energy for outcome in outcomes.values()])
        self.step += 1

    def _measure(self, energies: Sequence[tuple[float, float] | None]) -> None:
        measured = [energy for energy in energies if energy is not None]
        wanted = sum(energy[0] for energy in measured)
        if wanted > 0:
            left = sum(energy[1] for energy in measured)
            self.costs.relative_error = (left / wanted) ** 0.5

    def abandon(self) -> None:
        """Forget a step that was broken off; its new state vanishes."""
        self._running, self._outcomes, self._finite = {}, {}, True

    def residual(self, tensor_name: str) -> Array:
        """Return what is not sent yet of a tensor, float32 in its shape, as last committed."""
        for bucket, state in zip(self.buckets, self._state, strict=True):
            for tensor in bucket:
                if tensor.name == tensor_name:
                    return self.scheme.residual(state, tensor)
        raise ValueError(f"no bucket holds a tensor named {tensor_name!r}")

    def state_dict(self) -> dict:
        """Return this rank's state, settled: {"version", "step", kind: {tensor name: array}}."""
        self.settle()
        merged: dict = {"version": 1, "step": self.step, "state": {}}
        for state in self._state:
            for kind, arrays in state.items():
                named = merged["state"].setdefault(kind, {})
                named.update({name: array.copy() for name, array in arrays.items()})
        return merged

    def load_state_dict(self, saved: dict) -> None:
        """Restore what ``state_dict`` of the same rank returned; ValueError if it cannot fit."""
        if saved.get("version") != 1:
            raise ValueError(f"state_dict version is {saved.get('version')!r}, expected 1")
        names = {tensor.name for bucket in self.buckets for tensor in bucket}
        for kind, arrays in saved["state"].items():
            foreign = sorted(set(arrays) - names)
            if foreign:
                raise ValueError(f"{kind} of unknown tensors {foreign}; is this another model?")
        self.abandon()
        self.step = saved["step"]
        self._state = [
            {
                kind: {t.name: arrays[t.name].copy() for t in bucket if t.name in arrays}
                for kind, arrays in saved["state"].items()
            }
            for bucket in self.buckets
        ]
