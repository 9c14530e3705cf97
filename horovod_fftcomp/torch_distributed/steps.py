"""Step driver of the adapter for DDP: exchanges the gradients that DDP's hook passes on."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from horovod_fftcomp.adapter import steps
from horovod_fftcomp.adapter.stalls import Progress
from horovod_fftcomp.adapter.threads import Worker
from horovod_fftcomp.adapter.torch_tensors import arrays
from horovod_fftcomp.adapter.torch_tensors.parameters import Parameters
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.adapter.torch_tensors.thrown_away import ThrownAway
from horovod_fftcomp.engine.overlap import Inline, Pending, Pipeline
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch_distributed.gradients import Arrival, ParameterNumbers
from horovod_fftcomp.torch_distributed.side_stream import SideStream
from horovod_fftcomp.torch_distributed.streams import StreamNetwork
from horovod_fftcomp.types import Array

# Dense gradients are sent together up to this size, above which an allreduce takes longer than it
# takes to start one.
DENSE_NBYTES = 1_000_000


class Setup(NamedTuple):
    """What a compressor tells its step driver.

    ``optimized``: the parameters that ranks compare; ``is_perturbed`` tells whether they are meant
    to differ in the present pass. ``streams``: the network of rounds for which streams wait; None
    if the host waits for all.
    """

    parameters: Parameters
    stream: SideStream
    optimized: OptimizedParameters
    is_perturbed: Callable[[], bool]
    streams: StreamNetwork | None


class _DenseGradients(NamedTuple):
    """Dense gradients that were sent together, by the parameters' numbers.

    ``buffer``: that of DDP, in the order of its memory; None if they were sent in C order.
    """

    views: Mapping[int, torch.Tensor]
    buffer: torch.Tensor | None = None


class DDPStepDriver(steps.StepDriver):
    """Step driver of one model under DDP.

    A thread of its own takes the buckets of DDP in their order, which is the same on all ranks, and
    encodes, sends and decodes. The training thread, or autograd's thread of a GPU, waits for it at
    the end of the backward pass, raises its errors there and closes the step; between steps the
    training thread alone uses the engine. All of it happens in the hook where nothing of a
    step takes the host long: with ``Setup.streams``, and on a CPU without compressed tensors.
    ``keeps_unused``: whether DDP discards the averages of parameters that no rank has used.
    """

    _TO_CONTINUE = "one into the model and the optimizer"

    def __init__(self, parts: steps.Parts, setup: Setup, keeps_unused: bool) -> None:
        super().__init__(parts)
        parameters, self._stream, self._optimized, self._is_perturbed, self._streams = setup
        self._numbers, self._names = ParameterNumbers(parameters), parameters.names
        self._keeps_unused = keeps_unused
        self.thrown_away = ThrownAway(parameters, parts.engine)
        self._scale = 1.0 / parts.engine.world_size
        parts.engine.in_place = None if parts.engine.device is not None else self._scale
        where = self._connection.send, self._name, self._set
        timeout_s = parts.settings.timeout_s
        self.pipeline = Pipeline(parts.engine, *where, self._deliver, timeout_s, is_ordered=True)
        self._worker: Worker | Inline = Inline()
        if self._streams is None and (parts.engine.buckets or self._stream.is_used):
            self._worker = Worker("fftcomp-steps")
            self._worker.submit(self._stream.enter)
        self._members = [
            [parameters.names.index(tensor.name) for tensor in bucket.tensors]
            for bucket in parts.engine.buckets
        ]
        self._reset()
        parts.connection.watch.follow(self, parameters.names)

    def _reset(self) -> None:
        self._arrivals: dict[int, Arrival] = {}  # of this step, by the parameter's number
        self._arrived: list[dict[int, Array | None]] = [{} for _ in self._engine.buckets]
        self._sent: dict[int, Mapping[int, Array | None]] = {}  # gradients of started buckets
        self._collected: dict[int, torch.Tensor] = {}  # dense gradients that were not sent yet
        self._dense: list[tuple[Pending, _DenseGradients]] = []
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._bad: dict[str, bool] = {}  # dense tensors, see ``NotFiniteWarning``
        self._returned = 0
        self._inside = False

    # Called in the training thread, or during the backward pass in autograd's thread of a GPU.

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket of DDP; return the future of its averages."""
        arrival = Arrival(bucket.buffer(), self._numbers.gradients(bucket), bucket.is_last())
        self.pipeline.last_came = time.perf_counter()
        self._submit(arrival, bucket.index() == 0)
        if arrival.is_last:
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
        return arrival.future

    def average(self, values: Sequence[torch.Tensor]) -> None:
        """Replace ``values``, one for each parameter, by their averages over ranks; one step."""
        self._submit(Arrival(torch.empty(0), dict(enumerate(values)), is_last=True), begins=True)
        self._close()

    def _submit(self, arrival: Arrival, begins: bool) -> None:
        self._connection.watch.check()
        if begins or not self._inside:
            self.check_unbroken()  # else the end of the backward pass raises the error itself
        if begins and self._inside:
            self._broken_by = "an error in the backward pass"
            self.check_unbroken()
        if begins:
            self.thrown_away.begin()
        self._inside = True
        self._worker.submit(self._take, arrival, begins, self._stream.mark())

    def _close(self) -> None:
        """Wait for the end of the step, and commit its state; the end of a backward pass."""
        error = self._ended.get()
        try:
            if error is not None:
                raise error
            step, ranks = self._engine.step, self._set.ranks
            with self._stream.use():
                self.replicas.finish(self._settings.timeout_s)
                self._not_finite.observe(self._engine.bad | self._bad, self._engine.rank, ranks)
                self._end_record(step)
                self._engine.settle()
                self._optimized.warn_of_unfrozen()
                for number, arrival in itertools.islice(self._arrivals.items(), 1):
                    self.thrown_away.end(number, arrival.gradients[number])
        finally:  # whoever frees gradients or state now must not give their memory away too early
            self._stream.join()
        self._reset()
        self._note_closed()

    def settle(self) -> None:
        """Raise ValueError if a step is under way; a complete one is closed already."""
        if self._inside:
            raise ValueError("a step is under way: call this after backward()")
        self._stream.join()

    def close_if_complete(self) -> None:
        """Let results of the last step be read on another stream; the step is closed already."""
        self._stream.join()

    def abandon(self) -> None:
        """Discard a step that an error interrupted."""
        self._worker.submit(lambda: None).result()
        self._stream.join()
        super().abandon()
        self.pipeline.abandon()
        self._reset()

    # Called in the watch's thread.

    def progress(self) -> Progress:
        """Return this rank's progress."""
        step, inside = self._engine.step, self._inside and not self._broken_by
        counts = len(self._arrivals), self._returned
        if not (self._inside or self._broken_by) and self._streams and self._streams.is_under_way():
            # The host has launched the last step and goes on, the GPU waits for other ranks.
            step, inside, counts = step - 1, True, (len(self._names), 0)
        busy = self.pipeline.is_computing
        return Progress(step, *counts, inside, busy, doing=f"step {step}")

    def missing(self) -> list[int]:
        """Return the numbers of the parameters whose gradients have not come in this step."""
        return [number for number in range(len(self._names)) if number not in self._arrivals]

    # Called in the worker's thread.

    def _take(self, arrival: Arrival, begins: bool, ready: torch.cuda.Event | None) -> None:
        """Exchange the gradients of a bucket of DDP; the last one ends the step.

        ``ready``: when a GPU has written them. Errors go to the training thread: DDP would replace
        those of a future by one of its own.
        """
        try:
            if not self._broken_by:
                with self._stream.use(ready):
                    self._exchange(arrival, begins)
            if arrival.is_last:
                self._ended.put(None)
        except BaseException as error:
            self._broken_by = repr(error)
            self._ended.put(error)
        if self._broken_by:
            with self._stream.use():
                for waiting in [arrival, *self._arrivals.values()]:
                    waiting.complete()

    def _exchange(self, arrival: Arrival, begins: bool) -> None:
        if begins:
            self._begin()
        grads = arrival.gradients
        self._arrivals |= dict.fromkeys(grads, arrival)
        self.dense_nbytes += sum(4 * grad.numel() for grad in grads.values())
        self._collect_dense(arrival)
        slots = {number: slot for number in grads if (slot := self._slots[number]) is not None}
        on_gpu = self._engine.device is not None
        values = arrays.flat_float32([grads[number] for number in slots], in_place=on_gpu)
        flat = dict(zip(slots, values, strict=True))
        unused = self._unused_everywhere(flat) if self._keeps_unused else ()
        for number, slot in slots.items():
            self._record(slot.bucket, {slot.position: flat[number]})
            arrived = self._arrived[slot.bucket]
            arrived[slot.position] = None if number in unused else flat[number]
            if len(arrived) == len(self._engine.buckets[slot.bucket].tensors):
                self._arrived[slot.bucket], self._sent[slot.bucket] = {}, arrived
                self.pipeline.start(slot.bucket, arrived)
        self.pipeline.advance()
        if arrival.is_last:
            self._finish()

    def _begin(self) -> None:
        """Compare what the ranks are about to do; connect all if one is not connected.

        Without compressed tensors only a rank that is not connected asks. Sums and payloads of
        known size never meet a header, see ``rounds``, so ranks that do different things within a
        step wait, and the watch reports it.
        """
        self._note_begin()
        timeout_s, is_up = self._settings.timeout_s, self._connection.is_up
        if self._engine.buckets or not is_up:
            unconnected = np.zeros(0 if is_up else 1, np.uint8)
            if self._send(Round("allgather", unconnected), "step").wait(timeout_s).size:
                if is_up:
                    self._connection.reset()
                self._connection.connect()
                self._connection.open()
        self._engine.follow_loss_scale(self.loss_scale())
        self.replicas.begin(self._engine.step, self._is_perturbed())

    def _finish(self) -> None:
        """Complete all exchanges of the step."""
        self.pipeline.finish()
        for pending, dense in self._dense:
            self._deliver_dense(pending.wait(self._settings.timeout_s), dense)

    def _unused_everywhere(self, flat: Mapping[int, Any]) -> set[int]:
        """Return the numbers of the parameters whose gradients are zero on all ranks.

        DDP discards the averages of parameters that no rank has used. Their residuals stay.
        """
        if not flat:
            return set()
        used = torch.stack([torch.as_tensor(values).any() for values in flat.values()])
        flags = Round("allreduce", used.float().cpu().numpy())
        self.other_nbytes += flags.data.nbytes
        counts = self._send(flags, "used").wait(self._settings.timeout_s)
        return {number for number, count in zip(flat, counts, strict=True) if not count}

    def _collect_dense(self, arrival: Arrival) -> None:
        """Send the dense gradients together, once they are large enough, or at the step's end.

        A large bucket of DDP that has no others is summed in its own memory.
        """
        views = {n: view for n, view in arrival.gradients.items() if self._slots[n] is None}
        if len(views) == len(arrival.gradients) and arrival.is_whole(DENSE_NBYTES):
            self._send_dense(arrival.buffer, _DenseGradients(views, arrival.buffer))
            views = {}
        for number, view in views.items():
            if self._collected and next(iter(self._collected.values())).dtype != view.dtype:
                self._send_collected()
            self._collected[number] = view
        nbytes = sum(view.nbytes for view in self._collected.values())
        if self._collected and (arrival.is_last or nbytes >= DENSE_NBYTES):
            self._send_collected()

    def _send_collected(self) -> None:
        views, self._collected = self._collected, {}
        flat = torch.cat([view.detach().reshape(-1) for view in views.values()])
        self._send_dense(arrays.sendable(flat), _DenseGradients(views))

    def _send_dense(self, flat: torch.Tensor, dense: _DenseGradients) -> None:
        data: Any = flat.detach()
        round_ = Round("allreduce", data if self._streams else data.cpu().numpy(), in_place=True)
        self.other_nbytes += round_.data.nbytes
        self._dense.append((self._send(round_, "dense"), dense))

    def _deliver_dense(self, total: Any, dense: _DenseGradients) -> None:
        """Write the averages of dense gradients that were sent together."""
        sums, (views, buffer) = torch.as_tensor(total), dense
        if self._streams and self._engine.buckets:
            finite = arrays.observe(self._engine, sums)
        else:
            finite = not self._engine.buckets or bool(torch.isfinite(sums).all())
            self._engine.observe(finite)
        sums.mul_(self._scale)
        if buffer is not None and buffer.data_ptr() != sums.data_ptr():
            buffer.detach().copy_(sums)  # back to a GPU
        if buffer is not None and finite:  # nothing to do one by one
            self._returned += len(views)
            self._arrivals[next(iter(views))].complete()
            return
        pieces = sums.split([view.numel() for view in views.values()])
        for (number, view), own in zip(views.items(), pieces, strict=True):
            if not finite and not bool(torch.isfinite(own).all()):
                self._bad[self._names[number]] = False
            if buffer is None:
                view.detach().copy_(own.view(view.shape))
            self._finish_one(number)

    def _deliver(self, bucket: int, sums: Sequence[Array]) -> None:
        """Write the averages of a bucket of the engine, which may be written already."""
        sent = self._sent.pop(bucket)
        for position, (number, total) in enumerate(zip(self._members[bucket], sums, strict=True)):
            if number not in self._arrivals:  # no rank has a gradient of it
                continue
            view = self._arrivals[number].gradients[number]
            there = torch.as_tensor(total).to(view.device).view(view.shape)
            with torch.no_grad():
                if total is not sent[position]:
                    torch.mul(there, self._scale, out=view)
                elif there.data_ptr() != view.data_ptr():
                    view.copy_(there)
            self._finish_one(number)
            if view.dtype in (torch.float16, torch.bfloat16):  # a finite sum may overflow in these
                arrays.observe(self._engine, view)

    def _finish_one(self, number: int) -> None:
        self._arrivals[number].finish(number)
        self._returned += 1

    def _send(self, round_: Round, what: str) -> Pending:
        return self._connection.send(round_, f"{self._name}.{what}", self._set)
