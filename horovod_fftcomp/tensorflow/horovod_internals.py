"""Private parts of ``horovod.tensorflow`` and TensorFlow that this adapter relies on.

Each function says what it relies on. ``tests/test_horovod_internals.py`` tests each and fails if
Horovod or TensorFlow has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, NamedTuple

import tensorflow as tf
from horovod.tensorflow.mpi_ops import size_op
from tensorflow.python.eager.execute import quick_execute

from horovod_fftcomp.adapter.horovod_internals import calling_frames, check_version
from horovod_fftcomp.errors import UnsupportedError

check_version()

# Horovod's elastic loop takes TensorFlow's UnknownError for the end of the job. TensorFlow converts
# this exception to UnimplementedError, and most others to UnknownError.
FatalInElasticJob = NotImplementedError


class Call(NamedTuple):
    """Arguments of the Horovod function that is calling the compression hook."""

    grads: Sequence[Any]
    variables: Sequence[Any] | None
    process_set: Any
    op: Any
    optimizer: Any  # Keras optimizer, if one is calling


def calling_objects() -> Iterator[Any]:
    """Yield the ``self`` of each method on the call stack, the innermost first.

    Keras optimizers have no reference to the model or loss scaler that calls them.
    """
    for frame in calling_frames():
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]


def find_call() -> Call:
    """Return the call of Horovod's ``allreduce_grads`` that is being traced.

    Horovod passes only one tensor to the hook. Relies on the arguments ``grads`` and ``vars`` of
    Horovod's functions whose names end in ``allreduce_grads``, and on ``process_set``, ``op`` and
    ``compression`` in those between. Raises UnsupportedError if there is no such call.
    """
    process_set = op = None
    for frame in calling_frames():
        name, known = frame.f_code.co_name, frame.f_locals
        if process_set is None and "process_set" in known and "compression" in known:
            process_set, op = known["process_set"], known.get("op")  # of its (grouped_)allreduce
        if name.endswith("allreduce_grads") and "grads" in known and "vars" in known:
            return Call(known["grads"], known["vars"], process_set, op, _calling_optimizer())
    raise UnsupportedError(
        "a compressor works in hvd.DistributedOptimizer and hvd.DistributedGradientTape, which "
        "know the variables; to reduce single tensors, use horovod_fftcomp.mpi"
    )


def _calling_optimizer() -> Any:
    """Return the Keras optimizer on the call stack; None if there is none."""
    for owner in calling_objects():
        if hasattr(owner, "apply_gradients") and hasattr(owner, "get_config"):
            return owner
    return None


def optimizer_to_wrap() -> Any | None:
    """Return the Keras optimizer that Horovod is about to wrap; None if it wraps none.

    Relies on Horovod hashing the compressor inside of ``_keras.create_distributed_optimizer``, and
    on that function's argument ``optimizer``.
    """
    for frame in calling_frames():
        if frame.f_code.co_name == "create_distributed_optimizer":
            return frame.f_locals.get("optimizer")
    return None


def graph_around() -> tf.Graph:
    """Return the graph around the ``tf.cond`` in whose branch Horovod calls the hook.

    Relies on Horovod calling it there, and on TensorFlow's ``FuncGraph.outer_graph``.
    """
    graph = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
    if graph is None or not hasattr(graph, "outer_graph"):
        raise UnsupportedError(
            "compression needs eager execution or tf.function; graphs and sessions of TensorFlow "
            "1 are not supported"
        )
    around: Any = graph
    while around is not None:
        if getattr(around, "_xla_compile", False) or _is_compiled(around):
            raise UnsupportedError(
                "compression calls Python, which XLA does not support: use jit_compile=False in "
                "model.compile() and tf.function()"
            )
        around = getattr(around, "outer_graph", None)
    return graph


def is_called_eagerly() -> bool:
    """Return whether the default graph is that of Horovod's function, called eagerly.

    Relies on the name of Horovod's ``tf.function``, ``allreduce_grads``.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.name == "allreduce_grads" and not hasattr(graph.outer_graph, "outer_graph")


def _is_compiled(graph: Any) -> bool:
    context = graph._get_control_flow_context() if hasattr(graph, "as_graph_def") else None
    return context is not None and context.IsXLAContext()


def size_in_graph(process_set: Any) -> tf.Tensor:
    """Return the number of ranks at run time as an int32 tensor.

    Relies on ``horovod.tensorflow.mpi_ops.size_op``.
    """
    return size_op(process_set_id=process_set.process_set_id)


def elastic_scope(collective: str) -> AbstractContextManager[Any]:
    """Return a name scope; Horovod's elastic loop takes errors in it for a lost rank.

    Relies on the names that ``horovod.tensorflow.elastic`` searches for in error messages.
    """
    return tf.name_scope(f"Horovod{collective.capitalize()}")


def execution_code() -> CodeType:
    """Return the code object of the function in which threads wait for TensorFlow.

    Relies on ``tensorflow.python.eager.execute.quick_execute``.
    """
    return quick_execute.__code__
