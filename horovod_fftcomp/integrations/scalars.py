"""Statistics of a compressor as scalars for the logs of a library."""

from __future__ import annotations

from typing import Any

from horovod_fftcomp.monitor.step_log import figures
from horovod_fftcomp.torch_distributed import DistributedCompressor


class Scalars:
    """Scalars of a compressor, from one call to the next."""

    def __init__(self, compression: DistributedCompressor) -> None:
        self._compression = compression
        self._before: dict[str, Any] = {}

    def read(self) -> dict[str, float]:
        """Return the statistics of the steps since the last call, named "compression/ratio" etc.

        Bytes and milliseconds are means over these steps; see ``step_log.figures``.
        """
        now = self._compression.stats()
        found = figures(self._before, now, self._compression.residual_ratios())
        self._before = now
        return {
            f"compression/{name}": value
            for name, value in found.items()
            if isinstance(value, (int, float))
        }
