"""Collectives of ``horovod.tensorflow``, in the graph of a step and outside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_fftcomp.adapter.threads import ThreadRound, Worker
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.tensorflow import horovod_internals
from horovod_fftcomp.types import Array

# Codes of ``exchange``: what the graph does with a message. *_INSIDE: within a node.
NOTHING, GATHER, REDUCE_FLOAT32, REDUCE_FLOAT16, TO_ALL, GATHER_INSIDE, TO_ALL_INSIDE = range(7)


class Sets(NamedTuple):
    """Process sets of a bucket: ``usual`` rounds, and rounds ``inside`` a node.

    None if this rank takes part in no such rounds.
    """

    usual: hvd.ProcessSet | None
    inside: hvd.ProcessSet | None = None


def code_of(round_: Round | None) -> int:
    """Return the code of ``exchange`` for a round; ``NOTHING`` for None."""
    if round_ is None or round_.among == ():
        return NOTHING
    if round_.inside:
        return TO_ALL_INSIDE if round_.collective == "alltoall" else GATHER_INSIDE
    if round_.collective == "allreduce":
        return REDUCE_FLOAT16 if round_.data.dtype == np.float16 else REDUCE_FLOAT32
    if round_.collective == "alltoall":
        return TO_ALL
    # A broadcast operation has a fixed root; a gather to which only one rank contributes has the
    # same result for a root that changes.
    return GATHER


def message_of(round_: Round | None, rank: int) -> Array:
    """Return the message of ``rank`` in a round: uint8 1-D, on the device of its data."""
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
    code: tf.Tensor,
    message: tf.Tensor,
    name: str,
    sets: Sets,
    codes: set[int],
    splits: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the output of the collective selected by ``code``; ``message`` and output: uint8 1-D.

    ``splits``: int32, of an alltoall, for each rank, and as many zeros as there may be.
    ``codes``: the possible codes; with one only, there is no branch. Codes whose process set in
    ``sets`` is None do not occur.
    """
    named: dict[str, Any] = {"name": name, "ignore_name_scope": True}

    def reduced(dtype: tf.DType, process_set: hvd.ProcessSet) -> tf.Tensor:
        values = tf.bitcast(tf.reshape(message, [-1, dtype.size]), dtype)
        total = reduce(values, name, process_set)
        return tf.reshape(tf.bitcast(total, tf.uint8), [-1])

    def gathered(process_set: hvd.ProcessSet) -> tf.Tensor:
        with horovod_internals.elastic_scope("allgather"):
            return hvd.allgather(message, process_set=process_set, **named)

    def exchanged(splits: tf.Tensor, process_set: hvd.ProcessSet) -> tf.Tensor:
        own = splits[: horovod_internals.size_in_graph(process_set)]  # elastic jobs change it
        with horovod_internals.elastic_scope("allgather"):  # alltoalls are unknown to its loop
            return hvd.alltoall(message, own, process_set=process_set, **named)[0]

    def nothing() -> tf.Tensor:
        if splits is not None and TO_ALL in codes:
            tf.identity(splits)  # so that the branches have the same inputs on every rank
        return tf.identity(message)

    branches: dict[int, Callable[[], tf.Tensor]] = {NOTHING: nothing}
    if (usual := sets.usual) is not None:
        branches[GATHER] = lambda: gathered(usual)
        if splits is not None:
            branches[TO_ALL] = lambda: exchanged(splits, usual)
        branches[REDUCE_FLOAT32] = lambda: reduced(tf.float32, usual)
        branches[REDUCE_FLOAT16] = lambda: reduced(tf.float16, usual)
    if (inside := sets.inside) is not None:
        branches[GATHER_INSIDE] = lambda: gathered(inside)
        if splits is not None:
            branches[TO_ALL_INSIDE] = lambda: exchanged(splits, inside)
    if len(codes) == 1:
        return branches[next(iter(codes))]()
    # Equally many branches with equal inputs on every rank: in a different graph, Horovod's own
    # operations would have other names than on the other ranks.
    return tf.switch_case(code, [branches.get(n, nothing) for n in range(max(codes) + 1)])


def gather_if_any(message: tf.Tensor, name: str, process_set: hvd.ProcessSet) -> tf.Tensor:
    """Return all ranks' messages, concatenated; no exchange if they are empty, all or none."""
    code = tf.where(tf.size(message) > 0, GATHER, NOTHING)
    return exchange(code, message, name, Sets(process_set), {NOTHING, GATHER})


@functools.cache
def _operation(code: int, name: str, process_set: hvd.ProcessSet) -> Any:
    """Return a TensorFlow function of one collective; operation names need a graph."""
    signature = [tf.TensorSpec([None], tf.uint8)]

    def run(message: tf.Tensor) -> tf.Tensor:
        return exchange(tf.constant(code), message, name, Sets(process_set), {code})

    # A concrete function: TensorFlow warns if functions of the same code are traced often.
    return tf.function(run, input_signature=signature, autograph=False).get_concrete_function()


def start_round(round_: Round, name: str, process_set: hvd.ProcessSet) -> ThreadRound:
    """Start a round outside of a step's graph, in a daemon thread of its own.

    A thread that waits for a rank in vain does not keep the process from ending.
    """

    def output() -> Array:
        message = message_of(round_, process_set.rank())
        operation = _operation(code_of(round_), name, process_set)
        return operation(tf.constant(message)).numpy().view(round_.data.dtype)

    return ThreadRound(Worker(name).submit(output), name)


class GraphRound:
    """Allgather that a step's graph carries out, one at a time; other rounds use a thread.

    An operation that waited for our thread would block one of TensorFlow's threads, which may have
    no other.
    """

    def __init__(self) -> None:
        self.message = np.empty(0, np.uint8)  # message that the graph has to gather, if any
        self.output = self.message  # all ranks' messages, set by the caller

    def __call__(
        self, round_: Round, name: str, process_set: hvd.ProcessSet
    ) -> GraphRound | ThreadRound:
        """Keep an allgather's data, uint8, for the graph; start any other round."""
        if round_.collective != "allgather":
            return start_round(round_, name, process_set)
        self.message = round_.data
        return self

    def take(self) -> np.ndarray:
        """Return the message for the graph and clear it."""
        message, self.message = self.message, np.empty(0, np.uint8)
        return message

    def is_done(self) -> bool:
        """Return whether the output is available."""
        return bool(self.output.size)

    def wait(self, timeout_s: float) -> np.ndarray:
        """Return the output of the graph, without waiting."""
        return self.output
