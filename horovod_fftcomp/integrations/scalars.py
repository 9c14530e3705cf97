"""Statistics of a compressor as scalars for the logs of a library."""

from __future__ import annotations

from typing import Any

from horovod_fftcomp.monitor.step_log import figures
from horovod_fftcomp.torch_distributed import DistributedCompressor

# What a plot shows; the rest is in ``stats``.
_SHOWN = ("encode_ms", "wait_ms", "relative_error", "residual_ratio")


class Scalars:
    """Scalars of a compressor, from one call to the next."""

    def __init__(self, compression: DistributedCompressor) -> None:
        self._compression = compression
        self._before: dict[str, Any] = {}

    def read(self) -> dict[str, float]:
        """Return five scalars of the steps so far, named "compression/ratio" etc.

        ``ratio`` is that of ``stats``; milliseconds are means over the steps since the last call,
        errors and residuals those last measured, see ``step_log.figures``.
        """
        now = self._compression.stats()
        found = figures(self._before, now, self._compression.residual_ratios())
        self._before = now
        shown = {"ratio": now["ratio"], **{name: found[name] for name in _SHOWN}}
        return {f"compression/{name}": value for name, value in shown.items() if value is not None}
