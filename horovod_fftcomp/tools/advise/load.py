"""How busy other processes keep the cores of a job."""

from __future__ import annotations

import os
import socket
import time

import numpy as np

from horovod_fftcomp.tools import environment
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire import fnv1a

LOOK_S = 1.0


def look() -> Array:
    """Sleep for a second; return what this rank saw of its cores meanwhile, int64.

    A number of the cores it may use, and nanoseconds: that there were on them, that any process
    used, that this one used.
    """
    which = fnv1a(f"{socket.gethostname()} {sorted(os.sched_getaffinity(0))}") >> 1
    others_s, own, began = environment.other_busy_s(), time.process_time_ns(), time.monotonic_ns()
    time.sleep(LOOK_S)
    there = environment.n_cores() * (time.monotonic_ns() - began)
    own = time.process_time_ns() - own
    return np.array([which, there, int(1e9 * (environment.other_busy_s() - others_s)) + own, own])


def share_of_others(looks: Array) -> float:
    """Return the share of the cores that processes other than ranks used, where it is largest.

    ``looks``: of all ranks, at the same time, ``[ranks, 4]``.
    """
    shares = [0.0]
    for which in np.unique(looks[:, 0]):
        _, there, busy, own = looks[looks[:, 0] == which].T
        shares.append(float((busy.max() - own.sum()) / there.max()))
    return max(shares)
