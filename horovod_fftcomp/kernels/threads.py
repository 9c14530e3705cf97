"""The threads that kernels on a CPU share out their work to, and how many there are.

A pool of Python threads serves, since kernels release the GIL; unlike OpenMP's it may be called
from several threads at once and survives beside any framework's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_LOCAL_SIZE = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_MOST = 8  # more do not get more out of a memory

_FENV_NBYTES = 64  # enough for fenv_t of any processor; 32 on x86-64
_DEFAULT_FENV = ctypes.c_void_p(-1)  # FE_DFL_ENV
_libm = ctypes.CDLL("libm.so.6")

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

    Unless set: its cores, but at most 8.
    """
    return min(_MOST, get_own_cores()) if _num_threads is None else _num_threads


def get_own_cores() -> int:
    """Return how many cores this process has for itself, at least 1.

    Those that it may use, divided by the number of processes that the launcher has started on this
    machine.
    """
    return max(1, len(os.sched_getaffinity(0)) // get_local_size())


def get_local_size() -> int:
    """Return how many processes the launcher has started on this machine; 1 without one."""
    return max(1, next((int(os.environ[name]) for name in _LOCAL_SIZE if name in os.environ), 1))


def ranges(n_items: int, least: int) -> list[tuple[int, int]]:
    """Return consecutive (begin, end) that make up ``range(n_items)``, one for each thread.

    There are fewer where they would hold fewer than ``least`` items, but at least one.
    """
    parts = n_items // least
    if parts < 2:
        return [(0, n_items)]  # soon, as there are many small tensors
    parts = min(get_num_threads(), parts)
    return list(itertools.pairwise(n_items * part // parts for part in range(parts + 1)))


def each(work: Callable[..., Result], arguments: Iterable[tuple]) -> list[Result]:
    """Return ``work(*argument)`` for each of ``arguments``, in order; all at the same time."""
    first, *others = arguments
    if not others:
        return [work(*first)]
    pool = _get_pool()
    futures = [pool.submit(work, *argument) for argument in others]
    return [work(*first), *(future.result() for future in futures)]


@contextlib.contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """Let this thread compute with denormal numbers meanwhile, as IEEE 754 has it.

    TensorFlow's threads flush them to zero, and others where ``torch.set_flush_denormal`` was
    called; bytes must not depend on the thread.
    """
    before = ctypes.create_string_buffer(_FENV_NBYTES)
    _libm.fegetenv(before)
    _libm.fesetenv(_DEFAULT_FENV)
    try:
        yield
    finally:
        _libm.fesetenv(before)


def _get_pool() -> ThreadPoolExecutor:
    global _pool
    pool = _pool
    if pool is None:
        # Threads begin with the settings of the one that starts them.
        pool = _pool = ThreadPoolExecutor(
            get_num_threads(), "fftcomp-kernel", _libm.fesetenv, (_DEFAULT_FENV,)
        )
    return pool


def _forget_pool() -> None:
    global _pool
    _pool = None


# A forked child has its parent's pool but not its threads: what it submitted would never be done.
os.register_at_fork(after_in_child=_forget_pool)
