"""Overlaps encoding with the backward pass: complete buckets are encoded in a worker thread.

Gradients arrive one by one. When all those of a bucket are there it is encoded in the worker; the
training thread sends and receives, by the caller's ``send``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.work import Work
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array

# While rounds are pending too, an encoding is waited for in intervals of this length.
_POLL_S = 0.0002


class Pending(Protocol):
    """Handle of a round that has been sent."""

    def is_done(self) -> bool:
        """Return whether the output is there."""

    def wait(self, timeout_s: float) -> Array:
        """Return the output; raise if it has not arrived after ``timeout_s`` seconds."""


# Starts a round, given its name and process set, without waiting.
Send = Callable[[Round, str, Any], Pending]


def no_answer(what: str, timeout_s: float) -> str:
    """Return the error message for an exchange in which some rank does not take part."""
    return (
        f"{what} got no answer from all ranks in {timeout_s:.0f} s: a rank has died, runs without "
        "this compressor, skips this exchange, or made its compressors in another order. Look at "
        "the other ranks' output; if one is only slow, raise timeout_s"
    )


class Slot(NamedTuple):
    """Position of a compressed tensor: its bucket, and its index there."""

    bucket: int
    position: int  # among the bucket's tensors


class StepPipeline:
    """Pipeline of a step: encodes, sends and decodes each bucket of ``engine`` once.

    ``send(round, bucket, number)`` starts a bucket's round without waiting. ``timeout_s``: how long
    to wait for a round. Times in seconds since the start: ``wait_s`` and ``encode_wait_s``, in
    which the training thread waited for rounds and for encodings; ``encode_hidden_s``, encoding
    that overlapped with the backward pass, before the last gradient of its step. The caller sets
    ``last_came`` to the time of each gradient. ``advance`` does nothing while ``encoding`` and
    ``inner`` are empty.

    Only the training thread calls methods and sends. The worker runs one ``Work`` at a time, in the
    order in which buckets were complete, so that the engine is used by one thread. ``finish``
    raises an error of the worker unchanged. The gradients of a step must not change before
    ``finish`` returns or ``abandon`` is called.
    """

    def __init__(
        self, engine: Engine, send: Callable[[Round, int, int], Pending], timeout_s: float
    ) -> None:
        self._engine = engine
        self._send = send
        self._timeout_s = timeout_s
        self.wait_s = self.encode_wait_s = self.encode_hidden_s = 0.0
        # The thread starts with the first bucket, holds no reference to this object and ends with
        # it. An exiting interpreter waits for it, but not for long: it never waits for other ranks.
        self._worker = ThreadPoolExecutor(1, "fftcomp-encode")
        self._number = [0 for _ in engine.buckets]  # number of each bucket's current round
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
            arrived[index] if index in arrived else np.zeros(math.prod(tensor.shape), np.float32)
            for index, tensor in enumerate(self._engine.buckets[bucket].tensors)
        ]
        self._number[bucket] = 0
        self._encode(bucket, self._engine.prepare(bucket, grads))

    def advance(self) -> None:
        """Send encoded rounds, and start encoding after completed rounds; do not wait."""
        for bucket, encoding in list(self.encoding.items()):
            if not encoding.done() or encoding.exception() is not None:
                break  # ``finish`` raises errors: raised here, in a hook, they depend on timing
            del self.encoding[bucket]
            self._submit(bucket, encoding.result())
        for bucket in sorted(self.inner):
            if self._pending[bucket].is_done():
                self._receive(bucket)

    def finish(self) -> None:
        """Complete the step; afterwards the engine has the sums.

        Raises the errors of encodings and of waits; pending work is cancelled first.
        """
        try:
            while self.encoding or self._pending:
                self.advance()
                done = (bucket for bucket, sent in self._pending.items() if sent.is_done())
                if (bucket := next(done, None)) is not None:
                    self._receive(bucket)
                elif self.encoding:
                    self._wait_for_encoding()
                elif self._pending:
                    self._receive(next(iter(self._pending)))
        except BaseException:
            self._drop_work()
            raise
        for began, ended in self._spans:
            self.encode_hidden_s += max(0.0, min(ended, self.last_came) - began)
        self._spans = []

    def abandon(self) -> None:
        """Discard the running step; waits for an encoding that is being computed."""
        self._drop_work()
        self._pending, self.inner, self._spans = {}, set(), []

    def _drop_work(self) -> None:
        for encoding in self.encoding.values():
            encoding.cancel()
        wait(self.encoding.values())
        self.encoding = {}

    def _encode(self, bucket: int, work: Work) -> None:
        if not self._engine.computes_on_device(bucket):
            self.encoding[bucket] = self._worker.submit(work.run)
            return
        self.encoding[bucket] = done = Future[Work]()
        self._computes = True  # the first call compiles kernels; GPU work is only launched
        try:
            done.set_result(work.run())
        except BaseException as error:
            done.set_exception(error)
        finally:
            self._computes = False

    def _submit(self, bucket: int, work: Work) -> None:
        round_ = self._engine.resume(bucket, work)
        assert isinstance(round_, Round)  # the last work of a bucket never goes to the worker
        self._spans.append((work.began, work.ended))
        number = self._number[bucket]
        self._pending[bucket] = self._send(round_, bucket, number)
        if number < len(self._engine.scheme(bucket).rounds) - 1:
            self.inner.add(bucket)

    def _receive(self, bucket: int) -> None:
        """Wait for a bucket's round; decode if it is the last one, else start the next encoding."""
        begin = time.perf_counter()
        output = self._pending.pop(bucket).wait(self._timeout_s)
        self.wait_s += time.perf_counter() - begin
        if bucket in self.inner:
            self.inner.remove(bucket)
            self._number[bucket] += 1
            self._encode(bucket, self._engine.prepare(bucket, output))
        else:
            self._computes = True
            try:
                self._engine.resume(bucket, output)
            finally:
                self._computes = False

    def _wait_for_encoding(self) -> None:
        """Wait for the worker's current work, or only briefly if rounds are pending too."""
        encoding = next(iter(self.encoding.values()))
        begin = time.perf_counter()
        wait([encoding], _POLL_S if self._pending else None)
        self.encode_wait_s += time.perf_counter() - begin
        if encoding.done():
            encoding.result()
