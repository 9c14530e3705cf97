"""horovodrun, but told that Horovod has MPI and Gloo, as ``make install`` builds it.

To find out it would import TensorFlow and PyTorch in every launch, which takes longer than most of
the tests that are launched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_YIELD = """
#include <time.h>
extern "C" int sched_yield() noexcept {
    const timespec pause{0, 20'000};
    return nanosleep(&pause, nullptr);
}
"""


@contextmanager
def patient_ranks(environment: dict[str, str] | os._Environ[str]) -> Iterator[None]:
    """Let ranks sleep while they wait in MPI, which would yield, again and again.

    Linux takes a yielding thread for a busy one: where cores are fewer than ranks, it keeps those
    that it waits for from theirs, at times for a second.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/yield.so"
        build = ["g++", "-O1", "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
        subprocess.run(build, input=_YIELD, text=True, check=True)
        environment["LD_PRELOAD"] = library
        yield


if __name__ == "__main__":
    from horovod.runner import launch

    launch.mpi_built = launch.gloo_built = lambda verbose=False: True
    with patient_ranks(os.environ):
        sys.exit(launch.run_commandline())
