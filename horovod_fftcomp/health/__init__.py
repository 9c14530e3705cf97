"""What one process can tell of its installation; a job of several is in ``torch.health``."""

from __future__ import annotations

from collections.abc import Iterator

from horovod_fftcomp.health import frameworks, kernels, packages
from horovod_fftcomp.health.finding import Finding, Level, told

__all__ = ["Finding", "Level", "findings", "told"]


def findings() -> Iterator[Finding]:
    """Yield what there is to say of this process, in the order of the report."""
    yield from packages.findings()
    yield from kernels.findings()
    yield from frameworks.findings()
