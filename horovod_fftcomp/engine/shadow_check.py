"""Shadow check: compares a GPU's results with the CPU's during training, one tensor at a time.

``shadow_steps`` recomputes and compares; this module selects the tensors, and exchanges the results
between all ranks.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Send, Slot
from horovod_fftcomp.engine.shadow_steps import Seen, Twin, followed
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels.threads import ieee_arithmetic
from horovod_fftcomp.schemes import Round, Scheme
from horovod_fftcomp.types import Array

# A check is repeated for this many steps while steps are skipped or run on the host: a loss scale
# takes as long to settle, or `hard_threshold` to calibrate its threshold.
_PATIENCE = 128
_RECORD_NBYTES = 1024  # size of a rank's report: a status byte and a text in UTF-8
_SAME, _AGAIN, _DIFFERS = range(3)


class ShadowCheck:
    """In each ``every``-th step the CPU recomputes one tensor of ``engine``, in rotation.

    A step is: ``begin``, the exchange of each bucket, and ``finish``. If the caller cannot wait for
    other ranks in ``finish``, an allgather of the next step carries the report instead:
    ``with_record`` and ``without_record``. All ranks check the same tensor, and raise the same
    UnsupportedError if a rank finds a difference.
    """

    def __init__(
        self, engine: Engine, every: int, send: Send, name: str, process_set: Any, timeout_s: float
    ) -> None:
        self._engine, self._every = engine, every
        self._send, self._name, self._set = send, f"{name}.shadow", process_set
        self._timeout_s = timeout_s
        engine.follow = self.followed
        self._greetings, self._next = -1, 0  # _next: first step at which a check is due
        self.turn: Slot | None = None
        self._step = 0  # step of the last check
        self._seen: Seen | None = None
        self._is_hosts = False
        self._record: Array | None = None  # report of the last step's check, sent in this one
        self._own_nbytes = 0  # size of the message before it
        self.seconds = 0.0  # total time spent here, for stats

    def begin(self, greetings: int) -> None:
        """Begin a step; a changed ``greetings`` (number of handshakes) makes a check due."""
        step = self._engine.step
        if greetings != self._greetings:
            self._greetings, self._next, self.turn, self._record = greetings, step, None, None
        if self.turn is not None:
            self._record = self._compared()
        if self._record is not None or step < self._next:
            return
        if turns := self._turns(step):
            self.turn, self._step = turns[step // self._every % len(turns)], step
            self._seen, self._is_hosts = None, False
        else:
            self._next = step + 1

    def _turns(self, step: int) -> list[Slot]:
        """Return all tensors that the GPU compresses in a step.

        Except with scope "model", and in sharded exchanges, whose pieces are not tensors.
        """
        return [
            Slot(number, position)
            for number, bucket in enumerate(self._engine.buckets)
            if step >= bucket.policy.warmup_steps
            and bucket.policy.scope != "model"
            and "alltoall" not in self._engine.scheme(number).rounds
            and self._engine.scheme(number).runs_on_device(bucket.tensors)
            for position in range(len(bucket.tensors))
        ]

    def followed(self, bucket: int, scheme: Scheme) -> Scheme:
        """Return ``scheme``, wrapped to record its exchange if ``bucket`` is checked."""
        if self.turn is None or self.turn.bucket != bucket:
            return scheme
        return followed(scheme, self.turn.position, self._note)

    def _note(self, seen: Seen | None) -> None:
        self._seen, self._is_hosts = seen, seen is None

    def finish(self) -> None:
        """End a step; raise UnsupportedError on all ranks if any rank found a difference."""
        if self.turn is None:
            return
        record = self._compared()
        own = np.array([record[0] == _DIFFERS, record[0] == _AGAIN], np.float32)
        differ, again = self._exchanged(Round("allreduce", own))  # hvd.join() allows this
        if differ:
            self._read(self._exchanged(Round("allgather", record)))
        self._plan(bool(again))

    def _exchanged(self, round_: Round) -> Array:
        name = f"{self._name}.{round_.collective}"
        return self._send(round_, name, self._set).wait(self._timeout_s)

    def with_record(self, message: Array) -> Array:
        """Return a message, uint8, with the report of the last step's check appended, if any."""
        self._own_nbytes = message.size
        return message if self._record is None else np.concatenate([message, self._record])

    def without_record(self, gathered: Array) -> Array:
        """Return all ranks' messages without the reports; raises as ``finish`` does."""
        if self._record is None:
            return gathered
        rows = gathered.reshape(-1, self._own_nbytes + _RECORD_NBYTES)
        self._record = None
        self._plan(self._read(rows[:, self._own_nbytes :]))
        return rows[:, : self._own_nbytes].reshape(-1)

    def _plan(self, again: bool) -> None:
        if not again or self._step - self._next >= _PATIENCE:
            self._next = (self._step // self._every + 1) * self._every

    def _compared(self) -> Array:
        """Compare the checked tensor with the CPU's result; return this rank's report."""
        begin, slot, seen = time.perf_counter(), self.turn, self._seen
        assert slot is not None
        self.turn = self._seen = None
        status, text = _AGAIN if self._is_hosts else _SAME, ""
        if seen is not None:
            with ieee_arithmetic():
                twin = Twin(seen)
                found = twin.first_difference()
            status = _SAME if twin.is_finite else _AGAIN
            if found is not None:
                policy = self._engine.buckets[slot.bucket].policy
                recipe = getattr(policy, "recipe", seen.scheme)
                where = f"rank {self._engine.rank}, step {seen.context.step}, recipe {recipe!r}"
                status, text = _DIFFERS, f"{where}, tensor {found.tensors}: {found.what}"
        record = np.zeros(_RECORD_NBYTES, np.uint8)
        told = np.frombuffer(text.encode()[: _RECORD_NBYTES - 1], np.uint8)
        record[0], record[1 : 1 + told.size] = status, told
        self.seconds += time.perf_counter() - begin
        return record

    def _read(self, records: Array) -> bool:
        """Raise if any rank's report has a difference; return whether to repeat the check."""
        rows = records.reshape(-1, _RECORD_NBYTES)
        texts = [
            bytes(row[1:]).rstrip(b"\0").decode(errors="ignore")
            for row in rows
            if row[0] == _DIFFERS
        ]
        if texts:
            raise UnsupportedError(
                f"a GPU computes otherwise than the CPU from the same inputs: {'; '.join(texts)}. "
                "Either the GPU is faulty or a kernel is wrong on it. Set HOROVOD_FFTCOMP_GPU=0 "
                "on all ranks to compress on the host, resume from the last checkpoint, and report "
                "this with the model of the GPU and the versions of its driver and CuPy"
            )
        return bool((rows[:, 0] == _AGAIN).any())
