"""Rounds as named asynchronous operations of ``horovod.torch``, with a time limit for waits."""

from __future__ import annotations

import functools
import time
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from horovod_fftcomp.adapter.stalls import no_answer
from horovod_fftcomp.errors import ConfigMismatchError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch.horovod_internals import wait_for_horovod

# Horovod's own synchronize spins on a core; polling at this interval costs little and is no delay.
_POLL_S = 0.0001


class HorovodRound:
    """Asynchronous collective; matched by name, so ranks may start theirs in any order."""

    def __init__(self, round_: Round, name: str, process_set: hvd.ProcessSet) -> None:
        self.name = name
        self.collective = round_.collective
        given: Any = round_.data  # an array of NumPy or, if the GPU made it, a tensor
        self._is_numpy = isinstance(given, np.ndarray)
        data: torch.Tensor = torch.from_numpy(given) if self._is_numpy else given
        if round_.collective == "allgather":
            self._handle = hvd.allgather_async(data, name=name, process_set=process_set)
        elif round_.collective == "allreduce":
            self._handle = hvd.allreduce_async(data, op=hvd.Sum, name=name, process_set=process_set)
        elif round_.collective == "broadcast":
            root = process_set.ranks[round_.root]  # Horovod takes the global rank
            self._handle = hvd.broadcast_async(data, root, name=name, process_set=process_set)
        else:  # an alltoall
            splits = torch.tensor(round_.splits, dtype=torch.int32)
            self._handle = hvd.alltoall_async(data, splits, name, process_set)
        self.is_done = functools.partial(hvd.poll, self._handle)

    def wait(self, timeout_s: float) -> Any:
        """Return the output: a NumPy array if the input was one, else a tensor on its device.

        Raises ConfigMismatchError if it is not available after ``timeout_s`` seconds.
        """
        limit = time.monotonic() + timeout_s
        while not self.is_done():
            if time.monotonic() > limit:
                raise ConfigMismatchError(no_answer(f"{self.collective} {self.name!r}", timeout_s))
            time.sleep(_POLL_S)
        output = hvd.synchronize(self._handle)
        if self.collective == "alltoall":
            output, _ = output  # and what came from each rank, which the payloads' headers tell
        if output.is_cuda:
            wait_for_horovod(output)
        return output.numpy() if self._is_numpy else output
