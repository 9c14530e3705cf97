"""The machine of a measurement: processor, cores, threads and versions."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from horovod_fftcomp.kernels.threads import get_num_threads
from horovod_fftcomp.wire.version import __version__

# Packages whose versions may change a result or a time, as named in the package index.
PACKAGES = ("numpy", "numba", "llvmlite", "torch", "horovod")
MOST_LOAD = 0.25  # share of the cores: if other processes use more, ranks wait for cores


def describe() -> dict[str, object]:
    """Return the machine as JSON values; packages that are not installed are left out.

    ``load``: mean number of runnable processes over the last minute.
    """
    return {
        "cpu": cpu_model(),
        "cores": n_cores(),
        "threads": get_num_threads(),
        "load": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(),
    }


def cpu_model() -> str:
    """Return the processor's name from /proc/cpuinfo, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def n_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def other_busy_s() -> float:
    """Return for how many seconds other processes kept this one's cores busy, since the boot.

    Not counted: this process and those of its children that have ended. Raises OSError without
    /proc/stat.
    """
    lines = map(str.split, Path("/proc/stat").read_text(encoding="ascii").splitlines())
    ticks = {name: list(map(int, counts[:8])) for name, *counts in lines if name[:3] == "cpu"}
    own = [ticks[f"cpu{n}"] for n in os.sched_getaffinity(0)]
    idle = sum(idle + waits for _, _, _, idle, waits, *_ in own)
    return (sum(map(sum, own)) - idle) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and the ``PACKAGES`` that are installed."""
    found = {"python": platform.python_version(), "horovod_fftcomp": __version__}
    others = {package: known(metadata.version, package) for package in PACKAGES}
    return found | {package: version for package, version in others.items() if version}


def known(about: Callable[[str], Any], package: str) -> Any:
    """Return what a function of ``metadata`` tells about a package; None if it is not installed."""
    try:
        return about(package)
    except metadata.PackageNotFoundError:
        return None
