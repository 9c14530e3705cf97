"""Step driver of the TensorFlow adapter: the Python functions that a step's graph calls.

Data dependencies in the graph order the calls: ``enter_barrier``, ``begin``, for each bucket
``encode``, ``advance`` for each round except the last and ``decode``, and after all buckets
``end``. Without buckets ``must_synchronize`` is called first, and usually alone. None of them
waits for another, but all take one lock, since an engine must not be used by two threads at once.
With GPU tensors, ``encode``, ``advance`` and ``decode`` are called once for all buckets.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from horovod_fftcomp.adapter import steps
from horovod_fftcomp.adapter.connection import JOINED
from horovod_fftcomp.adapter.handshake import size_of
from horovod_fftcomp.adapter.settings import is_elastic
from horovod_fftcomp.adapter.stalls import Progress
from horovod_fftcomp.errors import FFTCompError, UnsupportedError
from horovod_fftcomp.kernels.cuda import on_host
from horovod_fftcomp.kernels.threads import ieee_arithmetic
from horovod_fftcomp.monitor.not_finite import DENSE
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.tensorflow import horovod_internals, rounds
from horovod_fftcomp.tensorflow.variables import Variables

if TYPE_CHECKING:
    from horovod_fftcomp.tensorflow.device import TensorFlowMemory

_NO_STEP = Progress(0, 0, 0, inside=False)
_FLOAT32_MAX = float(np.finfo(np.float32).max)

SCALES = (
    "the ranks' loss scales differ, so their gradients cannot be added. With "
    "backward_passes_per_step > 1, a LossScaleOptimizer adjusts the scale by gradients that are "
    "not reduced yet: use a fixed scale (dynamic=False), or one pass for each step"
)


Members = Mapping[int, Sequence[int]]  # by bucket, ascending positions of tensors in it


class Load(NamedTuple):
    """Exchange of one traced step: its buckets, and its bytes."""

    buckets: frozenset[int]
    dense_nbytes: int  # all gradients in float32
    other_nbytes: int  # what Horovod itself reduces
    identified: tuple[int, ...]  # variables whose memory ``begin`` checks


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method that the graph calls: lock, IEEE arithmetic, errors end the step."""

    @functools.wraps(method)
    def run(self: TensorFlowStepDriver, *arguments: Any) -> Any:
        with self.lock, ieee_arithmetic():
            self._connection.watch.check()
            self.check_unbroken()
            self._is_busy = True
            try:
                return method(self, *arguments)
            except BaseException as error:
                self._broken_by = repr(error)
                self._note_end()
                if isinstance(error, FFTCompError) and is_elastic():
                    raise horovod_internals.FatalInElasticJob(repr(error)) from error
                raise
            finally:
                self._is_busy = False

    return run


class TensorFlowStepDriver(steps.StepDriver):
    """Step driver of one optimizer or tape.

    ``hashes`` sends the hashes of the parameters; ``rejoin`` is called if the number of ranks has
    changed. ``optimizers_set``: the process set of the optimizer or tape, used by handshake and
    barrier, which should be that of the compressor. ``memory``: conversions of GPU tensors, None if
    the CPU computes steps.
    """

    _TO_CONTINUE = "the last good checkpoint into the model"

    def __init__(
        self,
        parts: steps.Parts,
        variables: Variables,
        hashes: rounds.GraphRound,
        rejoin: Callable[[], Any],
        memory: TensorFlowMemory | None,
    ) -> None:
        super().__init__(parts)
        self.lock = threading.RLock()
        self._variables = variables
        self.optimizers_set = self._set
        self._rejoin, self.memory = rejoin, memory
        self._handshake, self.hashes = rounds.GraphRound(), hashes
        parts.connection.watch.follow(self, variables.names)
        self._progress = _NO_STEP  # counted in buckets
        self._encoded: set[int] = set()  # buckets of this step
        self._poisoned = ""  # tensor set to NaN because a dense one is not finite, or DENSE
        self._scale, self._is_busy = 1.0, False
        self._alone = False  # elastic, and no other rank is left
        self._sent: dict[int, Round | None] = {}  # each bucket's present round
        self._undecoded: set[int] = set()  # buckets of this step
        self._n_buckets = 0
        self._begun = False
        self.wait_s = self.encode_hidden_s = 0.0
        self.encode_wait_s = 0.0  # operations wait for encodings, not the training thread
        self._spans: list[tuple[float, float]] = []  # begin and end of this step's encodings
        self._idle_since = 0.0

    # The graph calls these.

    @_guarded
    def must_synchronize(
        self, load: Load, step: np.ndarray, first_grad: np.ndarray, scale: np.ndarray, *memory: Any
    ) -> np.bool_:
        """Return whether a step without buckets needs handshake or replica check.

        The result is the same on all ranks. If False, Horovod exchanges everything and this call
        begins the step.
        """
        del step, first_grad  # inputs that order the calls
        self._close_last(load, memory)
        if self._connection.is_up and not is_elastic():
            if not self._compares(self._engine.step):
                self._note("a step that Horovod exchanges", self._engine.step, 1, 1)
                self._enter(load, scale)
                return np.False_
        return np.True_

    @_guarded
    def enter_barrier(
        self, step: np.ndarray, first_grad: np.ndarray, scale: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's inputs of the barrier, and of the handshake if one is due."""
        del step, first_grad  # inputs that order the calls
        is_over = self._begun and not self._undecoded
        self._note("the barrier of a step", self._engine.step + is_over, 1)
        if not self._connection.is_up and size_of(self._set) > 1:
            self._connection.start_handshake(self._handshake, self.optimizers_set)
        return np.array([1, scale], np.float32), self._handshake.take()

    @_guarded
    def begin(
        self,
        load: Load,
        step: np.ndarray,
        present: np.ndarray,
        handshakes: np.ndarray,
        scale: np.ndarray,
        *memory: np.ndarray,
    ) -> Any:
        """Close the last step and begin one, after the barrier; return 0 and hashes to gather."""
        del step  # an input that orders the steps
        self._close_last(load, memory)
        self._note(f"step {self._engine.step}", self._engine.step, 2)
        if handshakes.size:
            self._handshake.output = handshakes
            self._connection.open()
        if self.gathers:
            self._check_presence(present, scale)
        n_ranks = size_of(self._set)
        self._alone = n_ranks == 1
        if n_ranks != self._engine.world_size:
            self._rejoin()  # after an elastic reset
        self._enter(load, scale)
        if not self._alone and self._compares(self._engine.step):
            self.replicas.begin(self._engine.step)
        return np.int32(0), self.hashes.take()

    def _close_last(self, load: Load, memory: Sequence[np.ndarray]) -> None:
        """Close the last step; UnsupportedError if it is incomplete or variables differ."""
        for number, values in zip(load.identified, memory, strict=True):
            self._variables.check(number, values)
        if self._begun and self._undecoded:
            raise UnsupportedError(
                "a step begins before all gradients of the last one were exchanged: this "
                "compressor serves two models or tapes, or the last step was interrupted; make "
                "another compressor for the second, or load a state_dict()"
            )
        self._close()

    def _enter(self, load: Load, scale: np.ndarray) -> None:
        """Begin a step on this rank, after the exchanges with others."""
        self._note_begin()
        self._scale = float(scale)
        self._engine.follow_loss_scale(self._scale)
        self._begun, self._undecoded, self._n_buckets = True, set(load.buckets), len(load.buckets)
        self.dense_nbytes += load.dense_nbytes
        self.other_nbytes += load.other_nbytes

    def _compares(self, step: int) -> bool:
        """Return whether a step compares parameters; not the first: Keras broadcasts after it."""
        return step > 0 and self.replicas.is_due(step)

    def _check_presence(self, present: np.ndarray, scale: np.ndarray) -> None:
        """Raise UnsupportedError on all ranks if one called hvd.join or loss scales differ."""
        if present[0] != size_of(self.optimizers_set):
            raise UnsupportedError(JOINED)
        if abs(present[1] - present[0] * scale) > 1e-5 * present[1]:
            raise UnsupportedError(SCALES)

    @_guarded
    def encode(self, members: Members, begun: Any, poison: Any, *grads: Any) -> list[Any]:
        """Encode buckets; return codes and messages of their first rounds.

        ``poison`` is not finite if a gradient that Horovod exchanges is not; the step is then
        skipped on all ranks.
        """
        del begun  # an input that orders this after ``begin``
        began, worst = time.perf_counter(), float(poison)  # on a GPU this waits, without the GIL
        remaining, made = iter(grads), {}
        for bucket, positions in members.items():
            arrived = {position: self._array(next(remaining)) for position in positions}
            made[bucket] = None if self._alone else self._start(bucket, arrived, worst)
            worst = 0.0
        messages = self._messages(made)
        self._encoded.update(members)
        self._progress = self._progress._replace(handed=self._progress.handed + len(members))
        if not self._alone:
            self._idle_since = time.perf_counter()
            self._spans.append((began, self._idle_since))
        return messages

    def _start(self, bucket: int, arrived: dict[int, Any], poison: float) -> Round:
        """Start a bucket's exchange; ``arrived``: gradients by position."""
        tensors = self._engine.buckets[bucket].tensors
        self._record(bucket, arrived)
        if not math.isfinite(poison):
            values = on_host(arrived[first := min(arrived)], self._engine.device)
            self._poisoned = tensors[first].name if np.isfinite(values).all() else DENSE
            arrived[first] = np.full(math.prod(tensors[first].shape), np.nan, np.float32)
        round_ = self._engine.resume(bucket, [arrived.get(n) for n in range(len(tensors))])
        assert isinstance(round_, Round)  # a scheme has one round at least
        return round_

    @_guarded
    def advance(self, buckets: Sequence[int], *outputs: Any) -> list[Any]:
        """Take the outputs of rounds; return codes and messages of the next rounds."""
        made = zip(buckets, map(self._received, buckets, outputs), strict=True)
        return self._messages(dict(made))

    @_guarded
    def decode(self, members: Members, limits: Sequence[float], *outputs: Any) -> list[Any]:
        """Take the last rounds' outputs; return 0 and the sums of the tensors of ``members``.

        A sum beyond its limit would not be finite in the dtype of its gradient; the step is then
        skipped.
        """
        made: list[Any] = []
        for (bucket, positions), output in zip(members.items(), outputs, strict=True):
            if self._received(bucket, output) is not None:
                raise AssertionError(f"bucket {bucket} has more rounds than its graph")
            tensors = self._engine.buckets[bucket].tensors
            if self._alone:
                sums = [np.zeros(math.prod(tensor.shape), np.float32) for tensor in tensors]
            else:
                sums = self._engine.sums(bucket)
            self._undecoded.discard(bucket)
            self._progress = self._progress._replace(returned=self._progress.returned + 1)
            for position in positions:
                if limits[len(made)] < _FLOAT32_MAX:
                    self._check_limit(sums[position], limits[len(made)])
                made.append(self._tensor(sums[position]))
        self._wait()
        return [np.int64(0), *made]

    def _check_limit(self, total: Any, limit: float) -> None:
        values = on_host(total, self._engine.device)
        if not np.abs(values).max(initial=0.0) <= limit:
            self._engine.observe(False)

    @_guarded
    def end(self, hashes: np.ndarray, *decoded: np.ndarray) -> np.int64:
        """Finish a step after its last decoding; return the number of steps, 1."""
        del decoded  # inputs that order this after all decodings
        self._note_end()
        self.hashes.output = hashes
        self.replicas.finish(self._settings.timeout_s)
        bad = {name: own for name, own in self._engine.bad.items() if name != self._poisoned}
        bad |= {DENSE: True} if self._poisoned else {}
        self._not_finite.observe(bad, self._engine.rank, self._set.ranks)
        return np.int64(1)

    def _messages(self, made: Mapping[int, Round | None]) -> list[Any]:
        """Return codes, int64, and messages of rounds that are about to begin."""
        outputs: list[Any] = [np.zeros((len(made), 1 + self._engine.world_size), np.int64)]
        for row, round_ in zip(outputs[0], made.values(), strict=True):
            row[0] = rounds.code_of(round_)
            if round_ is not None:
                splits = np.array(round_.splits, np.int64) * round_.data.dtype.itemsize
                row[1 : 1 + splits.size] = splits
        for bucket, round_ in made.items():
            self._sent[bucket] = round_
            outputs.append(self._tensor(rounds.message_of(round_, self._engine.rank)))
        self._wait()
        return outputs

    def _array(self, tensor: Any) -> Any:
        """Return a gradient as a 1-D array on its device."""
        return tensor.reshape(-1) if self.memory is None else self.memory.array_of(tensor)

    def _tensor(self, array: Any) -> Any:
        if self.memory is None or not self.memory.device.owns(array):
            return array
        return self.memory.tensor_of(array)

    def _wait(self) -> None:
        if self.memory is not None:
            self.memory.device.wait()

    def _received(self, bucket: int, output: Any) -> Round | None:
        """Pass a round's output, on its message's device, to the engine; return the next round."""
        sent = self._sent.pop(bucket)
        if sent is None:
            return None
        if self.memory is not None:
            on_gpu = self.memory.device.owns(sent.data)
            output = self._array(output) if on_gpu else output.numpy()
        now = time.perf_counter()
        if len(self._encoded) == self._n_buckets:  # before, gradients are still being computed
            self.wait_s += now - self._idle_since
        made = self._engine.resume(bucket, output.view(sent.data.dtype))
        self._idle_since = time.perf_counter()
        return made if isinstance(made, Round) else None

    # The watch calls these, from a thread of its own.

    def progress(self) -> Progress:
        """Return this rank's progress, counted in buckets."""
        return self._progress._replace(busy=self._is_busy)

    def missing(self) -> list[int]:
        """Return the numbers of the variables of buckets that are not encoded in this step."""
        buckets = enumerate(self._engine.buckets)
        left = [bucket for number, bucket in buckets if number not in self._encoded]
        names = {tensor.name for bucket in left for tensor in bucket.tensors}
        return [n for n, name in enumerate(self._variables.names) if name in names]

    def may_wait(self, running: Collection[CodeType]) -> bool:
        """Return False if no thread runs TensorFlow: then an error has ended the step."""
        return horovod_internals.execution_code() in running

    def _note(self, doing: str, step: int, handed: int, returned: int = 0) -> None:
        self._progress = Progress(step, handed, returned, inside=True, doing=doing)
        self._encoded, self._poisoned = set(), ""

    def _note_end(self) -> None:
        self._progress = self._progress._replace(inside=False, doing="")

    # The compressor calls these.

    def loss_scale(self) -> float:
        """Return the loss scale of the present step."""
        return self._scale

    def settle(self) -> None:
        """Close the last step, before its results are read; ValueError if a step is under way."""
        with self.lock:
            self.check_unbroken()
            if self._begun and self._undecoded:
                raise ValueError("a step is under way: call this between two steps")
            self._close()

    def close_if_complete(self) -> None:
        """Close the last step if it is complete."""
        with self.lock:
            if not self._undecoded and not self._broken_by:
                self._close()

    def abandon(self) -> None:
        """Discard a step that an error interrupted."""
        with self.lock:
            super().abandon()
            self._progress, self._encoded = _NO_STEP, set()
            self._sent, self._undecoded, self._spans = {}, set(), []
            self._begun = False

    def _close(self) -> None:
        if not self._begun:
            return
        if not self._alone:
            self._engine.observe(True)  # ``poison`` covers what Horovod exchanges
            self._engine.settle()
        self._begun = False
        if self._spans:
            last_came = max(began for began, _ in self._spans)
            hidden_s = sum(max(0.0, min(e, last_came) - b) for b, e in self._spans)
            self.encode_hidden_s += hidden_s
            self._spans = []
        self._end_record(self._engine.step - 1)
        self._note_closed()
