"""Base class of the step drivers of all frameworks: what they are made of, recording, counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.adapter.connection import Connection
from horovod_fftcomp.adapter.replica_check import ReplicaCheck
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine.buckets import may_gather
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Slot
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels.cuda import on_host
from horovod_fftcomp.monitor.gradient_recorder import Recorder
from horovod_fftcomp.monitor.not_finite import NotFiniteWarning


class Parts(NamedTuple):
    """Objects of a compressor that its step driver uses.

    ``listeners`` are called when a step has been closed; see ``Compressor.on_step``. ``recorder``
    records the compressed tensors' gradients of some steps. ``slots``: each tensor's slot in the
    buckets; None if it is sent dense.
    """

    engine: Engine
    connection: Connection
    replicas: ReplicaCheck
    recorder: Recorder | None
    listeners: Sequence[Callable[[], None]]
    settings: Settings
    slots: Sequence[Slot | None]


class StepDriver:
    """Base class of step drivers, which carry out the training steps of one optimizer or tape.

    Counts since the start: ``count`` closed steps, ``dense_nbytes`` bytes of all gradients in
    float32, ``other_nbytes`` bytes of what Horovod itself reduced (dense tensors and probes).
    ``of_warmup``: bytes of gradients and bytes passed to collectives in the warm-up; while it lasts
    without its last step. ``gathers``: whether steps have collectives other than allreduces.
    """

    _TO_CONTINUE = ""  # end of an error message: what to load besides the compressor's state

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._engine, self._connection, self.replicas, self._recorder = parts[:4]
        self._listeners, self._settings, self._slots = parts[4:]
        self._set, self._name = self._connection.process_set, self._connection.name
        # A step of allreduces alone needs no barrier: it works with hvd.join as in Horovod.
        self.gathers = self._settings.replica_check != "off" or may_gather(self._engine.buckets)
        self._recorded: dict[str, np.ndarray] | None = None  # of this step, if it is recorded
        self._not_finite = NotFiniteWarning(self._settings.grad_scaler is not None)
        self._broken_by = ""  # text of the error that interrupted a step
        self.count = self.dense_nbytes = self.other_nbytes = 0
        self.of_warmup, self._before = (0, 0), (0, 0, 0)  # these when the last step began
        self._warmup_steps = max((b.policy.warmup_steps for b in self._engine.buckets), default=0)

    def times(self) -> dict[str, float]:
        """Return the times of ``stats`` that are not the engine's, in seconds."""
        timed = getattr(self, "pipeline", self)  # without one a driver has these itself
        names = ("encode_hidden_s", "encode_wait_s", "wait_s")
        return {"check_s": self.replicas.seconds, **{n: getattr(timed, n) for n in names}}

    def may_wait(self, running: Collection[CodeType]) -> bool:
        """Return False if no thread can be in a step; ``running``: code objects they are in."""
        return True  # a step is under way until its last gradient is finished

    def loss_scale(self) -> float:
        """Return the present loss scale: that of PyTorch's ``GradScaler``, 1 without one."""
        scaler = self._settings.grad_scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def settle(self) -> None:
        """Close the last step, before its results are read; ValueError if a step is under way."""
        raise NotImplementedError

    def close_if_complete(self) -> None:
        """Close the last step if it is complete."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Discard a step that an error interrupted."""
        self._engine.abandon()
        self.replicas.abandon()
        self._recorded, self._broken_by = None, ""

    def check_unbroken(self) -> None:
        """Raise UnsupportedError if an error has interrupted a step."""
        if self._broken_by:
            raise UnsupportedError(
                f"a step was interrupted by {self._broken_by}; to continue, discard it: load a "
                f"state_dict() into the compressor and {self._TO_CONTINUE}"
            )

    def discard(self) -> None:
        """Undo the last step, which is settled; see ``Engine.discard``."""
        self._engine.discard()
        self.count, self.dense_nbytes, self.other_nbytes = self._before

    def _note_begin(self) -> None:
        """Note that a step begins, before anything of it is counted or recorded."""
        self._before = self.count, self.dense_nbytes, self.other_nbytes
        if self._engine.step <= self._warmup_steps:
            self.of_warmup = self.dense_nbytes, self._engine.costs.sent_nbytes + self.other_nbytes
        if self._recorder is not None:
            self._recorder.check()
            self._recorded = {} if self._recorder.wants(self._engine.step) else None

    def _record(self, bucket: int, arrived: Mapping[int, Any]) -> None:
        """Copy gradients of a bucket, 1-D float32 by position, if this step is recorded."""
        if self._recorded is None:
            return
        for position, grad in arrived.items():
            if grad is not None:
                name, shape = self._engine.buckets[bucket].tensors[position]
                self._recorded[name] = np.array(on_host(grad, self._engine.device)).reshape(shape)

    def _end_record(self, step: int) -> None:
        if self._recorder is not None and self._recorded:
            self._recorder.append(step, self._recorded)
        self._recorded = None

    def _note_closed(self) -> None:
        self.count += 1
        for listener in self._listeners:
            listener()
