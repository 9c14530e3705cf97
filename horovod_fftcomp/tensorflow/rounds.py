"""Collectives of ``horovod.tensorflow``: as operations of a step's graph, and beside it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_fftcomp.engine.overlap import no_answer
from horovod_fftcomp.errors import ConfigMismatchError
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.tensorflow import horovod_internals
from horovod_fftcomp.types import Array

# What a step's graph is told to do with a payload; see ``exchange``. Within a node as well.
NOTHING, GATHER, REDUCE_FLOAT32, REDUCE_FLOAT16, GATHER_INSIDE, REDUCE_INSIDE = range(6)


class Sets(NamedTuple):
    """The process sets of a bucket's rounds, and of those that stay within a node.

    None where this rank has no part in such rounds.
    """

    usual: hvd.ProcessSet | None
    inside: hvd.ProcessSet | None = None


def code_of(round_: Round | None) -> int:
    """Return what ``exchange`` has to do for a round; ``NOTHING`` for None."""
    if round_ is None or round_.among == ():
        return NOTHING
    if round_.inside:
        return REDUCE_INSIDE if round_.collective == "allreduce" else GATHER_INSIDE
    if round_.collective == "allreduce":
        return REDUCE_FLOAT16 if round_.data.dtype == np.float16 else REDUCE_FLOAT32
    # A broadcast operation has its root built in; a gathering in which one rank alone hands in
    # something does the same for a root that changes.
    return GATHER


def message_of(round_: Round | None, rank: int) -> Array:
    """Return what ``rank`` hands in for a round, uint8 1-D, where the round's data are."""
    if round_ is None:
        return np.empty(0, np.uint8)
    if round_.collective == "broadcast" and round_.among != ():
        root = round_.root if round_.among is None else round_.among[round_.root]
        if rank != root:
            return np.empty(0, np.uint8)
    data = round_.data
    if isinstance(data, np.ndarray):
        data = np.ascontiguousarray(data)
    return data.reshape(-1).view(np.uint8)


def reduce(values: tf.Tensor, name: str, process_set: hvd.ProcessSet) -> tf.Tensor:
    """Return the sum of ``values`` over ranks."""
    with horovod_internals.elastic_scope("allreduce"):
        return hvd.allreduce(
            values, op=hvd.Sum, name=name, process_set=process_set, ignore_name_scope=True
        )


def exchange(
    code: tf.Tensor, message: tf.Tensor, name: str, sets: Sets, codes: set[int]
) -> tf.Tensor:
    """Return the operation that carries out a round, bytes in, bytes out.

    ``codes``: those that may occur; if it is one, there is no branch. Where ``sets`` has None they
    do not.
    """

    def reduced(dtype: tf.DType, process_set: hvd.ProcessSet) -> tf.Tensor:
        values = tf.bitcast(tf.reshape(message, [-1, dtype.size]), dtype)
        total = reduce(values, name, process_set)
        return tf.reshape(tf.bitcast(total, tf.uint8), [-1])

    def gathered(process_set: hvd.ProcessSet) -> tf.Tensor:
        with horovod_internals.elastic_scope("allgather"):
            return hvd.allgather(
                message, name=name, process_set=process_set, ignore_name_scope=True
            )

    branches: dict[int, Callable[[], tf.Tensor]] = {NOTHING: lambda: tf.identity(message)}
    if (usual := sets.usual) is not None:
        branches[GATHER] = lambda: gathered(usual)
        branches[REDUCE_FLOAT32] = lambda: reduced(tf.float32, usual)
        branches[REDUCE_FLOAT16] = lambda: reduced(tf.float16, usual)
    if (inside := sets.inside) is not None:
        branches[GATHER_INSIDE] = lambda: gathered(inside)
        branches[REDUCE_INSIDE] = lambda: reduced(tf.float32, inside)
    if len(codes) == 1:
        return branches[next(iter(codes))]()
    # As many branches on every rank: in a graph that differs Horovod's own operations get other
    # names than on other ranks.
    nothing = branches[NOTHING]
    return tf.switch_case(code, [branches.get(n, nothing) for n in range(max(codes) + 1)])


def gather_if_any(message: tf.Tensor, name: str, process_set: hvd.ProcessSet) -> tf.Tensor:
    """Return all ranks' messages; where they are empty, nothing is exchanged."""
    code = tf.where(tf.size(message) > 0, GATHER, NOTHING)
    return exchange(code, message, name, Sets(process_set), {NOTHING, GATHER})


@functools.cache
def _operation(code: int, name: str, process_set: hvd.ProcessSet) -> Any:
    """Return a function that carries out one collective; names need a graph."""
    signature = [tf.TensorSpec([None], tf.uint8)]

    def run(message: tf.Tensor) -> tf.Tensor:
        return exchange(tf.constant(code), message, name, Sets(process_set), {code})

    # Concrete: TensorFlow warns of many functions of one code that are traced when called.
    return tf.function(run, input_signature=signature, autograph=False).get_concrete_function()


class PendingRound:
    """One collective under way outside of a step's graph, in a thread of its own.

    A thread that waits for ranks that never come does not keep the process from ending.
    """

    def __init__(self, round_: Round, name: str, process_set: hvd.ProcessSet) -> None:
        self.name = name
        self._round = round_
        self._process_set = process_set
        self._output: np.ndarray | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            message = message_of(self._round, self._process_set.rank())
            operation = _operation(code_of(self._round), self.name, self._process_set)
            self._output = operation(tf.constant(message)).numpy()
        except Exception as error:
            self._error = error

    def is_done(self) -> bool:
        """Tell whether the output is there."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> np.ndarray:
        """Return the output; raises ConfigMismatchError if it has not come in ``timeout_s``."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise ConfigMismatchError(no_answer(repr(self.name), timeout_s))
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output.view(self._round.data.dtype)


class GraphRound:
    """Sends rounds by a step's graph, one at a time; what is no allgather, by a thread.

    An operation that waited for a thread would take one of TensorFlow's, which may have no other.
    """

    def __init__(self) -> None:
        self.message = np.empty(0, np.uint8)  # what the graph has to gather, if anything
        self.output = self.message  # and what it has gathered

    def __call__(
        self, round_: Round, name: str, process_set: hvd.ProcessSet
    ) -> GraphRound | PendingRound:
        """Take a round's data, uint8."""
        if round_.collective != "allgather":
            return PendingRound(round_, name, process_set)
        self.message = round_.data
        return self

    def take(self) -> np.ndarray:
        """Return the message for the graph, once."""
        message, self.message = self.message, np.empty(0, np.uint8)
        return message

    def is_done(self) -> bool:
        """Tell whether the output is there."""
        return bool(self.output.size)

    def wait(self, timeout_s: float) -> np.ndarray:
        """Return the output, which the graph has brought."""
        del timeout_s
        return self.output
