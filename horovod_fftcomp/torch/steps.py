"""Step driver of the PyTorch adapter: exchanges the gradients that Horovod's hooks pass on."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Collection, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch

from horovod_fftcomp.adapter import steps
from horovod_fftcomp.adapter.stalls import Progress
from horovod_fftcomp.engine.overlap import Pending, Slot, StepPipeline
from horovod_fftcomp.errors import FFTCompError, UnsupportedError
from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch import arrays
from horovod_fftcomp.torch.horovod_internals import wait_for_horovod
from horovod_fftcomp.torch.parameters import Parameters
from horovod_fftcomp.torch.replicas import OptimizedParameters

# Seconds that a rank waits before it raises an error. A rank that ends shuts Horovod down on all
# ranks. One that starts an operation at that moment may hang: it holds the GIL and waits for a lock
# whose holder waits for the GIL. So the others get time to start theirs; ranks that only wait then
# raise errors of their own. If the time is too short, the launcher kills the rank that hangs, since
# this one has ended with an error.
_GRACE_S = 2.0


class GradientContext(NamedTuple):
    """Context of a gradient, from ``start_gradient`` to ``finish_gradient``."""

    grad: torch.Tensor
    slot: Slot | None  # None: exchanged densely, by Horovod
    number: int  # of the parameter


class StepDriver(steps.StepDriver):
    """Step driver of one optimizer.

    ``slots``: each parameter's slot in the buckets; None if it is sent dense. ``gathers``: whether
    steps have collectives other than allreduces. ``name``: the compressor's.
    """

    _TO_CONTINUE = "one into the optimizer"

    def __init__(
        self,
        parts: steps.Parts,
        parameters: Parameters,
        optimized: OptimizedParameters,
        slots: Sequence[Slot | None],
        gathers: bool,
        name: str,
    ) -> None:
        super().__init__(parts)
        self._parameters, self._optimized, self._slots = parameters, optimized, slots
        self._ranks = parts.process_set.ranks
        self._bad: dict[str, bool] = {}  # dense tensors of this step, see ``NotFiniteWarning``
        connection, engine = parts.connection, parts.engine

        def send(round_: Round, bucket: int, number: int) -> Pending:
            return connection.send(round_, f"{name}.{bucket}.{number}", parts.process_set)

        self.pipeline = StepPipeline(engine, send, parts.settings.timeout_s)
        connection.watch.follow(self, parameters.names)
        # Exchanges of allreduces only need no barrier: they work with hvd.join as in Horovod.
        self._gathers = gathers
        device = engine.device
        self._place = device.place if isinstance(device, TorchDevice) else None
        self._made_on = {parameter.device for parameter in parameters.tensors}
        self._opened = self._finished = False
        self._stream_of_sums: torch.cuda.Stream | None = None
        self._n_pending = 0  # gradients that were started and not finished

    def progress(self) -> Progress:
        """Return this rank's progress; called in the watch's thread."""
        n_seen, n_pending = len(self._parameters.seen), self._n_pending
        counts = (self._engine.step, n_seen, n_seen - n_pending)
        doing = f"step {self._engine.step}"
        inside = n_pending > 0 and not self._broken_by
        return Progress(*counts, inside, self.pipeline.is_computing, doing=doing)

    def missing(self) -> list[int]:
        """Return the numbers of the parameters whose gradients have not come in this step."""
        seen = set(list(self._parameters.seen))  # copied, since it grows meanwhile
        return [number for number in range(len(self._parameters)) if number not in seen]

    def may_wait(self, running: Collection[CodeType]) -> bool:
        """Return True: a step is under way until its last gradient is finished."""
        del running
        return True

    def times(self) -> dict[str, float]:
        """Return the times of ``stats`` that are measured here, in seconds."""
        return {
            "encode_hidden_s": self.pipeline.encode_hidden_s,
            "encode_wait_s": self.pipeline.encode_wait_s,
            "wait_s": self.pipeline.wait_s,
            "check_s": self._replicas.seconds,
        }

    def loss_scale(self) -> float:
        """Return the present loss scale."""
        scaler = self._settings.grad_scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def start_gradient(self, grad: torch.Tensor) -> tuple[torch.Tensor, GradientContext]:
        """Start the exchange of a gradient; return the tensor to be allreduced, and a context."""
        if self._broken_by or self._connection.watch.failure:
            self._check()
        begins = not self._parameters.seen
        number = self._parameters.register(grad)
        if begins:
            self._begin()
        self.dense_nbytes += 4 * grad.numel()
        slot = self._slots[number]
        self._n_pending += 1
        if slot is None:
            self.pipeline.note_gradient()
            sent = arrays.sendable(grad)
            self.other_nbytes += sent.numel() * sent.element_size()
        else:
            sent = torch.ones(1, dtype=torch.float32, device=grad.device)
            self.other_nbytes += 4
            frozen = not self._parameters.tensors[number].requires_grad
            self.pipeline.add(slot, None if frozen else self._flat(grad))
            if self._recorded is not None and not frozen:
                recorded = arrays.flat_float32(grad)
                self._recorded[self._parameters.names[number]] = recorded.reshape(grad.shape)
        if not self._opened and self._connection.can_open():
            self._open()
        if self._opened:
            self.pipeline.advance()
        return sent, GradientContext(grad, slot, number)

    def finish_gradient(
        self, reduced: torch.Tensor, context: GradientContext | None
    ) -> torch.Tensor:
        """Return the reduced gradient; ``reduced``: allreduce of ``start_gradient``'s result."""
        if reduced.is_cuda:
            wait_for_horovod(reduced)
        if context is None:  # a sparse gradient that Horovod gathered itself
            values = reduced.coalesce().values() if reduced.is_sparse else reduced
            self._observe(values)
            return reduced
        if not self._finished:
            self._finish()
        self._n_pending -= 1
        grad = self._restored(reduced, context)
        if not self._n_pending:
            self._not_finite.observe(self._bad, self._engine.rank, self._ranks)
        return grad

    def _restored(self, reduced: torch.Tensor, context: GradientContext) -> torch.Tensor:
        """Return the reduced value with the gradient's dtype and strides; note if it is finite."""
        if context.slot is None:
            if not self._engine.buckets:
                self._engine.observe(True)  # without buckets no state depends on it
            elif not self._observe(reduced):
                self._bad[self._parameters.names[context.number]] = False
            return arrays.restored(reduced, context.grad)
        total = self._engine.take_sum(*context.slot)
        grad = arrays.gradient_like(total, reduced / self._engine.world_size, context.grad)
        if grad.dtype in (torch.float16, torch.bfloat16):  # a finite sum may overflow in these
            self._observe(grad)
        return grad

    def _flat(self, grad: torch.Tensor) -> Any:
        """Return a gradient as 1-D float32: on the GPU if it computes steps, else on the host."""
        if self._place is None:
            if grad.device not in self._made_on:
                self._warn_of_move(grad.device)
            return arrays.flat_float32(grad)
        if grad.device != self._place:
            raise UnsupportedError(
                f"a gradient is on {grad.device}, but the compressor was made of a model on "
                f"{self._place}; make it after the model has been moved"
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
        """Tell the engine whether ``tensor`` is finite; return False if it is known not to be.

        On a GPU that computes steps it does not wait for the result and returns True.
        """
        if self._engine.device is not None:
            self._engine.observe_on_device(arrays.not_finite(tensor))
            return True
        finite = bool(torch.isfinite(tensor).all())
        self._engine.observe(finite)
        return finite

    def _stream(self) -> torch.cuda.Stream | None:
        """Return the current CUDA stream of the GPU that computes steps; None without one."""
        is_gpu = self._place is not None and self._place.type == "cuda"
        return torch.cuda.current_stream(self._place) if is_gpu else None

    def _begin(self) -> None:
        """Prepare a step, before its first gradient."""
        self._engine.follow_loss_scale(self.loss_scale())
        if self._shadow is not None:
            self._shadow.begin(self._connection.n_handshakes)
        self._begin_record()
        if self._gathers:
            self._connection.barrier()

    def _open(self) -> None:
        """Wait until all ranks have begun this step; then start the replica check."""
        if not self._opened:
            self._connection.open()
            self._opened = True
            in_place = self._optimized.read_in_place
            self._replicas.begin(self._engine.step, self._engine.device, in_place)

    def _finish(self) -> None:
        """Finish all buckets of the step, when Horovod has started all of its gradients."""
        self._check()
        try:
            self.pipeline.complete()
            self._open()
            self.pipeline.finish()
            if self._shadow is not None:
                self._shadow.finish()
            self._connection.leave_together()
            # These do not change any more: Horovod puts the sums into other memory.
            self._end_record(self._engine.step)
            self._finished, self._stream_of_sums = True, self._stream()
        except BaseException as error:
            self._broken_by = repr(error)
            if not isinstance(error, (FFTCompError, KeyboardInterrupt)):  # this rank's only
                time.sleep(_GRACE_S)
            raise
        self._replicas.finish(self._settings.timeout_s)
        self._optimized.warn_of_unexchanged()
        self._not_finite.observe(self._engine.bad, self._engine.rank, self._ranks)

    def _check(self) -> None:
        self._connection.check()
        self.check_unbroken()

    def begins(self) -> bool:
        """Return whether the next gradient begins a step; close the finished one before.

        Raises UnsupportedError if a gradient of the finished step was not returned.
        """
        if self._finished:
            if self._n_pending:
                self._n_pending = 0
                raise UnsupportedError(
                    "a new step begins before all gradients of the last one were returned: this "
                    "compressor serves two optimizers; make another for the second"
                )
            self._close()
        return not self._parameters.seen

    def close_if_complete(self) -> None:
        """Close the step if all of its gradients were returned."""
        if self._finished and not self._n_pending:
            self._close()

    def settle(self) -> None:
        """Close the last step, before its results are read; ValueError if a step is under way."""
        if self._finished:
            self._close()
        if self._parameters.seen:
            raise ValueError(
                "a step is under way: call this after optimizer.step() or synchronize(), "
                "before the next backward()"
            )

    def _close(self) -> None:
        """Close the finished step and commit its state."""
        # This may run in the first hook of the next step, on another stream. Settled there, memory
        # of the sums' stream could be reused before kernels have read it.
        now, then = self._stream(), self._stream_of_sums
        with contextlib.nullcontext() if now == then else torch.cuda.stream(then):
            self._engine.settle()
        if now is not None and then is not None and now != then:
            now.wait_stream(then)
        self._parameters.begin_step()
        self._opened = self._finished = False
        self._bad = {}
        self._note_closed()

    def abandon(self) -> None:
        """Discard a step that an error interrupted."""
        self._parameters.begin_step()
        self.pipeline.abandon()
        super().abandon()
        self._opened = self._finished = False
        self._n_pending = 0
