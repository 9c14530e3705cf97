"""Exchanges of a step's buckets, with rounds sent in an order that is the same on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Pending
from horovod_fftcomp.schemes import Grads, Outcome, Round
from horovod_fftcomp.types import Array

# How many buckets have their first round under way before an earlier bucket continues with its
# second: enough that neither encoding nor the network waits for the other.
_DEPTH = 2


class OrderedPipeline:
    """Exchanges of the buckets of ``engine``: encodes one while rounds of others are under way.

    ``send(round, bucket, number)`` starts a round without waiting. ``done(bucket, sums)`` is called
    when a bucket's exchange has ended. ``timeout_s``: how long to wait for a round. Which round is
    sent next depends on the order of ``start`` alone, never on what has arrived. ``wait_s``:
    seconds in which the calling thread waited for rounds, since the start. Use it in one thread.
    """

    def __init__(
        self,
        engine: Engine,
        send: Callable[[Round, int, int], Pending],
        done: Callable[[int, Sequence[Array]], None],
        timeout_s: float,
    ) -> None:
        self._engine, self._send, self._done, self._timeout_s = engine, send, done, timeout_s
        self._pending: dict[int, Pending] = {}  # by bucket, in the order of ``start``
        self._number: dict[int, int] = {}  # of each bucket's pending round
        self._started: list[int] = []  # buckets of this step, whether pending or not
        self.wait_s = 0.0

    def start(self, bucket: int, grads: Grads) -> None:
        """Start a bucket's exchange with its gradients, flat float32 or None."""
        self._number[bucket] = -1
        self._started.append(bucket)
        self._handle(bucket, self._engine.resume(bucket, grads))
        for earlier in self._started[:-_DEPTH]:
            if earlier in self._pending and not self._is_last(earlier):
                self._receive(earlier)

    def poll(self) -> None:
        """Decode the buckets whose last round has arrived; do not wait."""
        for bucket, pending in list(self._pending.items()):
            if self._is_last(bucket) and pending.is_done():
                self._receive(bucket)

    def finish(self) -> None:
        """Complete all exchanges."""
        while self._pending:
            for bucket in list(self._pending):
                self._receive(bucket)
        self._started = []

    def abandon(self) -> None:
        """Discard all exchanges."""
        self._pending, self._number, self._started = {}, {}, []

    def _is_last(self, bucket: int) -> bool:
        return self._number[bucket] == len(self._engine.scheme(bucket).rounds) - 1

    def _receive(self, bucket: int) -> None:
        begin = time.perf_counter()
        output = self._pending[bucket].wait(self._timeout_s)
        self.wait_s += time.perf_counter() - begin
        self._handle(bucket, self._engine.resume(bucket, output))

    def _handle(self, bucket: int, made: Round | Outcome) -> None:
        """Send a bucket's next round, or pass on its sums."""
        if isinstance(made, Round):
            self._number[bucket] += 1
            self._pending[bucket] = self._send(made, bucket, self._number[bucket])
        else:
            del self._pending[bucket]
            self._done(bucket, made.sums)
            made.sums.clear()  # they have been copied
