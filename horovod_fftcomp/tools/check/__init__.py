"""Checks of an installation in one process; those of a job are in the adapters."""

from __future__ import annotations

from collections.abc import Iterator

from horovod_fftcomp.tools.check import frameworks, kernels, packages
from horovod_fftcomp.tools.check.finding import Finding, Level, told

__all__ = ["Finding", "Level", "findings", "told"]


def findings() -> Iterator[Finding]:
    """Yield the findings of this process, in the order of the report."""
    yield from packages.findings()
    yield from kernels.findings()
    yield from frameworks.findings()
