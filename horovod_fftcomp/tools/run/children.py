"""Processes that a script starts by ``multiprocessing``: they run under ``run`` as the script does.

``torch.multiprocessing.spawn`` starts a training's ranks in this way. A worker that loads data
exchanges nothing, and so reports nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_started = 0


def follow(within: Callable[..., Any]) -> None:
    """Call ``within(target, *args)`` in processes started from now on, in place of the target.

    ``within``: can be pickled. A process whose class has a ``run`` of its own stays as it is.
    """
    plain = BaseProcess.start

    @functools.wraps(plain)
    def start(child: Any) -> None:
        global _started
        if child._target is not None:
            child._target = functools.partial(within, child._target)
            _started += 1
        plain(child)

    BaseProcess.start = start  # type: ignore[method-assign, assignment]


def n_started() -> int:
    """Return how many processes have been started so."""
    return _started
