"""Thread of a compressor that runs functions in the order in which they were submitted."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Worker:
    """Daemon thread that runs functions one by one; it ends with this object.

    An executor's thread would be waited for when the interpreter exits, and a collective with a
    rank that has died may wait long.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._tasks,), name=name, daemon=True).start()
        # Not at exit, whose handlers may use it. (Typeshed gives the class no such slot.)
        weakref.finalize(self, self._tasks.put, None).atexit = False  # type: ignore[misc]

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Return the future of ``function(*arguments)``, which runs after all earlier ones."""
        future: Future[Any] = Future()
        self._tasks.put((future, function, arguments))
        return future


def _run(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # whoever waits for the future raises it
            future.set_exception(error)
        del task, future, function, arguments  # the thread keeps nothing alive while it waits
