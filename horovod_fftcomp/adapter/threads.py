"""Threads of a compressor, and rounds that they carry out."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from horovod_fftcomp.adapter.stalls import no_answer
from horovod_fftcomp.errors import ConfigMismatchError
from horovod_fftcomp.types import Array

_LOOK_S = 0.25  # how often a wait looks whether to give up
_PATIENCE_S = 5.0  # how long an exit waits for a thread to free what it has kept

_freeing: list[None] = []  # one for each thread that frees what it has kept
_exits = threading.Event()
os.register_at_fork(after_in_child=_freeing.clear)


@atexit.register
def _end_freeing() -> None:
    """Let no worker free what it has kept from now on.

    A destructor that lets go of the GIL and wants it back while the interpreter ends aborts.
    """
    limit = time.monotonic() + _PATIENCE_S
    _exits.set()
    while _freeing and time.monotonic() < limit:
        time.sleep(0.01)


_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Worker:
    """Daemon thread that runs functions one by one, and keeps ``kept``; it ends with this object.

    When the interpreter exits, ``kept`` is not freed any more.

    An executor's thread would be waited for when the interpreter exits, and a collective with a
    rank that has died may wait long.
    """

    def __init__(self, name: str, kept: object = None) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        given = self._tasks, [kept]
        threading.Thread(target=_run, args=given, name=name, daemon=True).start()
        # Not at exit, whose handlers may use it. (Typeshed gives the class no such slot.)
        weakref.finalize(self, self._tasks.put, None).atexit = False  # type: ignore[misc]

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Return the future of ``function(*arguments)``, which runs after all earlier ones."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, arguments))
        return future


class ThreadRound:
    """Round that a thread carries out; ``output``: the future of its output.

    ``converted`` is called with the output, by the thread that waits; waits fail from when
    ``aborted`` is set.
    """

    def __init__(
        self,
        output: Future[Array],
        name: str,
        aborted: threading.Event | None = None,
        converted: Callable[[Array], Any] = lambda output: output,
    ) -> None:
        self._output, self._name, self._converted = output, name, converted
        self._aborted = aborted or threading.Event()
        self.is_done = output.done

    def wait(self, timeout_s: float) -> Any:
        """Return the output; raise the error of the round.

        Raises ConfigMismatchError if it is not there after ``timeout_s`` seconds.
        """
        limit = time.monotonic() + timeout_s
        while not self.is_done():
            if self._aborted.is_set() or time.monotonic() > limit:
                raise ConfigMismatchError(no_answer(repr(self._name), timeout_s))
            with contextlib.suppress(TimeoutError):  # of this look
                self._output.exception(min(timeout_s, _LOOK_S))
        return self._converted(self._output.result())


def _run(tasks: queue.SimpleQueue[_Task | None], kept: list[object]) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # whoever waits for the future raises it
            future.set_exception(error)
        del task, future, function, arguments  # the thread keeps nothing alive while it waits
    _freeing.append(None)
    is_late = _exits.is_set()
    if not is_late:
        kept.clear()
    _freeing.pop()
    if is_late:
        threading.Event().wait()
