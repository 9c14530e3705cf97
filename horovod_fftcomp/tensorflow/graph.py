"""The exchange of one trace: operations that Horovod's own compression hook cannot hold.

Horovod calls the hook while it traces a ``tf.cond`` of its own for each gradient, where the others
are out of reach. So the exchange of all gradients is put into the graph around those, at the first
call, and each hook refers to its part of it.
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
from horovod_fftcomp.tensorflow.steps import Load, StepDriver


class Ticket:
    """Holds tensors back until ``zero``, a 0 of int32, is there.

    By data: of control dependencies into the branches of a ``tf.cond`` some get lost.
    """

    def __init__(self, zero: tf.Tensor) -> None:
        self.zero = zero
        self._shapes: dict[tuple[int, ...], tf.Tensor] = {}  # as they are once it is there

    def after(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return ``tensor``, but later."""
        if not tensor.shape.is_fully_defined():
            later = tf.reshape(tensor, tf.shape(tensor) + self.zero)
            later.set_shape(tensor.shape)
            return later
        key = tuple(tensor.shape.as_list())
        if key not in self._shapes:
            self._shapes[key] = tf.constant(key, tf.int32) + self.zero
        return tf.reshape(tensor, self._shapes[key])


class TracedStep:
    """The exchange of a trace's gradients, in the graph that is the default one.

    ``grads``: tensors, None, or IndexedSlices, which Horovod exchanges itself; ``places``: of each
    the place in ``buckets``, None if it travels dense. ``scale``: a scalar tensor, the loss scale.
    ``shown``: values of variables, by number, that are to be known again by their memory.
    ``groups``: the process sets of nodes and of their leaders, by their ranks.
    ``sums``: of each gradient the sum over ranks in float32, None if Horovod exchanges it.
    ``handed``: what Horovod is given of each, the gradient or a single 1, when the step has begun:
    if the ranks' settings differ, it would find other shapes on other ranks, and its own message
    might come first.
    """

    def __init__(
        self,
        steps: StepDriver,
        buckets: Sequence[Bucket],
        grads: Sequence[Any],
        slots: Sequence[Slot | None],
        *,
        shown: Mapping[int, tf.Tensor],
        name: str,
        process_set: Any,
        groups: Mapping[Ranks, Any],
        counter: tf.Variable,
        scale: tf.Tensor,
        averages: bool,
        calls_roll: bool,
        mends: bool,
    ) -> None:
        self.grads = list(grads)
        self.sums: list[tf.Tensor | None] = [None] * len(self.grads)
        self._untaken = [n for n, g in enumerate(self.grads) if isinstance(g, tf.Tensor)]
        self._steps, self._name, self._set, self._groups = steps, name, process_set, groups
        self._averages = averages
        self._place = "/CPU:0" if steps.memory is None else steps.memory.place
        # Where Horovod has no operations of a GPU, TensorFlow brings messages to the host.
        self._wire = self._place if hvd.nccl_built() else "/CPU:0"
        members = self._members(slots)
        with tf.name_scope(name), tf.device("/CPU:0"):
            load = self._load(members, tuple(shown))
            inputs = [counter.read_value(), scale, self._early(), *shown.values()]
            if members:
                self._ticket = Ticket(self._begin(inputs, load, calls_roll))
                ended = self._end(self._decoded(buckets, members))
            else:
                ended = self._without_buckets(inputs, load, calls_roll)
            counter.assign_add(ended)
            if mends or not members:
                # The update may not begin before differing parameters are replaced; nor, where only
                # Horovod's sums are awaited, before they are read.
                self._ticket = Ticket(tf.cast(ended, tf.int32) - 1)
                with tf.device(self._place):
                    self.sums = [t if t is None else self._ticket.after(t) for t in self.sums]
        with tf.name_scope(name):  # wherever the gradients are
            self.handed = [self._handed(number) for number in range(len(self.grads))]

    def _decoded(
        self, buckets: Sequence[Bucket], members: Mapping[int, dict[int, int]]
    ) -> list[tf.Tensor]:
        """Add the operations of all buckets; return what is there when their sums are.

        Only operations that TensorFlow chains call Python with tensors of a GPU. So there one does
        for all buckets what elsewhere one does for each.
        """
        groups = [{number: members[number]} for number in sorted(members)]
        if self._steps.memory is not None:
            groups = [dict(sorted(members.items()))]
        with tf.device(self._place):
            poison = self._poison({n for numbers in members.values() for n in numbers.values()})
        decoded = []
        for group in groups:
            decoded.append(self._exchange(buckets, group, poison))
            poison = tf.constant(0.0)
        return decoded

    def _without_buckets(
        self, inputs: Sequence[tf.Tensor], load: Load, calls_roll: bool
    ) -> tf.Tensor:
        """Return the number of steps, 1, when Horovod may exchange: mostly at once."""
        step, scale, early, *memory = inputs
        meets = functools.partial(self._steps.must_meet, load)
        must_meet = _python(meets, [step, early, scale, *memory], tf.bool, [])

        def meet() -> tf.Tensor:
            self._begin(inputs, load, calls_roll)
            return self._end([])

        return tf.cond(must_meet, meet, lambda: tf.constant(1, tf.int64))

    def _parted(self, decoded: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Return what is there when all ranks have decoded, if need be; see ``Connection.part``."""
        self._steps.ends_together = bool(self._groups and decoded)
        if not self._steps.ends_together:
            return decoded
        done = tf.cast(tf.reshape(tf.add_n(decoded), [1]), tf.float32)
        return [rounds.reduce(done, f"{self._name}.parted", self._set)]

    @property
    def is_taken(self) -> bool:
        """Whether every gradient was asked for."""
        return not self._untaken

    def start_gradient(self, grad: tf.Tensor) -> int | None:
        """Return the number of a gradient, the first that is this tensor and was not taken yet."""
        for number in self._untaken:
            if self.grads[number] is grad:
                self._untaken.remove(number)
                return number
        return None

    def _handed(self, number: int) -> tf.Tensor | None:
        grad = self.grads[number]
        if not isinstance(grad, tf.Tensor):
            return None  # Horovod has it already
        return self._ticket.after(grad if self.sums[number] is None else tf.ones([1]))

    def _members(self, slots: Sequence[Slot | None]) -> dict[int, dict[int, int]]:
        """Return bucket -> position -> number of the gradient."""
        members: dict[int, dict[int, int]] = {}
        for number, slot in enumerate(slots):
            if slot is not None and isinstance(self.grads[number], tf.Tensor):
                members.setdefault(slot.bucket, {})[slot.position] = number
        return members

    def _load(self, members: dict[int, dict[int, int]], identified: tuple[int, ...]) -> Load:
        compressed = {number for numbers in members.values() for number in numbers.values()}
        dense = other = 0
        for number, grad in enumerate(self.grads):
            if grad is None:
                continue
            values = grad if isinstance(grad, tf.Tensor) else grad.values
            numel = math.prod(d or 0 for d in values.shape.as_list())
            dense += 4 * numel
            other += 4 if number in compressed else values.dtype.size * numel
        return Load(frozenset(members), dense, other, identified)

    def _begin(self, inputs: Sequence[tf.Tensor], load: Load, calls_roll: bool) -> tf.Tensor:
        step, scale, early, *memory = inputs
        meeting = self._steps.meeting
        inputs = [step, early, scale]
        present, greeting = tf.numpy_function(
            self._steps.arrive, inputs, [tf.float32, tf.uint8], stateful=False
        )
        present.set_shape([2])
        greeting.set_shape([None])
        greetings = rounds.gather_if_any(greeting, f"{self._name}.handshake", meeting)
        if calls_roll:
            present = rounds.reduce(present, f"{self._name}.present", meeting)
        begin = functools.partial(self._steps.begin, load, calls_roll)
        begun, self._hashes = _message(begin, [step, present, greetings, scale, *memory])
        return begun

    def _end(self, decoded: Sequence[tf.Tensor]) -> tf.Tensor:
        # By data: where only a control dependency is left, TensorFlow drops stateless calls.
        told = rounds.gather_if_any(self._hashes, f"{self._name}.replicas", self._set)
        return _python(self._steps.end, [told, *self._parted(decoded)], tf.int64, [])

    def _early(self) -> tf.Tensor:
        """Return a value of the gradient that is likely to come first.

        A step must not begin in a call that ends before it has gradients, as where data run out.
        """
        last = next(grad for grad in reversed(self.grads) if grad is not None)
        values = last if isinstance(last, tf.Tensor) else last.values
        with tf.device(self._place):
            return tf.reshape(values, [-1])[:1]

    def _poison(self, compressed: set[int]) -> tf.Tensor:
        """Return 0, or NaN if a gradient that Horovod exchanges itself is not finite."""
        finite = tf.constant(True)
        for number, grad in enumerate(self.grads):
            if grad is not None and number not in compressed:
                values = grad if isinstance(grad, tf.Tensor) else grad.values
                finite = tf.logical_and(finite, tf.reduce_all(tf.math.is_finite(values)))
        return tf.where(finite, 0.0, math.nan)

    def _limit(self, dtype: tf.DType) -> float:
        """Return the largest sum that ``dtype`` holds, once Horovod's op has been applied to it."""
        return float(dtype.max) * (self._set.size() if self._averages else 1)

    def _exchange(
        self, buckets: Sequence[Bucket], members: Mapping[int, dict[int, int]], poison: tf.Tensor
    ) -> tf.Tensor:
        """Add the operations of some buckets; return what is there when their sums are."""
        positions = {number: tuple(sorted(own)) for number, own in members.items()}
        places = [(number, p) for number, own in positions.items() for p in own]
        grads = [members[number][p] for number, p in places]
        shapes = [buckets[number].tensors[p].shape for number, p in places]
        begun = tf.cast(self._ticket.zero, tf.int64)
        with tf.device(self._place):
            values = [tf.cast(self.grads[grad], tf.float32) for grad in grads]
        encode = functools.partial(self._steps.encode, positions)
        given = self._call(encode, [begun, poison, *values], tf.uint8, len(positions))
        kinds = {number: _kinds(buckets[number]) for number in positions}
        outputs: dict[int, tf.Tensor] = {}
        for round_ in range(max(map(len, kinds.values()))):
            running = [number for number in positions if round_ < len(kinds[number])]
            if round_ > 0:
                advance = functools.partial(self._steps.advance, running)
                arrived = [outputs[number] for number in running]
                given = self._call(advance, arrived, tf.uint8, len(running))
            for at, number in enumerate(running):
                name, sets = f"{self._name}.{number}.{round_}", self._sets_of(buckets[number])
                code, codes = tf.cast(given[0][at], tf.int32), kinds[number][round_]
                with tf.device(self._wire):
                    outputs[number] = rounds.exchange(code, given[1 + at], name, sets, codes)
        limits = [self._limit(self.grads[grad].dtype) for grad in grads]
        decode = functools.partial(self._steps.decode, positions, limits)
        decoded, *sums = self._call(decode, list(outputs.values()), tf.float32, len(grads))
        with tf.device(self._place):
            for grad, shape, total in zip(grads, shapes, sums, strict=True):
                self.sums[grad] = tf.reshape(total, shape)
        return tf.reshape(decoded, [])

    def _call(
        self, method: Any, inputs: Sequence[tf.Tensor], dtype: tf.DType, n: int
    ) -> list[tf.Tensor]:
        """Return what a method of ``StepDriver`` makes: int64, and ``n`` vectors of ``dtype``."""
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
        ranks_per_node = getattr(bucket.policy, "ranks_per_node", 1)
        if ranks_per_node == 1:
            return rounds.Sets(self._set)
        rank, layout = self._set.rank(), NodeLayout(ranks_per_node, self._set.size())
        leaders = layout.leaders(bucket.tensors)
        between = self._groups.get(leaders) if rank in leaders else None
        return rounds.Sets(between, self._groups.get(layout.node_of(rank)))


def _kinds(bucket: Bucket) -> list[set[int]]:
    """Return for each round of a bucket what may have to be done in it."""
    possible = bucket.policy.possible_rounds()
    if getattr(bucket.policy, "ranks_per_node", 1) > 1:
        return [set(range(rounds.REDUCE_INSIDE + 1))] * max(map(len, possible))
    everything = {rounds.NOTHING, rounds.GATHER, rounds.REDUCE_FLOAT32, rounds.REDUCE_FLOAT16}
    kinds = []
    for number in range(max(map(len, possible))):
        collectives = {each[number] if number < len(each) else None for each in possible}
        gathers = collectives <= {"allgather", "broadcast"}
        kinds.append({rounds.GATHER} if gathers else everything)
    return kinds


def _message(call: Any, inputs: Sequence[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    code, message = tf.numpy_function(call, inputs, [tf.int32, tf.uint8], stateful=False)
    code.set_shape([])
    message.set_shape([None])
    return code, message


def _python(
    call: Any, inputs: Sequence[tf.Tensor], dtype: tf.DType, shape: Sequence[int]
) -> tf.Tensor:
    """Return the operation that calls Python; stateless, or TensorFlow would chain all of them."""
    output = tf.numpy_function(call, inputs, dtype, stateful=False)
    output.set_shape(shape)
    return output
