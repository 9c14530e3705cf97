"""Exchange of all gradients of a traced step, as operations of TensorFlow's graph.

Horovod calls the compression hook inside a ``tf.cond`` per gradient, where the other gradients
cannot be used. So the first hook call adds the exchange of all gradients to the graph around those,
and each hook uses the outputs of its gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.overlap import Slot
from horovod_fftcomp.schemes.hierarchical import NodeLayout, Ranks
from horovod_fftcomp.tensorflow import rounds
from horovod_fftcomp.tensorflow.steps import Load, TensorFlowStepDriver


class Dependency:
    """Data dependency on ``zero``, an int32 scalar with the value 0.

    Control dependencies would not do: some of those into the branches of a ``tf.cond`` get lost.
    """

    def __init__(self, zero: tf.Tensor) -> None:
        self.zero = zero
        self._shapes: dict[tuple[int, ...], tf.Tensor] = {}  # shapes that depend on ``zero``

    def after(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return ``tensor`` with a dependency on ``zero``."""
        if not tensor.shape.is_fully_defined():
            later = tf.reshape(tensor, tf.shape(tensor) + self.zero)
            later.set_shape(tensor.shape)
            return later
        key = tuple(tensor.shape.as_list())
        if key not in self._shapes:
            self._shapes[key] = tf.constant(key, tf.int32) + self.zero
        return tf.reshape(tensor, self._shapes[key])


class TracedStep:
    """Exchange of the gradients of one trace, added to TensorFlow's default graph.

    ``grads``: tensors, None, or IndexedSlices, which Horovod exchanges itself; ``slots``: the slot
    of each in the buckets of ``steps``, None if it is sent dense. ``scale``: the loss scale, a
    scalar tensor. ``identified``: values of variables, by number, whose memory is checked in each
    step. ``groups``: the process sets of nodes and between them, by their ranks.

    ``untaken``: numbers of the gradients with which ``start_gradient`` was not called yet.
    ``sums``: for each gradient the sum over ranks in float32, None if Horovod exchanges it.
    ``horovod_inputs``: for each gradient the tensor that Horovod reduces, the gradient or a single
    1. It depends on the begin of the step: if the ranks' settings differ, so do the shapes, and
    Horovod might raise an error of its own before ours.
    """

    def __init__(
        self,
        steps: TensorFlowStepDriver,
        grads: Sequence[Any],
        slots: Sequence[Slot | None],
        *,
        identified: Mapping[int, tf.Tensor],
        groups: Mapping[Ranks, Any],
        counter: tf.Variable,
        scale: tf.Tensor,
        averages: bool,
    ) -> None:
        self.grads = list(grads)
        self.sums: list[tf.Tensor | None] = [None] * len(self.grads)
        self.untaken = [n for n, g in enumerate(self.grads) if isinstance(g, tf.Tensor)]
        self._values = {n: getattr(g, "values", g) for n, g in enumerate(grads) if g is not None}
        connection, self._buckets = steps.parts.connection, steps.parts.engine.buckets
        self._name, self._set = connection.name, connection.process_set
        self._steps, self._groups, self._averages = steps, groups, averages
        self._place = "/CPU:0" if steps.memory is None else steps.memory.place
        # If Horovod has no GPU operations, TensorFlow copies messages to the host.
        self._wire = self._place if hvd.nccl_built() else "/CPU:0"
        members = self._members(slots)
        self._compressed = {n for within in members.values() for n in within.values()}
        with tf.name_scope(self._name), tf.device("/CPU:0"):
            load = self._load(members, tuple(identified))
            inputs = [counter.read_value(), scale, self._first_grad(), *identified.values()]
            if members:
                self._dependency = Dependency(self._begin(inputs, load))
                ended = self._end(self._decoded(members))
            else:
                ended = self._without_buckets(inputs, load)
            counter.assign_add(ended)
            if steps.parts.settings.replica_check == "broadcast" or not members:
                # The update must not begin before differing parameters are replaced; nor, without
                # buckets, before the parameters are read.
                self._dependency = Dependency(tf.cast(ended, tf.int32) - 1)
                with tf.device(self._place):
                    self.sums = [t if t is None else self._dependency.after(t) for t in self.sums]
        with tf.name_scope(self._name):  # on the devices of the gradients
            self.horovod_inputs = [self._horovod_input(number) for number in range(len(self.grads))]

    def _decoded(self, members: Mapping[int, dict[int, int]]) -> list[tf.Tensor]:
        """Add the operations of all buckets; return tensors that are computed after their sums.

        Operations that call Python with GPU tensors are executed one after the other, so there one
        operation serves all buckets; on the CPU each bucket has its own.
        """
        groups = [{number: members[number]} for number in sorted(members)]
        if self._steps.memory is not None:
            groups = [dict(sorted(members.items()))]
        with tf.device(self._place):
            poison = self._poison()
        decoded = []
        for group in groups:
            decoded.append(self._exchange(group, poison))
            poison = tf.constant(0.0)
        return decoded

    def _without_buckets(self, inputs: Sequence[tf.Tensor], load: Load) -> tf.Tensor:
        """Return the number of steps, 1, once Horovod may exchange; usually without a barrier."""
        step, scale, first_grad, *memory = inputs
        decide = functools.partial(self._steps.must_synchronize, load)
        [must_synchronize] = _python(decide, [step, first_grad, scale, *memory], (tf.bool, []))

        def synchronize() -> tf.Tensor:
            self._begin(inputs, load)
            return self._end([])

        return tf.cond(must_synchronize, synchronize, lambda: tf.constant(1, tf.int64))

    def start_gradient(self, grad: tf.Tensor) -> int | None:
        """Return the number of the first gradient that is ``grad`` and not taken yet, or None."""
        for number in self.untaken:
            if self.grads[number] is grad:
                self.untaken.remove(number)
                return number
        return None

    def _horovod_input(self, number: int) -> tf.Tensor | None:
        grad = self.grads[number]
        if not isinstance(grad, tf.Tensor):
            return None  # Horovod does not pass it to the hook
        return self._dependency.after(grad if self.sums[number] is None else tf.ones([1]))

    def _members(self, slots: Sequence[Slot | None]) -> dict[int, dict[int, int]]:
        """Return the numbers of the gradients by bucket and position in it."""
        members: dict[int, dict[int, int]] = {}
        for number, slot in enumerate(slots):
            if slot is not None and isinstance(self.grads[number], tf.Tensor):
                members.setdefault(slot.bucket, {})[slot.position] = number
        return members

    def _load(self, members: dict[int, dict[int, int]], identified: tuple[int, ...]) -> Load:
        dense = other = 0
        for number, values in self._values.items():
            numel = math.prod(d or 0 for d in values.shape.as_list())
            dense += 4 * numel
            other += 4 if number in self._compressed else values.dtype.size * numel
        return Load(frozenset(members), dense, other, identified)

    def _begin(self, inputs: Sequence[tf.Tensor], load: Load) -> tf.Tensor:
        step, scale, first_grad, *memory = inputs
        optimizers_set = self._steps.optimizers_set
        inputs = [step, first_grad, scale]
        call = self._steps.enter_barrier
        present, message = _python(call, inputs, (tf.float32, [2]), _BYTES)
        handshakes = rounds.gather_if_any(message, f"{self._name}.handshake", optimizers_set)
        if self._steps.gathers:
            present = rounds.reduce(present, f"{self._name}.present", optimizers_set)
        begin = functools.partial(self._steps.begin, load)
        inputs = [step, present, handshakes, scale, *memory]
        begun, self._hashes = _python(begin, inputs, (tf.int32, []), _BYTES)
        return begun

    def _end(self, decoded: Sequence[tf.Tensor]) -> tf.Tensor:
        # A data dependency: TensorFlow drops stateless calls with control dependencies only.
        hashes = rounds.gather_if_any(self._hashes, f"{self._name}.replicas", self._set)
        if self._groups and decoded:  # see ``Connection.leave_together``
            done = tf.cast(tf.reshape(tf.add_n(decoded), [1]), tf.float32)
            decoded = [rounds.reduce(done, f"{self._name}.parted", self._set)]
        return _python(self._steps.end, [hashes, *decoded], (tf.int64, []))[0]

    def _first_grad(self) -> tf.Tensor:
        """Return one value of the gradient that is probably computed first.

        As an input it delays the begin of the step until there are gradients: a call may end
        without any, such as when the data run out.
        """
        with tf.device(self._place):
            return tf.reshape([*self._values.values()][-1], [-1])[:1]

    def _poison(self) -> tf.Tensor:
        """Return 0, or NaN if a gradient that Horovod exchanges itself is not finite."""
        finite = [tf.constant(True)]
        for number, values in self._values.items():
            if number not in self._compressed:
                finite.append(tf.reduce_all(tf.math.is_finite(values)))
        return tf.where(tf.reduce_all(finite), 0.0, math.nan)

    def _exchange(self, members: Mapping[int, dict[int, int]], poison: tf.Tensor) -> tf.Tensor:
        """Add the operations of some buckets; return a tensor that is computed after their sums."""
        positions = {number: tuple(sorted(grads)) for number, grads in members.items()}
        slots = [(number, p) for number, within in positions.items() for p in within]
        grads = [members[number][p] for number, p in slots]
        buckets = self._buckets
        shapes = [buckets[number].tensors[p].shape for number, p in slots]
        begun = tf.cast(self._dependency.zero, tf.int64)
        with tf.device(self._place):
            values = [tf.cast(self.grads[grad], tf.float32) for grad in grads]
        encode = functools.partial(self._steps.encode, positions)
        made = self._call(encode, [begun, poison, *values], tf.uint8, len(positions))
        kinds = {number: _kinds(buckets[number]) for number in positions}
        outputs: dict[int, tf.Tensor] = {}
        for round_ in range(max(map(len, kinds.values()))):
            running = [number for number in positions if round_ < len(kinds[number])]
            if round_ > 0:
                advance = functools.partial(self._steps.advance, running)
                received = [outputs[number] for number in running]
                made = self._call(advance, received, tf.uint8, len(running))
            for at, number in enumerate(running):
                name, sets = f"{self._name}.{number}.{round_}", self._sets_of(buckets[number])
                codes = kinds[number][round_]
                row = tf.reshape(tf.cast(made[0][at], tf.int32), [-1])
                with tf.device(self._wire):
                    outputs[number] = rounds.exchange(
                        row[0], made[1 + at], name, sets, codes, row[1:]
                    )
        # The largest sums that are finite in the gradients' dtypes after Horovod's op was applied.
        divisor = self._set.size() if self._averages else 1
        limits = [float(self.grads[grad].dtype.max) * divisor for grad in grads]
        decode = functools.partial(self._steps.decode, positions, limits)
        decoded, *sums = self._call(decode, list(outputs.values()), tf.float32, len(grads))
        with tf.device(self._place):
            for grad, shape, total in zip(grads, shapes, sums, strict=True):
                self.sums[grad] = tf.reshape(total, shape)
        return tf.reshape(decoded, [])

    def _call(
        self, method: Any, inputs: Sequence[tf.Tensor], dtype: tf.DType, n: int
    ) -> list[tf.Tensor]:
        """Return a step driver method's results: int64, then ``n`` vectors of ``dtype``."""
        dtypes = [tf.int64, *n * [dtype]]
        if self._steps.memory is None:
            outputs = tf.numpy_function(method, inputs, dtypes, stateful=False)
        else:
            with tf.device(self._place):
                outputs = tf.py_function(method, list(map(tf.stop_gradient, inputs)), dtypes)
        for output in outputs[1:]:
            output.set_shape([None])
        return outputs

    def _sets_of(self, bucket: Bucket) -> rounds.Sets:
        ranks_per_node = bucket.policy.node_size
        if ranks_per_node == 1:
            return rounds.Sets(self._set)
        rank, layout = self._set.rank(), NodeLayout(ranks_per_node, self._set.size())
        groups = self._groups.get(layout.peers_of(rank)), self._groups.get(layout.node_of(rank))
        return rounds.Sets(*groups)


def _kinds(bucket: Bucket) -> list[set[int]]:
    """Return the codes, see ``rounds.exchange``, that are possible in each round of a bucket."""
    possible = bucket.policy.possible_rounds()
    if bucket.policy.node_size > 1:
        return [set(range(rounds.TO_ALL_INSIDE + 1))] * max(map(len, possible))
    everything = {rounds.NOTHING, rounds.GATHER, rounds.REDUCE_FLOAT32, rounds.REDUCE_FLOAT16}
    kinds = []
    for number in range(max(map(len, possible))):
        collectives = {each[number] if number < len(each) else None for each in possible}
        if collectives <= {"allgather", "broadcast"}:
            kinds.append({rounds.GATHER})
        else:
            more = {rounds.TO_ALL} if "alltoall" in collectives else set()
            kinds.append(more if collectives == {"alltoall"} else everything | more)
    return kinds


_BYTES: tuple[tf.DType, list[Any]] = (tf.uint8, [None])  # of any number


def _python(
    call: Any, inputs: Sequence[tf.Tensor], *made: tuple[tf.DType, list[Any]]
) -> list[tf.Tensor]:
    """Return the outputs, of these dtypes and shapes, of an operation that calls Python.

    It is stateless, as TensorFlow serializes stateful ones.
    """
    outputs = tf.numpy_function(call, inputs, [dtype for dtype, _ in made], stateful=False)
    for output, (_, shape) in zip(outputs, made, strict=True):
        output.set_shape(shape)
    return outputs
