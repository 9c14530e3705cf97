"""The threads that kernels on a CPU share out their work to, and how many there are.

A pool of Python threads serves, since kernels release the GIL; unlike OpenMP's it may be called
from several threads at once and survives beside any framework's own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_LOCAL_SIZE = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

_num_threads: int | None = None
_pool: ThreadPoolExecutor | None = None


def set_num_threads(count: int) -> None:
    """Let this process compress and decompress with ``count`` threads, from the next call on."""
    global _num_threads, _pool
    if type(count) is not int or count < 1:
        raise ValueError(f"the number of threads must be a whole number from 1, got {count!r}")
    _num_threads, _pool = count, None


def get_num_threads() -> int:
    """Return how many threads this process compresses with.

    Unless set: the cores that the process may use, divided by the number of processes that the
    launcher has started on this machine.
    """
    if _num_threads is not None:
        return _num_threads
    cores = len(os.sched_getaffinity(0))
    local_size = next((int(os.environ[name]) for name in _LOCAL_SIZE if name in os.environ), 1)
    return max(1, cores // max(1, local_size))


def share_out(n_items: int, least: int, work: Callable[[int, int], Result]) -> list[Result]:
    """Return ``work(begin, end)`` of consecutive ranges that make up ``range(n_items)``, in order.

    There are as many ranges as threads, or fewer where they would hold fewer than ``least`` items.
    """
    global _pool
    parts = max(1, min(get_num_threads(), n_items // max(least, 1)))
    if parts == 1:
        return [work(0, n_items)]
    if _pool is None:
        _pool = ThreadPoolExecutor(get_num_threads(), "fftcomp-kernel")
    bounds = [n_items * part // parts for part in range(parts + 1)]
    others = [_pool.submit(work, *pair) for pair in itertools.pairwise(bounds[1:])]
    first = work(bounds[0], bounds[1])
    return [first, *(future.result() for future in others)]
