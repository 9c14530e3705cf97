"""Replica check: compares hashes of the parameters between ranks during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from horovod_fftcomp.adapter.handshake import size_of
from horovod_fftcomp.engine.overlap import Pending, Send
from horovod_fftcomp.errors import ConfigMismatchError, warn
from horovod_fftcomp.kernels.cuda import Device, on_host
from horovod_fftcomp.monitor.parameter_hash import Rotation, describe, find_differences, hash_bytes
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array


class Replicas(Protocol):
    """Interface to an adapter's parameters as bytes, addressed by number."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the parameters, in their order."""

    def sizes(self) -> list[int]:
        """Return the size of each parameter in bytes."""

    def read(self, number: int) -> Array:
        """Return a parameter's present values, uint8 1-D."""

    def write(self, number: int, values: Array) -> None:
        """Overwrite a parameter with ``values``, uint8 1-D."""


class ReplicaCheck:
    """Comparison of parameters between ranks: some at each step, all of them within 100 steps.

    The hashes are exchanged while the step goes on. ``action`` if they differ: "warn", "broadcast"
    (warn and overwrite them with the first rank's values) or "off" (no comparison).
    """

    def __init__(
        self, send: Send, parameters: Replicas, action: str, process_set: Any, name: str
    ) -> None:
        self._send = send
        self._parameters = parameters
        self._action = action
        self._set = process_set
        self._name = f"{name}.replicas"
        self._rotation = Rotation(sizes := parameters.sizes())
        self._n_sizes = len(sizes)
        self.seconds = 0.0  # total time spent here, for stats
        self._due: Sequence[int] = ()
        self._pending: Pending | None = None
        self._device: Device | None = None

    def abandon(self) -> None:
        """Discard an exchange that an error interrupted."""
        self._pending = None

    def is_due(self, step: int) -> bool:
        """Return whether ``begin`` would compare anything; the same on all ranks."""
        return self._action != "off" and len(self._rotation.due(step)) > 0

    def begin(
        self,
        step: int,
        device: Device | None = None,
        in_place: Callable[[int], Any] | None = None,
        perturbed: bool = False,
    ) -> None:
        """Start comparing the parameters that are due, before ``step`` updates them.

        All ranks have to call it. ``device``: the GPU that holds all parameters and computes steps,
        or None; with a GPU, ``in_place`` returns a parameter's values there: uint8 1-D, aligned to
        8 bytes. ``perturbed``: the parameters are meant to differ in this step, in which no rank
        compares any.
        """
        self._device = device
        if len(self._parameters.names) != self._n_sizes:  # the optimizer got new ones
            self._rotation = Rotation(sizes := self._parameters.sizes())
            self._n_sizes = len(sizes)
        self._due = () if self._action == "off" else self._rotation.due(step)
        if self._due:
            start = time.perf_counter()
            if perturbed:
                hashes = np.zeros(8 * len(self._due), np.uint8)
            elif device is not None and in_place is not None:
                from horovod_fftcomp.kernels.cuda.hashes import hashes_on_device  # only with a GPU

                hashes = hashes_on_device(device, [in_place(number) for number in self._due])
            else:
                values = [hash_bytes(self._parameters.read(number)) for number in self._due]
                hashes = np.array(values, np.uint64).view(np.uint8)
            self._pending = self._send(Round("allgather", hashes), self._name, self._set)
            self.seconds += time.perf_counter() - start

    def finish(self, timeout_s: float) -> None:
        """Wait for the hashes; warn, and broadcast if so set, where they differ."""
        if self._pending is None:
            return
        start = time.perf_counter()
        hashes = on_host(self._pending.wait(timeout_s), self._device)
        self._pending = None
        words = hashes.view(np.uint64)
        if words.size != size_of(self._set) * len(self._due):
            raise ConfigMismatchError(
                "the ranks' optimizers have different parameters; that of this rank has "
                f"{self._n_sizes}. Make the same calls of add_param_group() on all ranks"
            )
        gathered = words.reshape(-1, len(self._due))
        self.seconds += time.perf_counter() - start
        if not gathered.any(1).all():
            return  # some are perturbed
        names = [self._parameters.names[number] for number in self._due]
        differences = find_differences(gathered, names)
        if not differences:
            return
        text = describe(differences)
        if self._action == "broadcast":
            for number in self._due:
                if self._parameters.names[number] in differences:
                    self._broadcast(number, timeout_s)
            text += " They have been replaced by the first rank's."
        warn(text)

    def _broadcast(self, number: int, timeout_s: float) -> None:
        data = self._parameters.read(number)  # bytes: Horovod does not send bfloat16
        values = self._send(Round("broadcast", data), f"{self._name}.mend", self._set)
        self._parameters.write(number, values.wait(timeout_s))
