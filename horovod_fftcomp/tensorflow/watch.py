"""Ends a job whose ranks have lost each other: an operation of TensorFlow cannot be given up."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from typing import Any

import horovod.tensorflow as hvd
from tensorflow.python.eager.execute import quick_execute

from horovod_fftcomp.exchanges import no_answer

_LOOK_S = 0.5
# Two threads in ``hvd.shutdown`` at once hang; Horovod calls it when the interpreter exits.
_shutting_down = threading.Lock()


class Watch:
    """Notes what is under way, and ends the job if for ``timeout_s`` seconds no answer comes.

    ``steps`` has ``broken_by``, which is then set. Shutting Horovod down is all that ends an
    operation that waits for other ranks; it then fails on all ranks, below our message.
    """

    def __init__(self, steps: Any, timeout_s: float) -> None:
        self._steps = weakref.ref(steps)
        self._timeout_s = timeout_s
        self._out = 0
        self._last = ""
        self._since = 0.0
        self._thread: threading.Thread | None = None

    def sent(self, what: str) -> None:
        """Note that something is under way."""
        self._out, self._last, self._since = self._out + 1, what, time.monotonic()
        if self._thread is None:
            atexit.register(_await_shutdown)  # later than Horovod's, so it is called first
            self._thread = threading.Thread(
                target=_look, args=(weakref.ref(self),), name="fftcomp-watch", daemon=True
            )
            self._thread.start()

    def answered(self) -> None:
        """Note that an answer came."""
        self._out, self._since = max(0, self._out - 1), time.monotonic()

    def rest(self) -> None:
        """Expect nothing any more."""
        self._out = 0

    def look(self) -> None:
        """End the job if the time is over."""
        steps = self._steps()
        if steps is None or not self._out or not steps.lock.acquire(blocking=False):
            return  # who holds the lock is at work in a step
        try:
            if not _is_tensorflow_running():  # an error elsewhere has ended the step
                self.rest()
        finally:
            steps.lock.release()
        if not self._out or time.monotonic() - self._since < self._timeout_s:
            return
        message = "ConfigMismatchError: " + no_answer(repr(self._last), self._timeout_s)
        self._out, steps.broken_by = 0, message
        print(message, file=sys.stderr, flush=True)
        with _shutting_down:
            hvd.shutdown()


def _await_shutdown() -> None:
    with _shutting_down:
        pass


def _is_tensorflow_running() -> bool:
    """Tell whether a thread waits for TensorFlow.

    What is below another thread's uppermost frame is not looked at: if TensorFlow's threads run
    meanwhile, CPython 3.11 may read frames that are gone, and crash.
    """
    frames = sys._current_frames().values()
    return any(frame.f_code is quick_execute.__code__ for frame in frames)


def _look(reference: weakref.ref[Watch]) -> None:
    while (watch := reference()) is not None:
        watch.look()
        del watch
        time.sleep(_LOOK_S)
