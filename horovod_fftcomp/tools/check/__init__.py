"""What one process can tell of its installation; a job of several is in ``torch.check``."""

from __future__ import annotations

from collections.abc import Iterator

from horovod_fftcomp.tools.check import frameworks, kernels, packages
from horovod_fftcomp.tools.check.finding import Finding, Level, told

__all__ = ["Finding", "Level", "findings", "told"]


def findings() -> Iterator[Finding]:
    """Yield what there is to say of this process, in the order of the report."""
    yield from packages.findings()
    yield from kernels.findings()
    yield from frameworks.findings()
