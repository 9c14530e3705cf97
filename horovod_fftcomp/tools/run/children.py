"""Processes that a script starts by ``multiprocessing``: they run under ``run`` as the script does.

``torch.multiprocessing.spawn`` starts a training's ranks in this way. A process that exchanges
nothing, such as a worker that loads data, imports no more than this module and reports nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import secrets
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from horovod_fftcomp.tools.run.import_hook import install


class RunSettings(NamedTuple):
    """How to compress, and what to report: values that another process can read.

    ``label`` and ``text``: of the recipe ``name``, see ``RecipeChoice``. ``options``: of recipe and
    compressor. ``n_steps``: after which the script ends. ``reported``: file that a process makes
    which reports its steps.
    """

    label: str
    text: str
    name: str
    options: dict[str, Any]
    n_steps: int | None
    as_json: bool
    reported: Path


def new_path() -> Path:
    """Return a path for the settings' ``reported``."""
    return Path(tempfile.gettempdir()) / f"fftcomp-run-{secrets.token_hex(8)}"


def follow(settings: RunSettings) -> None:
    """Let processes started from now on run with ``settings``.

    One whose class has a ``run`` of its own stays as it is.
    """
    plain = BaseProcess.start

    @functools.wraps(plain)
    def start(child: Any) -> None:
        if child._target is not None:
            child._target = functools.partial(_call, settings, child._target)
        plain(child)

    BaseProcess.start = start  # type: ignore[method-assign, assignment]


def _call(settings: RunSettings, target: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Call the target of a process; report its steps, if it takes any."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def report() -> Any:
            command = importlib.import_module("horovod_fftcomp.cli.run")
            return stack.enter_context(command.ScriptReport(settings))

        install(settings.name, settings.options, lambda made: report().steps.watch(made))
        target(*arguments, **named)
