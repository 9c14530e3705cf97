"""Which steps of a GPU count: decided on the GPU, and read by the host when nobody has to wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.cuda import Device, source, structs
from horovod_fftcomp.schemes import OnDevice


class Verdicts:
    """Closes one step after the other on ``device``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        names = ["judge", "count_corrupt", "count_step"]
        self._kernels = device.functions(source(), names)
        self._ledger = device.zeros(structs.LEDGER.itemsize // 4, np.uint32)
        self._fetched: Callable[[], np.ndarray] | None = None  # of the step before
        self._flags: list[Any] = []

    def observe(self, flag: Any) -> None:
        """Take a word of the device: not 0 if what was exchanged elsewhere is not finite."""
        self._flags.append(flag)

    def close(self, exchanges: Sequence[OnDevice]) -> Callable[[], np.ndarray]:
        """End a step: what ``exchanges`` have left counts if all of it was finite.

        Returns what waits for the verdict, which is 0 if the step counts.
        """
        verdict = self._device.zeros(1, np.uint32)
        for flags in [*self._flags, *(exchange.not_finite for exchange in exchanges)]:
            self._launch("judge", flags, verdict)
        self._flags = []
        for exchange in exchanges:
            exchange.restore(verdict)
        self._kernels["count_step"](1, 1, [verdict, self._ledger], 0)
        return self._device.fetch(verdict)

    def inspect(self, exchanges: Sequence[OnDevice]) -> None:
        """Count the corrupt payloads of a step, whether it counts or not.

        Raises PayloadError if there were any in the step before.
        """
        for exchange in exchanges:
            self._launch("count_corrupt", exchange.arrived, self._ledger, words=4)
        before, self._fetched = self._fetched, self._device.fetch(self._ledger)
        if before is not None:
            self._check(before())

    def reset(self) -> None:
        """Forget everything, as of a state that is loaded."""
        self._device.clear(self._ledger)
        self._fetched, self._flags = None, []

    def is_finite(self, exchanges: Sequence[OnDevice]) -> bool:
        """Wait for the device and tell whether all is finite that it has seen of this step."""
        arrays = [*self._flags, *(exchange.not_finite for exchange in exchanges)]
        return not any(self._device.fetch(flags)().any() for flags in arrays)

    def skipped(self) -> int:
        """Wait for the device; return how many of its steps did not count."""
        ledger = self._device.fetch(self._ledger)()
        self._check(ledger)
        return int(ledger[0])

    def forget(self) -> None:
        """Forget what was observed of a step that was broken off."""
        self._flags = []

    def _check(self, ledger: np.ndarray) -> None:
        if ledger[1]:
            raise PayloadError(
                f"{ledger[1]} payloads were corrupt when they arrived on the GPU; the tensors they "
                "belong to are NaN since. Look for a faulty network or memory, and go on from the "
                "last checkpoint"
            )

    def _launch(self, kernel: str, words_of: Any, into: Any, words: int = 1) -> None:
        n = len(words_of) // words
        if n:
            self._kernels[kernel](-(-n // structs.THREADS), structs.THREADS,
                                  [words_of, np.uint32(n), into], 0)  # fmt: skip
