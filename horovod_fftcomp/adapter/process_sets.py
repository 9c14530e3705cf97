"""Horovod process sets of nodes, and of ranks with the same place in all nodes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from horovod.common import process_sets  # shared by its frameworks

from horovod_fftcomp.adapter import horovod_internals
from horovod_fftcomp.adapter.settings import Settings, is_elastic
from horovod_fftcomp.adapter.stalls import no_answer
from horovod_fftcomp.adapter.threads import Worker
from horovod_fftcomp.engine.policy import Scheduled
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.schemes.hierarchical import NodeLayout, Ranks

_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def ranks_per_node(settings: Settings) -> int:
    """Return what "auto" stands for: the ranks of a host, or 1 in jobs that have no nodes."""
    is_part = settings.process_set is not None and settings.process_set.process_set_id != 0
    if is_part or is_elastic():
        return 1
    return horovod_internals.ranks_per_host()


def makers(policy: Scheduled, settings: Settings) -> Callable[[], Mapping[Ranks, Any]]:
    """Return a function that makes the process sets of ``policy``, keyed by their ranks.

    All ranks have to call that function. Raises UnsupportedError if Horovod cannot make process
    sets of nodes in this job.
    """
    if policy.node_size == 1:
        return dict
    if settings.process_set is not None and settings.process_set.process_set_id != 0:
        raise UnsupportedError("ranks_per_node counts all ranks of a job; leave process_set out")
    if os.environ.get(_DYNAMIC, "0") in ("", "0"):
        raise UnsupportedError(
            f"ranks_per_node needs a process set for each node; set {_DYNAMIC}=1 before hvd.init()"
        )
    if is_elastic():
        raise UnsupportedError("ranks_per_node is not supported in elastic jobs; leave it out")
    return functools.partial(_make_sets, policy.node_size, settings.timeout_s)


def _make_sets(ranks_per_node: int, timeout_s: float) -> Mapping[Ranks, Any]:
    sets: dict[Ranks, Any] = {}
    for ranks in NodeLayout(ranks_per_node, horovod_internals.n_ranks()).groups():
        # A second compressor uses the sets of the first.
        number = horovod_internals.registered_process_sets().get(ranks)
        sets[ranks] = process_sets.ProcessSet(list(ranks))
        if number is None:
            _add(sets[ranks], timeout_s)
        else:
            sets[ranks].process_set_id = number
    return sets


def _add(process_set: Any, timeout_s: float) -> None:
    """Register a process set with Horovod, which waits until all ranks do so."""
    adding = Worker("fftcomp-add").submit(process_sets.add_process_set, process_set)
    try:
        adding.result(timeout_s)
    except ValueError as error:
        what = f"Horovod cannot add process set {process_set.ranks}: {error}"
        raise UnsupportedError(what) from error
    except TimeoutError:
        what = f"adding process set {process_set.ranks}"
        raise UnsupportedError(no_answer(what, timeout_s)) from None
