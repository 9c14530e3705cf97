"""One compressor: what Horovod and the user call.

Horovod calls ``compress`` with a gradient while it traces, reduces what that returns, and calls
``decompress`` with the outcome. For a compressed tensor it gets a probe, a single 1.0; the exchange
itself runs beside it, see ``graph``, and the probe's reduced value carries Horovod's op and factors
to our sum.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_fftcomp.adapter import handshake, process_sets
from horovod_fftcomp.adapter.compressor import Compressor
from horovod_fftcomp.adapter.connection import Connection
from horovod_fftcomp.adapter.replica_check import ReplicaCheck
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.buckets import may_gather
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import Scheduled
from horovod_fftcomp.engine.shadow_check import ShadowCheck
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.monitor.step_log import AddScalar
from horovod_fftcomp.schemes.hierarchical import Ranks
from horovod_fftcomp.tensorflow import graph, horovod_internals
from horovod_fftcomp.tensorflow.device import memory_of
from horovod_fftcomp.tensorflow.horovod_internals import is_elastic
from horovod_fftcomp.tensorflow.rounds import GraphRound, PendingRound
from horovod_fftcomp.tensorflow.steps import StepDriver
from horovod_fftcomp.tensorflow.variables import Variables, pairs_of

KERAS_3 = (
    "Horovod's DistributedOptimizer does not reduce the gradients of Keras 3: use "
    "horovod_fftcomp.tensorflow.keras3.DistributedOptimizer(optimizer, compression), or Keras 2 by "
    "TF_USE_LEGACY_KERAS=1 in the environment, which needs the package tf_keras"
)
_untraced = tf.autograph.experimental.do_not_convert


class TensorFlowCompressor(Compressor, tf.train.experimental.PythonState):
    """One policy bound to the variables of one model or tape; made by ``Compression``.

    It can be a part of a ``tf.train.Checkpoint``, of this rank alone.

    Parameters
    ----------
    model
        The Keras model whose gradients are exchanged, its ``trainable_variables``, or (name,
        variable) pairs; None: the variables that the optimizer or tape exchanges first.
    policy, settings
        Made by the factory.
    """

    _IN_ELASTIC_JOBS = "; in elastic jobs use horovod_fftcomp.tensorflow.TensorFlowKerasState"

    def __init__(self, model: Any = None, *, policy: Scheduled, settings: Settings) -> None:
        super().__init__(policy, settings)
        _check_scaler(settings.grad_scaler)
        self._set = settings.process_set or hvd.global_process_set
        self._name = self._new_name()
        self._make_groups = process_sets.makers(policy, settings)
        watch = self._watch(self._name, hvd.shutdown)
        self._connection = Connection(PendingRound, self._name, self._set, watch)
        with tf.init_scope(), tf.device("/CPU:0"):
            self._counter = tf.Variable(0, dtype=tf.int64, trainable=False, name=self._name)
        self._model = model
        self._variables: Variables | None = None
        self._saved: dict[str, Any] | None = None  # loaded before the variables were known
        self._exchange: graph.TracedStep | None = None  # of the trace under way
        self._trains_in = threading.get_ident()  # the thread that traces, which calls the graph too
        if model is not None and getattr(model, "built", True):
            self._bind(pairs_of(model))

    def _bind(self, pairs: Sequence[tuple[str, Any]]) -> None:
        """Learn of the variables, once."""
        self._parameters = variables = Variables(pairs)
        self._tensors = variables.specs()
        self._dtypes = [variable.dtype.name for variable in variables.variables]
        buckets = self._buckets_of(self._tensors)
        member = self._set.included()  # Horovod traces the compressor of the others as well
        rank = self._set.rank() if member else 0
        memory = memory_of(variables.variables, buckets) if member else None
        device = None if memory is None else memory.device
        self._engine = Engine(buckets, rank, self._set.size(), device)
        settings = self._settings
        # Where ranks may join, nothing is gathered by which to tell what a GPU computes.
        if device is not None and self._gathers and (every := settings.shadow_check):
            of_job = (self._connection.send, self._name, self._set, settings.timeout_s)
            self._engine.shadow = ShadowCheck(self._engine, every, *of_job)
        hashes = GraphRound()
        replicas = ReplicaCheck(hashes, variables, settings.replica_check, self._set, self._name)
        self._steps = StepDriver(
            variables,
            self._engine,
            self._connection,
            replicas,
            self._recorder() if member else None,
            self._closed() if member else None,
            settings,
            self._set,
            hashes,
            self._greet,
            self.rejoin,
            memory,
        )
        self._variables = variables
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self.load_state_dict(saved)

    def bind(self, model: Any) -> None:
        """Take a model's variables, if none are known yet."""
        if not self.is_bound:
            self._bind(pairs_of(model))

    def __repr__(self) -> str:
        if self.is_bound:
            return super().__repr__()
        return f"Compression.{self._policy.written()}: without variables yet"

    def __getattr__(self, name: str) -> Any:
        if name in ("_engine", "_steps", "_parameters", "_tensors", "_dtypes"):
            raise UnsupportedError(
                "this compressor knows no variables before its first step; give it the model: "
                "Compression.fft(model)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_bound(self) -> bool:
        """Whether the variables are known, so that there is a state."""
        return self._variables is not None

    def __hash__(self) -> int:
        """Return a number of this object alone: Horovod remembers its functions by it.

        Raises UnsupportedError where Horovod wraps an optimizer of Keras 3, which would then never
        call us, nor reduce anything.
        """
        kinds = type(horovod_internals.optimizer_to_wrap()).__mro__
        if any(kind.__module__.startswith("keras.") for kind in kinds):
            raise UnsupportedError(KERAS_3)
        return id(self)

    # Horovod calls these two.

    @_untraced
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Take a variable's gradient; return what Horovod is to reduce, and a context."""
        if not is_elastic() and (not self._set.included() or self._set.size() == 1):
            return tensor, None  # traced, but never run
        number = None if self._exchange is None else self._exchange.start_gradient(tensor)
        if number is None:
            self._exchange = self._traced()
            number = self._exchange.start_gradient(tensor)
        assert number is not None
        exchange, total = self._exchange, self._exchange.sums[number]
        if exchange.is_taken:
            self._exchange = None  # it would keep the graph alive
        return exchange.handed[number], None if total is None else (total, tensor.dtype)

    @_untraced
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the reduced gradient; ``tensor`` is what Horovod made of ``compress``'s."""
        if ctx is None:
            return tensor
        total, dtype = ctx
        return tf.cast(total * (tensor / self._size()), dtype)

    def reduced(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the means over ranks of ``grads``, without an optimizer of Horovod's.

        In a ``tf.function``. None stays None; IndexedSlices are made dense.
        """
        if is_elastic():
            raise UnsupportedError(
                "elastic jobs need an optimizer or tape of Horovod's, so Keras 2: "
                "TF_USE_LEGACY_KERAS=1"
            )
        dense = [tf.convert_to_tensor(g) if g is not None else None for g in grads]
        if self._set.size() == 1 or not self._set.included():
            return dense
        if tf.executing_eagerly():
            raise UnsupportedError("reduced() works in a tf.function; run_eagerly=False")
        exchange = self._exchange_of(dense, variables)
        means = []
        for number, (grad, total) in enumerate(zip(dense, exchange.sums, strict=True)):
            if total is not None:
                means.append(tf.cast(total / self._size(), grad.dtype))
            elif grad is not None:
                own, name = exchange.handed[number], f"{self._name}.dense.{number}"
                means.append(hvd.allreduce(own, name=name, process_set=self._set))
            else:
                means.append(None)
        return means

    def _check_optimizer(self, optimizer: Any) -> None:
        """Warn if both the recipe and an optimizer of Keras have a momentum."""
        found = {option: getattr(optimizer, option, None) for option in ("momentum", "beta_1")}
        momenta = {o: value for o, value in found.items() if isinstance(value, float) and value}
        self._warn_of_two_momenta(type(optimizer).__name__, momenta)

    def _size(self) -> tf.Tensor:
        if is_elastic():
            return tf.cast(horovod_internals.size_in_graph(self._set), tf.float32)
        return tf.constant(float(self._set.size()))

    def _traced(self) -> graph.TracedStep:
        """Put the exchange of all gradients of a call of Horovod's into the graph around it."""
        call = horovod_internals.find_call()
        self._check_optimizer(call.optimizer)
        if call.op == hvd.Adasum:
            raise UnsupportedError(
                "op=hvd.Adasum cannot be compressed; use op=hvd.Average or op=hvd.Sum"
            )
        with horovod_internals.graph_around().as_default():
            return self._exchange_of(
                call.grads, call.variables, call.process_set, call.op != hvd.Sum
            )

    def _exchange_of(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any] | None,
        meeting: Any = None,
        averages: bool = True,
    ) -> graph.TracedStep:
        if self._variables is None:
            if self._model is None and variables is None:
                raise UnsupportedError("give the compressor a model: Compression.fft(model)")
            self._bind(pairs_of(variables if self._model is None else self._model))
        known = self._variables
        assert known is not None
        if variables is None:
            variables = known.variables
        if len(variables) != len(grads):
            raise UnsupportedError(f"{len(grads)} gradients came for {len(variables)} variables")
        slots = self._slots
        self._trains_in = threading.get_ident()
        self._steps.meeting = meeting or self._set
        numbers = [known.number(variable) for variable in variables]
        return graph.TracedStep(
            self._steps,
            self._buckets,
            grads,
            [slots[number] for number in numbers],
            shown=self._shown(variables, numbers),
            name=self._name,
            process_set=self._set,
            groups=self._groups,
            counter=self._counter,
            scale=self._loss_scale(),
            averages=averages,
            calls_roll=self._gathers,
            mends=self._settings.replica_check == "broadcast",
        )

    @property
    def _gathers(self) -> bool:
        """Whether steps have other collectives than sums."""
        return self._settings.replica_check != "off" or may_gather(self._buckets)

    @functools.cached_property
    def _groups(self) -> Mapping[Ranks, Any]:
        """The process sets that rounds among some ranks need; operations are built for them.

        That is before the ranks greet each other in a step, so they have to agree here; once, as
        later traces may be one rank's alone.
        """
        if not self._buckets:
            return {}
        if self._policy.ranks_per_node > 1:
            told = {"ranks_per_node": self._policy.ranks_per_node}
            handshake.compare_facts(self._connection.gather("the first step", told))
        return self._make_groups()

    def _shown(self, variables: Sequence[Any], numbers: Sequence[int]) -> dict[int, tf.Tensor]:
        """Return the compressed variables' values where other variables may come in later."""
        slots = self._slots
        if not horovod_internals.is_called_eagerly():
            return {}
        return {
            number: variable.read_value()
            for variable, number in zip(variables, numbers, strict=True)
            if slots[number] is not None and "CPU" in variable.device
        }

    def _loss_scale(self) -> tf.Tensor:
        scaler = self._settings.grad_scaler
        if scaler is None:
            return tf.constant(1.0)
        scale = scaler() if callable(scaler) else scaler.loss_scale
        if not isinstance(scale, tf.Tensor | tf.Variable):
            raise TypeError(
                f"grad_scaler gave the number {scale!r}, which would stay the same in the graph; "
                "let it return a tensor or a variable"
            )
        return tf.cast(scale, tf.float32)

    def _raise(self, error: type[BaseException]) -> None:
        """Raise ``error`` in the thread that trains as soon as TensorFlow returns to it.

        Steps are closed by operations, which TensorFlow runs in threads of its own, and of whose
        errors it makes errors of its own. All ranks complete the call that is under way.
        """
        target = ctypes.py_object(error)
        if not ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._trains_in), target):
            main = threading.main_thread().ident or 0  # the thread that has traced is gone
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), target)

    def _greet(self, send: GraphRound) -> None:
        self._connection.start_handshake(send, self._facts, self._steps.meeting)

    def _add_scalar(self) -> AddScalar | None:
        scalars = self._settings.scalars
        if hasattr(scalars, "as_default"):
            return functools.partial(_add_scalar, scalars)
        return super()._add_scalar()

    # For the user, beside what all compressors offer.

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned on the same rank, or a gathered state."""
        if self._variables is None:
            self._saved = saved
        else:
            super().load_state_dict(saved)

    def serialize(self) -> bytes:
        """Return this rank's state for a ``tf.train.Checkpoint``, which every rank has to write."""
        known = self._variables is not None
        return checkpoint.pack(self.state_dict() if known else self._saved)

    def deserialize(self, string_value: bytes) -> None:
        """Restore what ``serialize`` returned; ``tf.train.Checkpoint`` calls it.

        ValueError for a pickle, as versions before 0.1.0 wrote it.
        """
        saved = checkpoint.unpack(string_value)
        if saved is not None:
            self.load_state_dict(saved)


def _add_scalar(writer: tf.summary.SummaryWriter, name: str, value: float, step: int) -> None:
    """Write what ``tf.summary.scalar`` does, which asks for an installed TensorBoard."""
    plugin = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin, data_class="DATA_CLASS_SCALAR")
    with tf.init_scope(), writer.as_default():  # the caller may be tracing
        # Called by ``write``, the constant lies on the host, whatever devices there are.
        tf.summary.write(name, lambda: tf.constant(value, tf.float32), step, metadata)


def _check_scaler(scaler: Any | Callable[[], Any]) -> None:
    if scaler is not None and not callable(scaler) and not hasattr(scaler, "loss_scale"):
        raise TypeError(
            "grad_scaler must have loss_scale, as LossScaleOptimizer has, or be a function that "
            f"returns the scale; got {type(scaler).__name__}"
        )
