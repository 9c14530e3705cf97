"""Replica check: compares hashes of the parameters between ranks during training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from horovod_fftcomp.adapter.connection import Connection
from horovod_fftcomp.adapter.handshake import size_of
from horovod_fftcomp.engine.overlap import Pending, Send
from horovod_fftcomp.errors import ConfigMismatchError, warn
from horovod_fftcomp.kernels.cuda import Device, on_host
from horovod_fftcomp.monitor.parameter_hash import Rotation, describe, find_differences, hash_bytes
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array


class Replicas(Protocol):
    """Interface to an adapter's parameters as bytes, addressed by number.

    It may also have ``read_in_place``, as ``read`` but on the GPU, aligned to 8 bytes.
    """

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

    The hashes are exchanged while the step goes on, by ``send``. ``action`` if they differ: "warn",
    "broadcast" (warn and overwrite them with the first rank's values) or "off" (no comparison).
    ``device``: the GPU that computes steps, and hashes parameters where they are; None without one.
    """

    def __init__(
        self, send: Send, link: Connection, parameters: Replicas, action: str, device: Device | None
    ) -> None:
        self._send, self._set, self._name = send, link.process_set, f"{link.name}.replicas"
        self._parameters, self._action, self._device = parameters, action, device
        self._rotation = Rotation(sizes := parameters.sizes())
        self._n_sizes = len(sizes)
        self.seconds = 0.0  # total time spent here, for stats
        self._due: Sequence[int] = ()
        self._pending: Pending | None = None

    def abandon(self) -> None:
        """Discard an exchange that an error interrupted."""
        self._pending = None

    def is_due(self, step: int) -> bool:
        """Return whether ``begin`` would compare anything; the same on all ranks."""
        return self._action != "off" and len(self._rotation.due(step)) > 0

    def begin(self, step: int, perturbed: bool = False) -> None:
        """Start comparing the parameters that are due, before ``step`` updates them.

        All ranks have to call it. ``perturbed``: the parameters are meant to differ in this step,
        in which no rank compares any.
        """
        if len(self._parameters.names) != self._n_sizes:  # the optimizer got new ones
            self._rotation = Rotation(sizes := self._parameters.sizes())
            self._n_sizes = len(sizes)
        self._due = () if self._action == "off" else self._rotation.due(step)
        if self._due:
            start = time.perf_counter()
            in_place = getattr(self._parameters, "read_in_place", None)
            if perturbed:
                hashes = np.zeros(8 * len(self._due), np.uint8)
            elif self._device is not None and in_place is not None:
                from horovod_fftcomp.kernels.cuda.hashes import hashes_on_device  # only with a GPU

                hashes = hashes_on_device(self._device, [*map(in_place, self._due)])
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
