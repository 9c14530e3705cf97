"""Thread pool of the CPU kernels, and its number of threads.

Python threads suffice, since kernels release the GIL. Unlike OpenMP's pool, this one may be used
from several threads at once, and beside a framework's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar("Result")

_LOCAL_SIZE = (
    "LOCAL_WORLD_SIZE",  # of torchrun, which Slurm may have started
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",  # such as 4(x2),3: that of the first node
)
_MOST = 8  # more threads gain nothing: the kernels are limited by memory bandwidth

_FENV_NBYTES = 64  # enough for fenv_t of any processor; 32 on x86-64
_DEFAULT_FENV = ctypes.c_void_p(-1)  # FE_DFL_ENV
_libm = ctypes.CDLL("libm.so.6")

chosen_threads: int | None = None
_own = threading.local()


def set_num_threads(count: int) -> None:
    """Set the number of threads that this process compresses with, from the next call on."""
    global chosen_threads
    if type(count) is not int or count < 1:
        raise ValueError(f"the number of threads must be a whole number from 1 up, got {count!r}")
    chosen_threads = count


def get_num_threads() -> int:
    """Return the number of threads that this process compresses with.

    Default: ``get_own_cores()``, at most 8.
    """
    return min(_MOST, get_own_cores()) if chosen_threads is None else chosen_threads


@functools.cache
def get_own_cores() -> int:
    """Return the number of cores per process, at least 1.

    The cores that this process may use, divided by the number of processes that the launcher has
    started on this machine; as they were at the first call, or when the last compressor was made.
    """
    return max(1, len(os.sched_getaffinity(0)) // get_local_size())


def get_local_size() -> int:
    """Return the number of processes that the launcher has started on this machine, or 1."""
    found = next((os.environ[name] for name in _LOCAL_SIZE if name in os.environ), "1")
    return max(1, int(re.split("[(,]", found)[0]))


def ranges(n_items: int, least: int) -> list[tuple[int, int]]:
    """Split ``range(n_items)`` into consecutive (begin, end), one for each thread.

    There are fewer, but at least one, if they would hold fewer than ``least`` items.
    """
    parts = max(1, min(get_num_threads(), n_items // least))
    return list(itertools.pairwise(n_items * part // parts for part in range(parts + 1)))


def each(work: Callable[..., Result], arguments: Iterable[tuple]) -> list[Result]:
    """Return the list of ``work(*argument)`` for ``arguments``; the calls run in parallel.

    One after another in a thread of the pool, which might otherwise wait for itself. All have ended
    when this returns or raises: they may write to memory of the caller.
    """
    first, *others = arguments
    if not others or getattr(_own, "is_of_pool", False):
        return [work(*argument) for argument in (first, *others)]
    pool = _pool(get_num_threads())
    futures = [pool.submit(work, *argument) for argument in others]
    try:
        return [work(*first), *(future.result() for future in futures)]
    finally:
        wait(futures)


@contextlib.contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """Context in which this thread computes with denormal numbers, as IEEE 754 defines.

    TensorFlow's threads flush them to zero, and so do others after ``torch.set_flush_denormal``;
    bytes must not depend on the thread.
    """
    before = ctypes.create_string_buffer(_FENV_NBYTES)
    _libm.fegetenv(before)
    _libm.fesetenv(_DEFAULT_FENV)
    try:
        yield
    finally:
        _libm.fesetenv(before)


@functools.lru_cache(1)
def _pool(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, "fftcomp-kernel", _begin)


def _begin() -> None:
    _libm.fesetenv(_DEFAULT_FENV)  # a thread inherits that of the one that starts it
    _own.is_of_pool = True


# A forked child has its parent's pool but not its threads: submitted work would never run.
os.register_at_fork(after_in_child=_pool.cache_clear)
os.register_at_fork(after_in_child=get_own_cores.cache_clear)
