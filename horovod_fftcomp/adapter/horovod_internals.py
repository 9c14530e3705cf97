"""Private parts of Horovod that both adapters rely on, and a check of its version."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from types import FrameType

from horovod.common import process_sets

from horovod_fftcomp.errors import warn

TESTED = "0.28"


@functools.cache  # one warning for all adapters of a process
def check_version() -> None:
    """Warn once if the installed version of Horovod is not ``TESTED``.

    The functions of this module and of each adapter's ``horovod_internals`` rely on private parts
    of Horovod, which can change in any version.
    """
    from horovod import __version__ as version

    if not version.startswith(f"{TESTED}."):
        warn(
            f"Horovod {version} is installed, but horovod_fftcomp relies on private parts of "
            f"Horovod {TESTED} and is only tested with 0.28.1; exchanges may fail. Install "
            "horovod==0.28.1"
        )


def calling_frames() -> Iterator[FrameType]:
    """Yield the frames of the call stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def n_ranks() -> int:
    """Return the number of ranks of the job.

    Relies on ``horovod.common.process_sets._basics``, which is set up when ``horovod.torch`` or
    ``horovod.tensorflow`` is imported.
    """
    return process_sets._basics.size()


def ranks_per_host() -> int:
    """Return the number of ranks on each host; 1 if all are on one, or hosts have unequal numbers.

    1 too if this rank's host has no consecutive ranks, so that the handshake tells of it.

    Relies on ``_basics`` as ``n_ranks`` does.
    """
    basics = process_sets._basics
    size = basics.local_size()
    is_next = basics.rank() == basics.cross_rank() * size + basics.local_rank()
    return size if basics.is_homogeneous() and is_next and size < basics.size() else 1


def registered_process_sets() -> Mapping[tuple[int, ...], int]:
    """Return the ids of Horovod's process sets, keyed by their ranks.

    Relies on ``_get_process_set_ids_and_ranks`` of ``horovod.common.process_sets._basics``.
    """
    known = process_sets._basics._get_process_set_ids_and_ranks()
    return {tuple(ranks): number for number, ranks in known.items()}
