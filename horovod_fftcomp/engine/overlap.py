"""Exchanges the buckets of a step, each as soon as its gradients are there, by a ``send``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.work import Work
from horovod_fftcomp.schemes import Grads, Outcome, Round
from horovod_fftcomp.types import Array

# While rounds are pending too, an encoding is waited for in intervals of this length.
_POLL_S = 0.0002
# With a fixed order, a bucket's round n (from 0), unless it is the last, is waited for when
# _DEPTH * (n + 1) later buckets have been started: enough that neither encoding nor the network
# waits for the other.
_DEPTH = 2


class Pending(Protocol):
    """Handle of a round that has been sent."""

    def is_done(self) -> bool:
        """Return whether the output is there."""

    def wait(self, timeout_s: float) -> Array:
        """Return the output; raise if it has not arrived after ``timeout_s`` seconds."""


# Starts a round, given its name and process set, without waiting.
Send = Callable[[Round, str, Any], Pending]


class Slot(NamedTuple):
    """Position of a compressed tensor: its bucket, and its index there."""

    bucket: int
    position: int  # among the bucket's tensors


class Inline:
    """Executor without a thread: ``submit`` runs a function before it returns."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Return the future of ``function(*arguments)``, which has run."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # whoever waits for the future raises it
            future.set_exception(error)
        return future


class Pipeline:
    """Exchanges of the buckets of ``engine``: encodes one while rounds of others are under way.

    ``send`` starts a bucket's rounds on ``process_set``, named ``name``, bucket and number.
    ``done(bucket, sums)`` is called when a bucket's exchange has ended. ``timeout_s``: how long to
    wait for a round. Methods are called, and rounds sent, by one thread.

    A worker thread runs one ``Work`` at a time, in the order in which buckets were started, so that
    the engine is used by one thread. ``finish`` raises an error of the worker unchanged. Gradients
    must not change before ``finish`` returns or ``abandon`` is called. With ``is_ordered``, for
    networks that match rounds by their order, the calling thread does everything, and which round
    is sent next depends on the order of ``start`` alone, never on what has arrived.

    Times in seconds since the start: ``wait_s`` and ``encode_wait_s``, in which the calling thread
    waited for rounds and for the worker, or encoded after the last gradient of a step itself;
    ``encode_hidden_s``, encoding before that. The caller sets ``last_came`` to the time of each
    gradient. ``advance`` does nothing while ``encoding`` and ``inner`` are empty, unless
    ``is_ordered``.
    """

    def __init__(
        self,
        engine: Engine,
        send: Send,
        name: str,
        process_set: Any,
        done: Callable[[int, list[Array]], None],
        timeout_s: float,
        is_ordered: bool = False,
    ) -> None:
        self._engine, self._send, self._done, self._timeout_s = engine, send, done, timeout_s
        self._name, self._set, self._is_ordered = name, process_set, is_ordered
        self.wait_s = self.encode_wait_s = self.encode_hidden_s = 0.0
        # The thread starts with the first bucket, holds no reference to this object and ends with
        # it. An exiting interpreter waits for it, but not for long: it never waits for other ranks.
        self.worker = None if is_ordered else ThreadPoolExecutor(1, "fftcomp-encode")
        self._number = [0 for _ in engine.buckets]  # number of each bucket's current round
        self._started: list[int] = []  # buckets of this step, whether pending or not
        self.encoding: dict[int, Future[Work]] = {}  # by bucket, in the worker's order
        self._pending: dict[int, Pending] = {}  # by bucket, in the order in which they were sent
        self.inner: set[int] = set()  # buckets whose pending round is not their last
        self._computes = False
        self.last_came = 0.0
        self._spans: list[tuple[float, float]] = []  # when this step's encodings began and ended

    @property
    def is_computing(self) -> bool:
        """Whether something is being encoded or decoded; safe to read from other threads."""
        return self._computes or any(not work.done() for work in list(self.encoding.values()))

    def start(self, bucket: int, arrived: Mapping[int, Array | None]) -> None:
        """Start a bucket's exchange with its gradients, flat float32, by position.

        None stands for that of a frozen parameter. Zeros are sent for missing ones.
        """
        grads = [
            arrived[index] if index in arrived else np.zeros(tensor.numel, np.float32)
            for index, tensor in enumerate(self._engine.buckets[bucket].tensors)
        ]
        self._number[bucket] = 0
        self._started.append(bucket)
        self._compute(bucket, grads)
        if self._is_ordered:
            for later, earlier in enumerate(reversed(self._started)):
                if earlier in self.inner and later >= _DEPTH * (1 + self._number[earlier]):
                    self._receive(earlier)

    def advance(self, raises: bool = False) -> None:
        """Go on with buckets without waiting: send what is encoded, and encode what comes next.

        With ``is_ordered`` decode what has arrived. ``raises``: whether to raise the worker's
        error; in a hook that would depend on timing.
        """
        for bucket, encoding in list(self.encoding.items()):
            if not encoding.done() or not (raises or encoding.exception() is None):
                break
            del self.encoding[bucket]
            self._handle(bucket, encoding.result())
        for bucket, sent in list(self._pending.items()):
            if (bucket in self.inner) != self._is_ordered and sent.is_done():
                self._receive(bucket)

    def finish(self) -> None:
        """Complete the step; afterwards all sums have been passed on.

        Raises the errors of encodings and of waits; pending work is cancelled first.
        """
        try:
            while self.encoding or self._pending:
                if self._is_ordered and self.inner:
                    self._receive(self._next_in_order())
                    continue
                self.advance(raises=True)
                done = (bucket for bucket, sent in self._pending.items() if sent.is_done())
                if (bucket := next(done, None)) is not None:
                    self._receive(bucket)
                elif self.encoding:
                    begin = time.perf_counter()
                    wait([next(iter(self.encoding.values()))], _POLL_S if self._pending else None)
                    self.encode_wait_s += time.perf_counter() - begin
                elif self._pending:
                    self._receive(next(iter(self._pending)))
            for began, ended in self._spans:
                hidden_s = max(0.0, min(ended, self.last_came) - began)
                self.encode_hidden_s += hidden_s
                self.encode_wait_s += ended - began - hidden_s if self._is_ordered else 0.0
        finally:  # after an error the data of rounds that are under way must not be freed
            self.abandon(keeps_rounds=True)

    def _next_in_order(self) -> int:
        """Return the bucket to receive: of those with rounds to come the one with the most.

        Other ranks wait for its next round. Until its present one has arrived, a last round that
        has is taken: it is only decoded, and nothing is sent.
        """
        inner = (bucket for bucket in self._pending if bucket in self.inner)
        n_rounds, number = self._engine.n_rounds, self._number
        first = max(inner, key=lambda bucket: n_rounds[bucket] - number[bucket])
        if self._pending[first].is_done():
            return first
        done = (b for b, sent in self._pending.items() if b not in self.inner and sent.is_done())
        return next(done, first)

    def abandon(self, keeps_rounds: bool = False) -> None:
        """Discard the running step; waits for an encoding that is being computed."""
        for encoding in self.encoding.values():
            encoding.cancel()
        wait(self.encoding.values())
        self.encoding, self._spans, self._started = {}, [], []
        if not keeps_rounds:
            self._pending, self.inner = {}, set()

    def _receive(self, bucket: int) -> None:
        """Wait for a bucket's round; decode if it is the last one, else start the next encoding."""
        begin = time.perf_counter()
        output = self._pending.pop(bucket).wait(self._timeout_s)
        self.wait_s += time.perf_counter() - begin
        self.inner.discard(bucket)
        self._number[bucket] += 1
        self._compute(bucket, output)

    def _compute(self, bucket: int, data: Grads | Array) -> None:
        """Compute what a bucket sends next, in the worker if there is one, or its sums."""
        work = self._engine.prepare(bucket, data)
        self._computes = True  # the first call compiles kernels; GPU work is only launched
        try:
            if self.worker is None or self._number[bucket] == self._engine.n_rounds[bucket]:
                work.run()
            elif self._engine.device is not None and self._engine.computes_on_device(bucket):
                self.encoding[bucket] = Inline().submit(work.run)
            else:
                self.encoding[bucket] = self.worker.submit(work.run)
        finally:
            self._computes = False
        if bucket not in self.encoding:
            self._handle(bucket, work)

    def _handle(self, bucket: int, work: Work) -> None:
        """Send the round that ``work`` has made, or pass on the sums."""
        made = self._engine.resume(bucket, work)
        if isinstance(made, Outcome):
            sums = made.sums.copy()
            made.sums.clear()  # the engine need not keep them
            self._done(bucket, sums)
            return
        self._spans.append((work.began, work.ended))
        number = self._number[bucket]
        self._pending[bucket] = self._send(made, f"{self._name}.{bucket}.{number}", self._set)
        if number < self._engine.n_rounds[bucket] - 1:
            self.inner.add(bucket)
