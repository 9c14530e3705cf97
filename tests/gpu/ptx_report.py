"""Plugin of pytest for ``--ptx``: the emulator runs PTX; tells which kernels have been launched."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from horovod_fftcomp.kernels import cuda
from tests.gpu import build, emulator


class PtxReport:
    """Makes all emulators of a run use PTX for ``target``, "13:sm_90" for example."""

    def __init__(self, target: str) -> None:
        if not re.fullmatch(r"\d+:sm_\d+", target):
            raise pytest.UsageError("--ptx takes a version of NVRTC and an architecture: 13:sm_90")
        self._target, self._launches = target, Counter[str]()
        build.target = build.Target(*target.split(":"))

    def pytest_sessionfinish(self, session):
        """Add the launches of this process, or pass them on to the process that reports."""
        self._launches += emulator.launches
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["launches"] = dict(self._launches)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Add the launches of a worker."""
        self._launches += Counter(node.workeroutput["launches"])

    def pytest_terminal_summary(self, terminalreporter):
        """Tell how many kernels have been launched, and which have not."""
        never = [name for name in cuda.NAMES if name not in self._launches]
        terminalreporter.write_line(
            f"PTX {self._target}: {len(cuda.NAMES) - len(never)} of {len(cuda.NAMES)} kernels in "
            f"{self._launches.total()} launches; not launched: {', '.join(never) or 'none'}"
        )
