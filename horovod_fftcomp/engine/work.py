"""Computation of a bucket between rounds, and what all of it has cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from horovod_fftcomp.schemes import Exchange, Outcome, Round


@dataclass
class Costs:
    """Traffic, times and errors of this rank since the start."""

    sent_nbytes: int = 0
    sums_nbytes: int = 0  # of those: sums that this rank made for the others, in shards
    received_nbytes: int = 0
    inside_nbytes: int = 0  # sent within a node, not part of the two above
    collectives: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    skipped_steps: int = 0
    relative_error: float = 0.0
    total_error: float = 0.0
    similarity: float | None = None


@dataclass
class Work:
    """Computation of a bucket before its first round, between two, or after its last.

    ``run`` may be called in any thread, once: it runs the bucket's exchange and touches nothing
    else of the engine. It reads gradients and state, which must not change meanwhile; the last one
    may write over the gradients, see ``Context.into``. ``began``, ``ended``:
    ``time.perf_counter()``, the same clock in all threads.
    """

    exchange: Exchange
    output: Any  # array, of the last round; None before the first
    made: Round | Outcome | None = None
    began: float = 0.0
    ended: float = 0.0

    def run(self) -> Work:
        """Compute ``made``, the next round, or the outcome after the last; return this object."""
        self.began = time.perf_counter()
        try:
            self.made = self.exchange.send(self.output)
        except StopIteration as stop:
            self.made = stop.value
        self.ended = time.perf_counter()
        return self
