"""Step driver of the PyTorch adapter: exchanges the gradients that Horovod's hooks pass on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from horovod_fftcomp.adapter import steps
from horovod_fftcomp.adapter.stalls import Progress
from horovod_fftcomp.adapter.torch_tensors import arrays
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.adapter.torch_tensors.thrown_away import ThrownAway
from horovod_fftcomp.engine.overlap import Pipeline, Slot
from horovod_fftcomp.errors import FFTCompError, UnsupportedError, warn
from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice
from horovod_fftcomp.torch.gradients import GradientContext, StepGradients
from horovod_fftcomp.torch.horovod_internals import wait_for_horovod

# Seconds that a rank waits before it raises an error. A rank that ends shuts Horovod down on all
# ranks. One that starts an operation at that moment may hang: it holds the GIL and waits for a lock
# whose holder waits for the GIL. So the others get time to start theirs; ranks that only wait then
# raise errors of their own. If the time is too short, the launcher kills the rank that hangs, since
# this one has ended with an error.
GRACE_S = 2.0


class TorchStepDriver(steps.StepDriver):
    """Step driver of one optimizer.

    ``join(begins)`` is called before gradients that are not expected, until the ranks are connected
    and when a step ``begins``.
    """

    _TO_CONTINUE = "one into the optimizer"

    def __init__(
        self,
        parts: steps.Parts,
        parameters: Parameters,
        optimized: OptimizedParameters,
        join: Callable[[bool], None],
    ) -> None:
        super().__init__(parts)
        self._gradients = StepGradients(parameters, parts.slots)
        self.thrown_away = ThrownAway(parameters, parts.engine)
        self._optimized, self._join = optimized, join
        self._bad: dict[str, bool] = {}  # dense tensors of this step, see ``NotFiniteWarning``
        connection, engine = parts.connection, parts.engine
        self._sums: dict[int, list[Any]] = {}  # of this step, by bucket
        done, timeout_s = self._sums.__setitem__, parts.settings.timeout_s
        where = connection.send, self._name, self._set
        self.pipeline = Pipeline(engine, *where, done, timeout_s)
        connection.watch.follow(self, parameters.names)
        device = engine.device
        self._place = device.place if isinstance(device, TorchDevice) else None
        self._made_on = {parameter.device for parameter in parameters.tensors}
        # Of each bucket that was not started, by position; None for frozen parameters.
        self._arrived: list[dict[int, torch.Tensor | None]] = [{} for _ in engine.buckets]
        self._opened = self._finished = False
        self._opens_early = False  # since the replica check is due in this step
        self._stream_of_sums: torch.cuda.Stream | None = None
        self._n_pending = 0  # gradients that were started and not finished
        self._warned_of_change = False

    def progress(self) -> Progress:
        """Return this rank's progress; called in the watch's thread."""
        n_seen, n_pending = len(self._gradients.seen), self._n_pending
        counts = (self._engine.step, n_seen, n_seen - n_pending)
        doing = f"step {self._engine.step}"
        inside = n_pending > 0 and not self._broken_by
        return Progress(*counts, inside, self.pipeline.is_computing, doing=doing)

    def missing(self) -> list[int]:
        """Return the numbers of the parameters whose gradients have not come in this step."""
        seen = set(list(self._gradients.seen))  # copied, since it grows meanwhile
        return [c.number for c in self._gradients.contexts if c.number not in seen]

    # Horovod calls these two for each gradient. What is needed once for a step or a bucket is in
    # other methods, so that a gradient in the order of the last step costs these two calls alone.

    def start_gradient(self, grad: torch.Tensor) -> tuple[torch.Tensor, GradientContext]:
        """Start the exchange of a gradient; return the tensor to be allreduced, and a context."""
        if self._broken_by or self._connection.watch.failure:
            self._check()
        seen, context = self._gradients.seen, self._gradients.expected
        if context is None or context.parameter.grad is not grad or context.number in seen:
            context = self._unexpected(grad)
        seen[context.number] = context
        self._gradients.expected = context.following
        self._n_pending += 1
        self.pipeline.last_came = time.perf_counter()
        self.dense_nbytes += context.dense_nbytes
        context.grad, context.version = grad, grad._version
        if context.slot is None:
            sent = arrays.sendable(grad)
        else:
            sent = torch.ones(1, dtype=torch.float32, device=grad.device)
            bucket, position = context.slot
            arrived = self._arrived[bucket]
            arrived[position] = grad if context.parameter.requires_grad else None
            if len(arrived) == len(self._engine.buckets[bucket].tensors):
                self._start(bucket)
        self.other_nbytes += sent.nbytes
        if self._opens_early or self.pipeline.encoding or self.pipeline.inner:
            if not self._opened and self._connection.can_open():
                self._open()
            if self._opened:  # all ranks have begun this step
                self.pipeline.advance()
        return sent, context

    def finish_gradient(
        self, reduced: torch.Tensor, context: GradientContext | None
    ) -> torch.Tensor:
        """Return the reduced gradient; ``reduced``: allreduce of ``start_gradient``'s result."""
        if reduced.is_cuda:
            wait_for_horovod(reduced)
        if context is None:  # a sparse gradient that Horovod gathered itself
            values = reduced.coalesce().values() if reduced.is_sparse else reduced
            arrays.observe(self._engine, values)
            return reduced
        if not self._finished:
            self._finish()
        total, grad = context.total, context.grad
        assert grad is not None  # set by ``start_gradient``
        context.total = context.grad = None
        if total is None:  # sent dense: Horovod reduced the gradient itself
            if not self._engine.buckets:
                self._engine.observe(True)  # no state depends on it
            elif not arrays.observe(self._engine, reduced):
                self._bad[context.name] = False
            value = reduced
        else:  # Horovod reduced ones: the result has its op's factor
            value = total.mul_((reduced / self._engine.world_size).reshape(()).to(total.device))
        if (value.dtype, value.stride(), value.device) != (grad.dtype, grad.stride(), grad.device):
            value = self._converted(value, grad, context.slot)
        self._n_pending -= 1
        if self._bad and not self._n_pending:
            self._not_finite.observe(self._bad, self._engine.rank, self._set.ranks)
        return value

    def _unexpected(self, grad: torch.Tensor) -> GradientContext:
        """Return the context of a gradient that begins a step or comes in a new order."""
        begins = self._begins()
        self._join(begins)
        context = self._gradients.find(grad)
        if begins:
            self._begin()
        return context

    def _start(self, bucket: int) -> None:
        """Start a bucket's exchange with the gradients that have come."""
        arrived, self._arrived[bucket] = self._arrived[bucket], {}
        places = {grad.device for grad in arrived.values() if grad is not None}
        if self._place is None:
            for place in places - self._made_on:
                self._made_on.add(place)
                warn(
                    f"the compressor was made before the model was moved to {place}: gradients are "
                    "copied to the host and compressed there, which is slower; make it after the "
                    "model has moved"
                )
        elif others := places - {self._place}:
            raise UnsupportedError(
                f"a gradient is on {others.pop()}, but the compressor was made of a model on "
                f"{self._place}; make it after the model has been moved"
            )
        grads = arrays.flat_float32(arrived.values(), in_place=self._place is not None)
        flat = dict(zip(arrived, grads, strict=True))
        self.pipeline.start(bucket, flat)
        self._record(bucket, flat)

    def _converted(
        self, value: torch.Tensor, grad: torch.Tensor, slot: Slot | None
    ) -> torch.Tensor:
        """Return a reduced value with the dtype, strides and device of its gradient.

        Horovod passes it to ``grad.set_``, so other strides would drop a channels-last layout.
        """
        converted = torch.empty_like(grad).copy_(value)
        # A finite sum may overflow in these.
        if slot is not None and grad.dtype in (torch.float16, torch.bfloat16):
            arrays.observe(self._engine, converted)
        return converted

    def _stream(self) -> torch.cuda.Stream | None:
        """Return the current CUDA stream of the GPU that computes steps; None without one."""
        is_gpu = self._place is not None and self._place.type == "cuda"
        return torch.cuda.current_stream(self._place) if is_gpu else None

    def _begin(self) -> None:
        """Prepare a step, before its first gradient."""
        self._engine.follow_loss_scale(self.loss_scale())
        self._note_begin()
        self.thrown_away.begin()
        self._opens_early = self.replicas.is_due(self._engine.step)
        if self.gathers:
            self._connection.barrier()

    def _open(self) -> None:
        """Wait until all ranks have begun this step; then start the replica check."""
        self._connection.open()
        self._opened, self._opens_early = True, False
        self.replicas.begin(self._engine.step)

    def _finish(self) -> None:
        """Finish all buckets of the step, when Horovod has started all of its gradients."""
        self._check()
        try:
            for bucket, arrived in enumerate(self._arrived):
                if arrived:  # with zeros for the others; without any it is not exchanged
                    self._start(bucket)
            if not self._opened:
                self._open()
            self.pipeline.finish()
            self._connection.leave_together()
            self._end_record(self._engine.step)
            self._take_sums()
            self._gradients.expected = None  # the next one begins a step
            self._finished, self._stream_of_sums = True, self._stream()
        except BaseException as error:
            self._broken_by = repr(error)
            if not isinstance(error, (FFTCompError, KeyboardInterrupt)):  # this rank's only
                time.sleep(GRACE_S)
            raise
        if (first := next(iter(self._gradients.seen.values()), None)) is not None:
            self.thrown_away.end(first.number, first.total)
        self.replicas.finish(self._settings.timeout_s)
        self._optimized.warn_of_unexchanged(self._gradients.seen)
        self._not_finite.observe(self._engine.bad, self._engine.rank, self._set.ranks)

    def _take_sums(self) -> None:
        """Take the buckets' sums, for the gradients that are to be returned."""
        for context in self._gradients.seen.values():
            if context.slot is not None and context.grad is not None:
                if context.grad._version != context.version and not self._warned_of_change:
                    self._warn_of_change(context.name)
                bucket, position = context.slot
                total = torch.as_tensor(self._sums[bucket][position])
                context.total = total.view(context.grad.shape)
        self._sums.clear()

    def _warn_of_change(self, name: str) -> None:
        self._warned_of_change = True
        warn(
            f"the gradient of {name!r} was changed between backward() and synchronize(), which "
            "replaces it by the average of the gradients before the change. Clip or unscale after "
            'optimizer.synchronize(): docs/training.md, "Gradient clipping"'
        )

    def _check(self) -> None:
        self._connection.watch.check()
        self.check_unbroken()

    def _begins(self) -> bool:
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
        return not self._gradients.seen

    def close_if_complete(self) -> None:
        """Close the step if all of its gradients were returned."""
        if self._finished and not self._n_pending:
            self._close()

    def settle(self) -> None:
        """Close the last step, before its results are read; ValueError if a step is under way."""
        if self._finished:
            self._close()
        if self._gradients.seen:
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
        self._gradients.begin_step()
        self._opened = self._finished = False
        self._bad = {}
        self._note_closed()

    def abandon(self) -> None:
        """Discard a step that an error interrupted."""
        self._gradients.abandon()
        self._arrived = [{} for _ in self._arrived]
        self.pipeline.abandon()
        self._sums.clear()
        super().abandon()
        self._opened = self._finished = False
        self._n_pending, self._bad = 0, {}
