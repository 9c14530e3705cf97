"""A step's buckets on their way, while the step goes on: one thread encodes, another trains.

Gradients come in one by one; a bucket that is complete is encoded in a thread of its own, and what
comes out is handed to whoever owns a network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovod_fftcomp.engine.engine import Engine, Result, Work
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array

# While a round may come in as well, that is how long an encoding is waited for at a time.
_POLL_S = 0.0002


class Pending(Protocol):
    """A round that has been sent."""

    def is_done(self) -> bool:
        """Tell whether the output is there."""
        ...

    def wait(self, timeout_s: float) -> Array:
        """Return the output; raise if it has not come after ``timeout_s`` seconds."""
        ...


# Starts a round that is known by a name, between the ranks of a process set, and does not wait.
Send = Callable[[Round, str, Any], Pending]


def no_answer(what: str, timeout_s: float) -> str:
    """Return the message on an exchange in which some rank does not take part."""
    return (
        f"{what} got no answer from all ranks in {timeout_s:.0f} s: a rank has died, runs without "
        "this compressor, skips this exchange, or made its compressors in another order. Look at "
        "the other ranks' output; if one is only slow, raise timeout_s"
    )


class Slot(NamedTuple):
    """Where a compressed tensor's gradient goes."""

    bucket: int
    position: int  # among the bucket's tensors


class _Inline(Executor):
    """Runs work at once: what a GPU computes is only launched, on the stream of the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class StepPipeline:
    """The buckets of ``engine``, each exchanged once a step.

    ``send(round, bucket, number)`` starts a bucket's round and does not wait. ``timeout_s``: how
    long a round is waited for. In seconds since the start: ``wait_s`` and ``encode_wait_s``, how
    long the thread that trains has waited for rounds and for encodings; ``encode_hidden_s``, the
    encoding that passed before the last gradient of its step came.

    All methods are called by the thread that trains, and only it sends. The worker runs one
    ``Work`` after the other, in the order in which the buckets were complete, so the engine is in
    one thread's hands. An error in the worker is raised by ``finish``, as it was. The gradients
    of a step must not change before ``finish`` returns or ``abandon`` is called.
    """

    def __init__(
        self, engine: Engine, send: Callable[[Round, int, int], Pending], timeout_s: float
    ) -> None:
        self._engine = engine
        self._send = send
        self._timeout_s = timeout_s
        self.wait_s = self.encode_wait_s = self.encode_hidden_s = 0.0
        # Its thread begins with the first bucket, keeps no reference to us and ends with us. An
        # interpreter that exits waits for it; since it never waits for other ranks, not for long.
        self._worker = ThreadPoolExecutor(1, "fftcomp-encode")
        self._arrived: list[dict[int, Array | None]] = [{} for _ in engine.buckets]
        self._number = [0 for _ in engine.buckets]  # of each bucket's present round
        self._encoding: dict[int, Future[Result]] = {}  # by bucket, in the worker's order
        self._pending: dict[int, Pending] = {}  # by bucket, in the order in which they were sent
        self._inner: set[int] = set()  # those whose pending round is not their last
        self._computes = False
        self._last_came = 0.0  # when a gradient of this step came last
        self._spans: list[tuple[float, float]] = []  # when this step's encodings began and ended

    @property
    def is_computing(self) -> bool:
        """Whether something is being encoded or decoded; another thread may ask."""
        return self._computes or any(not work.done() for work in list(self._encoding.values()))

    def note_gradient(self) -> None:
        """Note that a gradient comes, be it one that is exchanged elsewhere."""
        self._last_came = time.perf_counter()

    def add(self, slot: Slot, grad: Array | None) -> None:
        """Take a gradient, flat float32; None for that of a frozen parameter."""
        arrived = self._arrived[slot.bucket]
        arrived[slot.position] = grad
        if len(arrived) == len(self._engine.buckets[slot.bucket].tensors):
            self._start(slot.bucket)

    def complete(self) -> None:
        """Take zeros for the gradients that are missing in buckets that are not complete.

        A bucket that got no gradient at all is left out of this step.
        """
        for bucket, arrived in enumerate(self._arrived):
            if arrived:
                self._start(bucket)

    def advance(self) -> None:
        """Send what is encoded, and encode what follows on rounds that are done; do not wait."""
        for bucket, encoding in list(self._encoding.items()):
            if not encoding.done() or encoding.exception() is not None:
                break  # errors are for ``finish``: inside a hook they would depend on the timing
            del self._encoding[bucket]
            self._submit(bucket, encoding.result())
        for bucket in sorted(self._inner):
            if self._pending[bucket].is_done():
                self._receive(bucket)

    def finish(self) -> None:
        """Run what is left of the step; then the engine has the sums.

        Raises what an encoding has raised, and what waits raise. No work is then left behind.
        """
        try:
            self.complete()
            while self._encoding or self._pending:
                self.advance()
                done = (bucket for bucket, sent in self._pending.items() if sent.is_done())
                if (bucket := next(done, None)) is not None:
                    self._receive(bucket)
                elif self._encoding:
                    self._wait_for_encoding()
                elif self._pending:
                    self._receive(next(iter(self._pending)))
        except BaseException:
            self._drop_work()
            raise
        for began, ended in self._spans:
            self.encode_hidden_s += max(0.0, min(ended, self._last_came) - began)
        self._spans = []

    def abandon(self) -> None:
        """Forget a step that was broken off; waits for an encoding that is being computed."""
        self._drop_work()
        self._arrived = [{} for _ in self._arrived]
        self._pending, self._inner, self._spans = {}, set(), []

    def _drop_work(self) -> None:
        for encoding in self._encoding.values():
            encoding.cancel()
        wait(self._encoding.values())
        self._encoding = {}

    def _start(self, bucket: int) -> None:
        arrived, tensors = self._arrived[bucket], self._engine.buckets[bucket].tensors
        grads = [
            arrived[index] if index in arrived else np.zeros(math.prod(tensor.shape), np.float32)
            for index, tensor in enumerate(tensors)
        ]
        self._arrived[bucket], self._number[bucket] = {}, 0
        self._encode(bucket, self._engine.begin(bucket, grads))

    def _encode(self, bucket: int, work: Work) -> None:
        if not self._engine.computes_on_device(bucket):
            self._encoding[bucket] = self._worker.submit(work)
            return
        self._computes = True  # compiles kernels, at first
        try:
            self._encoding[bucket] = _Inline().submit(work)
        finally:
            self._computes = False

    def _submit(self, bucket: int, result: Result) -> None:
        round_ = self._engine.accept(result)
        assert round_ is not None  # the last work of a bucket never goes to the worker
        self._spans.append((result.began, result.ended))
        number = self._number[bucket]
        self._pending[bucket] = self._send(round_, bucket, number)
        if number < len(self._engine.scheme(bucket).rounds) - 1:
            self._inner.add(bucket)

    def _receive(self, bucket: int) -> None:
        """Wait for a bucket's round; decode the last one, and encode what follows on another."""
        begin = time.perf_counter()
        output = self._pending.pop(bucket).wait(self._timeout_s)
        self.wait_s += time.perf_counter() - begin
        if bucket in self._inner:
            self._inner.remove(bucket)
            self._number[bucket] += 1
            self._encode(bucket, self._engine.proceed(bucket, output))
        else:
            self._computes = True
            try:
                self._engine.advance(bucket, output)
            finally:
                self._computes = False

    def _wait_for_encoding(self) -> None:
        """Wait for the worker's present work, or until a round may have come in."""
        encoding = next(iter(self._encoding.values()))
        begin = time.perf_counter()
        wait([encoding], _POLL_S if self._pending else None)
        self.encode_wait_s += time.perf_counter() - begin
        if encoding.done():
            encoding.result()
