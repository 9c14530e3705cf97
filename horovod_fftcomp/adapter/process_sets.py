"""Horovod's process sets: their sizes, and those in which nodes and their leaders exchange."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from horovod.common import process_sets  # what all its frameworks have in common

from horovod_fftcomp.adapter import horovod_internals
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine.overlap import no_answer
from horovod_fftcomp.engine.policy import Scheduled
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.schemes.hierarchical import NodeLayout, Ranks

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def size_of(process_set: Any) -> int:
    """Return the number of ranks, at once.

    Horovod's own ``size()`` takes a lock that its thread holds as long as it exchanges anything.
    """
    return len(process_set.ranks)


def makers(policy: Scheduled, settings: Settings) -> Callable[[], Mapping[Ranks, Any]]:
    """Return what makes the sets of ``policy``, by their ranks; all ranks have to call it alike.

    Raises UnsupportedError where sets of nodes cannot be had.
    """
    if policy.ranks_per_node == 1:
        return dict
    if settings.process_set is not None and settings.process_set.process_set_id != 0:
        raise UnsupportedError("ranks_per_node counts all ranks of a job: leave process_set out")
    if os.environ.get(_DYNAMIC, "0") in ("", "0"):
        raise UnsupportedError(
            f"ranks_per_node needs a process set for each node: set {_DYNAMIC}=1 before hvd.init()"
        )
    if os.environ.get("HOROVOD_ELASTIC", "0") == "1":
        raise UnsupportedError("ranks_per_node cannot follow an elastic job: leave it out")
    return lambda: _made(policy.ranks_per_node, settings.timeout_s)


def _made(ranks_per_node: int, timeout_s: float) -> Mapping[Ranks, Any]:
    found: dict[Ranks, Any] = {}
    for ranks in NodeLayout(ranks_per_node, horovod_internals.n_ranks()).groups():
        # A second compressor has the sets of the first.
        number = horovod_internals.registered_process_sets().get(ranks)
        found[ranks] = process_sets.ProcessSet(list(ranks))
        if number is None:
            _add(found[ranks], timeout_s)
        else:
            found[ranks].process_set_id = number
    return found


def _add(process_set: Any, timeout_s: float) -> None:
    """Add a set, for which Horovod waits until all ranks do so."""
    errors: list[ValueError] = []

    def add() -> None:
        try:
            process_sets.add_process_set(process_set)
        except ValueError as error:
            errors.append(error)

    adding = threading.Thread(target=add, daemon=True)
    adding.start()
    adding.join(timeout_s)
    if errors:
        raise UnsupportedError(f"process set {process_set.ranks}: {errors[0]}")
    if process_set.process_set_id is None:
        raise UnsupportedError(no_answer(f"adding process set {process_set.ranks}", timeout_s))
