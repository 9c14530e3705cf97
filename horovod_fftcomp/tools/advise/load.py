"""How busy other processes keep the cores of a job."""

from __future__ import annotations

import os
import socket
import time

import numpy as np

from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import fnv1a

_LOOK_S = 1.0


def look() -> Array:
    """Sleep for a second; return what this rank saw of its cores meanwhile, int64.

    A number of the cores it may use, and nanoseconds: that there were on them, that any process
    used, that this one used.
    """
    cores = sorted(os.sched_getaffinity(0))
    before, own, began = _busy_ns(cores), time.process_time_ns(), time.monotonic_ns()
    time.sleep(_LOOK_S)
    there = len(cores) * (time.monotonic_ns() - began)
    which = fnv1a(f"{socket.gethostname()} {cores}") >> 1
    return np.array([which, there, _busy_ns(cores) - before, time.process_time_ns() - own])


def share_of_others(looks: Array) -> float:
    """Return the share of the cores that processes other than ranks used, where it is largest.

    ``looks``: of all ranks, at the same time, ``[ranks, 4]``.
    """
    shares = [0.0]
    for which in np.unique(looks[:, 0]):
        _, there, busy, own = looks[looks[:, 0] == which].T
        shares.append(float((busy.max() - own.sum()) / there.max()))
    return max(shares)


def _busy_ns(cores: list[int]) -> int:
    """Return the time that ``cores`` have been busy since they started; other guests' included."""
    ticks = 0
    with open("/proc/stat", encoding="ascii") as stat:
        for line in stat:
            name, *times = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
                user, nice, system, _idle, _wait, *others = map(int, times[:8])
                ticks += user + nice + system + sum(others)
    return ticks * (10**9 // os.sysconf("SC_CLK_TCK"))
