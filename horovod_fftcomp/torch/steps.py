"""The course of a step: it takes gradients as Horovod's hooks bring them, and gives sums back."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from types import CodeType
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch

from horovod_fftcomp.adapter.connection import Connection
from horovod_fftcomp.adapter.replica_check import ReplicaCheck
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.stalls import Progress
from horovod_fftcomp.engine.buckets import may_gather
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Pending, Slot, StepPipeline
from horovod_fftcomp.errors import FFTCompError, UnsupportedError
from horovod_fftcomp.monitor.gradient_recorder import Recorder
from horovod_fftcomp.monitor.not_finite import NotFiniteWarning
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch import arrays
from horovod_fftcomp.torch.horovod_internals import come_after_horovod
from horovod_fftcomp.torch.parameters import Parameters
from horovod_fftcomp.torch.replicas import OptimizedParameters

# A rank that ends shuts Horovod down on all of them. One that begins an operation at that moment
# may hang: it holds the interpreter and waits for a lock whose holder waits for that. So an error
# waits until the others have begun theirs; a rank that only waits is told of the end. This is a
# courtesy, so that other ranks raise errors of their own: where it is too short, the launcher kills
# the rank that hangs, since this one has ended with an error.
_GRACE_S = 2.0


class GradientContext(NamedTuple):
    """What has to be known of a gradient when its reduced value comes."""

    grad: torch.Tensor
    slot: Slot | None  # None: exchanged densely, by Horovod
    number: int  # of the parameter


class StepDriver:
    """One step after the other, of one optimizer.

    ``places``: for each parameter its place in the buckets of ``engine``; None if it travels
    dense. ``recorder`` keeps the compressed tensors' gradients of some steps. ``closed`` is called
    when a step has been closed. Attributes count since the start: ``count`` the steps that are
    closed, ``dense_nbytes`` all gradients in float32, ``other_nbytes`` what Horovod itself was
    given.
    """

    def __init__(
        self,
        parameters: Parameters,
        optimized: OptimizedParameters,
        slots: Sequence[Slot | None],
        engine: Engine,
        connection: Connection,
        replicas: ReplicaCheck,
        recorder: Recorder | None,
        closed: Callable[[], None] | None,
        settings: Settings,
        name: str,
        process_set: hvd.ProcessSet,
    ) -> None:
        self._parameters, self._optimized = parameters, optimized
        self._not_finite = NotFiniteWarning(settings.grad_scaler is not None)
        self._ranks = process_set.ranks
        self._bad: dict[str, bool] = {}  # dense tensors of this step, see ``NotFiniteWarning``
        self._slots = slots
        self._engine = engine
        self._connection = connection
        self._replicas = replicas
        self._recorder = recorder
        self._recorded: dict[str, np.ndarray] | None = None  # of this step, if it is recorded
        self._closed = closed
        self._settings = settings

        def send(round_: Round, bucket: int, number: int) -> Pending:
            return connection.send(round_, f"{name}.{bucket}.{number}", process_set)

        self.pipeline = StepPipeline(engine, send, settings.timeout_s)
        connection.watch.follow(self, parameters.names)
        # An exchange of allreduces alone goes through a join as it does in Horovod.
        self._gathers = settings.replica_check != "off" or may_gather(engine.buckets)
        self._made_on = {parameter.device for parameter in parameters.tensors}
        self._opened = self._finished = False
        self._stream_of_sums: torch.cuda.Stream | None = None
        self._broken_by = ""  # the error that ended a step too early, in words
        self._out = 0  # gradients that Horovod has taken and not given back
        self.count = self.dense_nbytes = self.other_nbytes = 0

    @property
    def under_way(self) -> bool:
        """Whether a gradient of a step that is not closed has come."""
        return bool(self._parameters.seen)

    def progress(self) -> Progress:
        """Return how far this rank is; for the watch, which looks from another thread."""
        handed, out = len(self._parameters.seen), self._out
        counts = (self._engine.step, handed, handed - out)
        doing = f"step {self._engine.step}"
        inside = out > 0 and not self._broken_by
        return Progress(*counts, inside, self.pipeline.is_computing, doing=doing)

    def missing(self) -> list[int]:
        """Return the numbers of the parameters whose gradients have not come in this step."""
        seen = set(list(self._parameters.seen))  # copied at once: it grows meanwhile
        return [number for number in range(len(self._parameters)) if number not in seen]

    def may_wait(self, running: Collection[CodeType]) -> bool:
        """Return True: a step is under way until its last sum is given back."""
        del running
        return True

    def times(self) -> dict[str, float]:
        """Return the seconds of ``stats`` that the engine does not know."""
        return {
            "encode_hidden_s": self.pipeline.encode_hidden_s,
            "encode_wait_s": self.pipeline.encode_wait_s,
            "wait_s": self.pipeline.wait_s,
            "check_s": self._replicas.seconds,
        }

    def loss_scale(self) -> float:
        """Return what gradients are multiplied by at present."""
        scaler = self._settings.grad_scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def start_gradient(self, grad: torch.Tensor) -> tuple[torch.Tensor, GradientContext]:
        """Take a parameter's gradient; return what Horovod is to reduce, and a context."""
        self._check_unbroken()
        self.pipeline.note_gradient()
        begins = not self.under_way
        number = self._parameters.register(grad)
        if begins:
            self._begin()
        self.dense_nbytes += 4 * grad.numel()
        slot = self._slots[number]
        self._out += 1
        sent = (
            arrays.sendable(grad)
            if slot is None
            else torch.ones(1, dtype=torch.float32, device=grad.device)
        )
        self.other_nbytes += sent.numel() * sent.element_size()
        if slot is not None:
            frozen = not self._parameters.tensors[number].requires_grad
            values = None if frozen else self._flat(grad)
            self.pipeline.add(slot, values)
            if self._recorded is not None and values is not None:
                recorded = arrays.flat_float32(grad)
                self._recorded[self._parameters.names[number]] = recorded.reshape(grad.shape)
        if self._opened or self._connection.can_open():
            self._open()
            self.pipeline.advance()
        return sent, GradientContext(grad, slot, number)

    def finish_gradient(
        self, reduced: torch.Tensor, context: GradientContext | None
    ) -> torch.Tensor:
        """Return the reduced gradient; ``reduced`` is Horovod's result for ``start_gradient``'s."""
        if reduced.is_cuda:
            come_after_horovod(reduced)
        if context is None:  # a sparse gradient that Horovod gathered itself
            values = reduced.coalesce().values() if reduced.is_sparse else reduced
            self._observe(values)
            return reduced
        if not self._finished:
            self._finish()
        self._out -= 1
        grad = self._restored(reduced, context)
        if not self._out:
            self._not_finite.observe(self._bad, self._engine.rank, self._ranks)
        return grad

    def _restored(self, reduced: torch.Tensor, context: GradientContext) -> torch.Tensor:
        """Return a gradient's reduced value like the gradient, and observe whether it is finite."""
        if context.slot is None:
            if not self._engine.buckets:
                self._engine.observe(True)  # nothing depends on it
            elif not self._observe(reduced):
                self._bad[self._parameters.names[context.number]] = False
            return arrays.restored(reduced, context.grad)
        total = self._engine.take_sum(*context.slot)
        grad = arrays.gradient_like(total, reduced / self._engine.world_size, context.grad)
        if grad.dtype in (torch.float16, torch.bfloat16):  # a finite sum may overflow in these
            self._observe(grad)
        return grad

    def _flat(self, grad: torch.Tensor) -> np.ndarray | torch.Tensor:
        """Return a gradient flat and float32: where it is, if a GPU computes steps."""
        device = self._engine.device
        if device is None:
            if grad.device not in self._made_on:
                self._warn_of_move(grad.device)
            return arrays.flat_float32(grad)
        if grad.device != device.place:
            raise UnsupportedError(
                f"a gradient is on {grad.device}, but the compressor was made of a model on "
                f"{device.place}; make it after the model has been moved"
            )
        return arrays.flat_in_place(grad)

    def _warn_of_move(self, place: torch.device) -> None:
        self._made_on.add(place)
        warnings.warn(
            f"the compressor was made before the model was moved to {place}: gradients are copied "
            "to the host and compressed there, which is slower; make it after the model has moved",
            RuntimeWarning,
            stacklevel=2,
        )

    def _observe(self, tensor: torch.Tensor) -> bool:
        """Report whether ``tensor`` is finite; return False if it is known not to be.

        On a GPU that computes steps it reports without a wait, and so knows nothing.
        """
        if self._engine.device is not None:
            self._engine.observe_on_device(arrays.not_finite(tensor))
            return True
        finite = bool(torch.isfinite(tensor).all())
        self._engine.observe(finite)
        return finite

    def _stream(self) -> torch.cuda.Stream | None:
        """Return the stream that a GPU's kernels are given to now; None if none computes steps."""
        place = getattr(self._engine.device, "place", None)
        is_gpu = place is not None and place.type == "cuda"
        return torch.cuda.current_stream(place) if is_gpu else None

    def _begin(self) -> None:
        """Do what comes before a step's first gradient."""
        self._engine.follow_loss_scale(self.loss_scale())
        if self._engine.shadow is not None:
            self._engine.shadow.begin(self._connection.n_handshakes)
        if self._recorder is not None:
            self._recorder.check()
            self._recorded = {} if self._recorder.wants(self._engine.step) else None
        if self._gathers:
            self._connection.barrier()

    def _open(self) -> None:
        """Wait until all ranks have begun this step, if they have not."""
        if not self._opened:
            self._connection.open()
            self._opened = True
            in_place = self._optimized.read_in_place
            self._replicas.begin(self._engine.step, self._engine.device, in_place)

    def _finish(self) -> None:
        """Complete every bucket: Horovod has submitted all gradients of this step by now."""
        self._check_unbroken()
        try:
            self.pipeline.complete()
            self._open()
            self.pipeline.finish()
            if self._engine.shadow is not None:
                self._engine.shadow.finish()
            self._connection.leave_together()
            if self._recorder is not None and self._recorded:
                # Nobody changes these any more: Horovod gives parameters other memory for sums.
                self._recorder.append(self._engine.step, self._recorded)
                self._recorded = None
            self._finished, self._stream_of_sums = True, self._stream()
        except BaseException as error:
            self._broken_by = repr(error)
            if not isinstance(error, (FFTCompError, KeyboardInterrupt)):  # of this rank alone
                time.sleep(_GRACE_S)
            raise
        self._replicas.finish(self._settings.timeout_s)
        self._optimized.warn_of_unexchanged()
        self._not_finite.observe(self._engine.bad, self._engine.rank, self._ranks)

    def _check_unbroken(self) -> None:
        self._connection.check()
        if self._broken_by:
            raise UnsupportedError(
                f"a step was broken off by {self._broken_by}; to go on, drop it: load a "
                "state_dict() into the compressor and one into the optimizer"
            )

    def close_finished(self) -> None:
        """Close the step that has been finished; UnsupportedError if a gradient is still out."""
        if not self._finished:
            return
        if self._out:
            self._out = 0
            raise UnsupportedError(
                "a new step begins before all gradients of the last one were taken back: this "
                "compressor serves two optimizers; make another for the second"
            )
        self._close()

    def close_if_complete(self) -> None:
        """Close the step if all its gradients were given back."""
        if self._finished and not self._out:
            self._close()

    def settle(self) -> None:
        """Close the last step for whoever looks between two; ValueError if one is under way."""
        if self._finished:
            self._close()
        if self.under_way:
            raise ValueError(
                "a step is under way: call this after optimizer.step() or synchronize(), "
                "before the next backward()"
            )

    def _close(self) -> None:
        """Close the step that has been finished; what it changed is committed."""
        # This may be the first hook of the next step, on another stream: settled there, memory of
        # the sums' stream could be given away before kernels have read it.
        now, then = self._stream(), self._stream_of_sums
        with contextlib.nullcontext() if now == then else torch.cuda.stream(then):
            self._engine.settle()
        if now is not None and now != then:
            now.wait_stream(then)
        self.count += 1
        self._parameters.begin_step()
        self._opened = self._finished = False
        self._bad = {}
        if self._closed is not None:
            self._closed()

    def abandon(self) -> None:
        """Forget a step that was broken off."""
        self._parameters.begin_step()
        self._replicas.abandon()
        self.pipeline.abandon()
        self._opened = self._finished = False
        self._broken_by, self._recorded = "", None
        self._out = 0
