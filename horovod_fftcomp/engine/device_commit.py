"""Commits or rolls back a step on the device, without host synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.cuda import Device, is_on_host, on_device, source, structs
from horovod_fftcomp.kernels.ops import Flags


class DeviceCommit:
    """Commit of the steps of ``device``: new state is kept only if the whole step was finite."""

    def __init__(self, device: Device) -> None:
        self._device = device
        names = ["judge", "count_corrupt", "count_step", "select_state"]
        self._kernels = device.functions(source(), names)
        self._ledger = device.zeros(structs.LEDGER.itemsize // 4, np.uint32)
        self._fetched: Callable[[], np.ndarray] | None = None  # ledger of the previous step
        self._flags: list[Any] = []
        self._uploads = structs.Uploads(device)

    def observe(self, flag: Any) -> None:
        """Add a device word to this step: nonzero if a tensor exchanged elsewhere is not finite."""
        self._flags.append(flag)

    def close(
        self, exchanges: Sequence[Flags], changes: Iterable[tuple[Any, Any]]
    ) -> Callable[[], np.ndarray]:
        """End a step: keep the new state if all ``exchanges`` are finite, else restore the old one.

        ``changes``: (old, new) arrays of the state; None stands for old zeros. New arrays on the
        host, and those that are the old ones, stay as they are. Returns a function that waits for
        the decision, one word: 0 if the step is committed.
        """
        dropped = self._device.zeros(1, np.uint32)
        for flags in [*self._flags, *(exchange.not_finite for exchange in exchanges)]:
            self._launch("judge", flags, dropped)
        self._flags = []
        self._select(dropped, [c for c in changes if c[0] is not c[1]])
        self._kernels["count_step"](1, 1, [dropped, self._ledger], 0)
        return self._device.fetch(dropped)

    def _select(self, dropped: Any, changes: Sequence[tuple[Any, Any]]) -> None:
        """Launch the kernel that copies old arrays to new ones if ``dropped`` is nonzero."""
        changes = [
            (None if old is None else on_device(old, self._device), new)
            for old, new in changes
            if len(new) and not is_on_host(new)
        ]
        if not changes:
            return
        rows = np.zeros(len(changes), structs.CHANGE)
        for row, (old, new) in zip(rows, changes, strict=True):
            row["old"] = 0 if old is None else self._device.address(old)
            row["new"], row["n"] = self._device.address(new), new.nbytes // 4
        owners = structs.enter_tiles(rows, rows["n"])
        tables = [self._uploads.of("changes", rows), self._uploads.of("owners", owners)]
        self._kernels["select_state"](owners.size, structs.THREADS, [*tables, dropped], 0)

    def inspect(self, exchanges: Sequence[Flags]) -> None:
        """Count the corrupt payloads of a step, whether it is committed or not.

        Raises PayloadError if there were any in the previous step.
        """
        for exchange in exchanges:
            self._launch("count_corrupt", exchange.arrived, self._ledger, words=4)
        before, self._fetched = self._fetched, self._device.fetch(self._ledger)
        if before is not None:
            self._check(before())

    def reset(self) -> None:
        """Reset all counts, for a state that is loaded."""
        self._device.clear(self._ledger)
        self._fetched, self._flags = None, []

    def is_finite(self, exchanges: Sequence[Flags]) -> bool:
        """Wait for the device; return whether everything in this step so far is finite."""
        arrays = [*self._flags, *(exchange.not_finite for exchange in exchanges)]
        return not any(self._device.fetch(flags)().any() for flags in arrays)

    def skipped(self) -> int:
        """Wait for the device; return how many of its steps were rolled back."""
        ledger = self._device.fetch(self._ledger)()
        self._check(ledger)
        return int(ledger[0])

    def forget(self) -> None:
        """Discard the flags of a step that was aborted."""
        self._flags = []

    def _check(self, ledger: np.ndarray) -> None:
        if ledger[1]:
            raise PayloadError(
                f"{ledger[1]} payloads were corrupt when they arrived on the GPU; the sums of "
                "their tensors are NaN. Look for a faulty network or memory, and resume from the "
                "last checkpoint"
            )

    def _launch(self, kernel: str, words_of: Any, into: Any, words: int = 1) -> None:
        n = len(words_of) // words
        if n:
            self._kernels[kernel](-(-n // structs.THREADS), structs.THREADS,
                                  [words_of, np.uint32(n), into], 0)  # fmt: skip
