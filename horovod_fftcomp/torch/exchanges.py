"""A step's buckets on their way: gradients come in, rounds are sent, sums are there at the end."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np

from horovod_fftcomp.engine import Engine
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch.rounds import PendingRound


class Place(NamedTuple):
    """Where a compressed parameter's gradient goes."""

    bucket: int
    index: int


class Exchanges:
    """The buckets of ``engine``, each exchanged once a step.

    ``name``: that of the compressor, with which the names of all rounds begin. ``wait_s``: the
    seconds that were spent waiting for rounds, in all.
    """

    def __init__(
        self, engine: Engine, name: str, process_set: hvd.ProcessSet, timeout_s: float
    ) -> None:
        self._engine = engine
        self._name = name
        self._set = process_set
        self._timeout_s = timeout_s
        self.wait_s = 0.0
        self._arrived: list[dict[int, np.ndarray | None]] = [{} for _ in engine.buckets]
        self._pending: dict[int, PendingRound] = {}

    def add(self, place: Place, grad: np.ndarray | None) -> None:
        """Take a gradient, flat float32; None for that of a frozen parameter."""
        self._arrived[place.bucket][place.index] = grad

    def advance(self) -> None:
        """Send what can be sent without waiting; decoding can wait."""
        for number, arrived in enumerate(self._arrived):
            if len(arrived) == len(self._engine.buckets[number].tensors):
                self._start(number)
        for bucket, pending in list(self._pending.items()):
            last = len(self._engine.scheme(bucket).rounds) - 1
            if not pending.name.endswith(f".{last}") and pending.is_done():
                self._advance(bucket)

    def finish(self) -> None:
        """Run what is left of the step; of gradients that have not come zeros are sent.

        A bucket that got no gradient at all is left out of this step.
        """
        for bucket, arrived in enumerate(self._arrived):
            if arrived:
                self._start(bucket)
        while self._pending:
            for bucket in sorted(self._pending):
                self._advance(bucket)

    def abandon(self) -> None:
        """Forget a step that was broken off."""
        self._arrived = [{} for _ in self._arrived]
        self._pending = {}

    def _start(self, bucket: int) -> None:
        arrived, tensors = self._arrived[bucket], self._engine.buckets[bucket].tensors
        grads = [
            arrived[index] if index in arrived else np.zeros(math.prod(tensor.shape), np.float32)
            for index, tensor in enumerate(tensors)
        ]
        self._submit(bucket, self._engine.start(bucket, grads), 0)
        self._arrived[bucket] = {}

    def _submit(self, bucket: int, round_: Round, number: int) -> None:
        self._pending[bucket] = PendingRound(round_, f"{self._name}.{bucket}.{number}", self._set)

    def _advance(self, bucket: int) -> None:
        """Wait for a bucket's round and start the next one, if there is one."""
        pending = self._pending.pop(bucket)
        begin = time.perf_counter()
        output = pending.wait(self._timeout_s)
        self.wait_s += time.perf_counter() - begin
        following = self._engine.advance(bucket, output)
        if following is not None:
            self._submit(bucket, following, int(pending.name.rpartition(".")[2]) + 1)
