"""Do all ranks still hold the same parameters? A hash of some of them every few steps."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import horovod.torch as hvd
import numpy as np
import torch

from horovod_fftcomp.replicas import Rotation, describe, find_differences, hash_bytes
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch.rounds import PendingRound


class ReplicaCheck:
    """Compares parameters between ranks, in turns, all within 100 steps.

    The exchange of a turn's hashes runs beside backward. ``action``: "warn", "broadcast" (the
    first rank's values replace the others') or "off".
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        action: str,
        process_set: hvd.ProcessSet,
        name: str,
    ) -> None:
        self._names = names
        self._parameters = parameters
        self._action = action
        self._set = process_set
        self._name = f"{name}.replicas"
        self._rotation = Rotation([p.numel() * p.element_size() for p in parameters])
        self.seconds = 0.0  # spent here in all, for stats
        self._due: Sequence[int] = ()
        self._pending: PendingRound | None = None

    def abandon(self) -> None:
        """Forget an exchange that was broken off."""
        self._pending = None

    def begin(self, step: int) -> None:
        """Start comparing what is due before ``step``'s update; every rank calls it alike."""
        self._due = () if self._action == "off" else self._rotation.due(step)
        if self._due:
            start = time.perf_counter()
            hashes = [hash_bytes(_bytes_of(self._parameters[number])) for number in self._due]
            message = Round("allgather", np.array(hashes, np.uint64).view(np.uint8))
            self._pending = PendingRound(message, self._name, self._set)
            self.seconds += time.perf_counter() - start

    def finish(self, timeout_s: float) -> None:
        """Act on a difference, if one was found."""
        if self._pending is None:
            return
        start = time.perf_counter()
        gathered = self._pending.wait(timeout_s).view(np.uint64).reshape(-1, len(self._due))
        self._pending = None
        self.seconds += time.perf_counter() - start
        differences = find_differences(gathered, [self._names[number] for number in self._due])
        if not differences:
            return
        text = describe(differences)
        if self._action == "broadcast":
            for number in self._due:
                if self._names[number] in differences:
                    self._broadcast(self._parameters[number])
            text += " They have been replaced by the first rank's."
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _broadcast(self, parameter: torch.nn.Parameter) -> None:
        root = 0 if self._set.ranks is None else self._set.ranks[0]
        own = torch.from_numpy(_bytes_of(parameter))  # bytes: Horovod sends no bfloat16
        values = hvd.broadcast(own, root, f"{self._name}.mend", process_set=self._set)
        with torch.no_grad():
            parameter.copy_(values.view(parameter.dtype).view(parameter.shape))


def _bytes_of(parameter: torch.nn.Parameter) -> np.ndarray:
    flat = parameter.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
