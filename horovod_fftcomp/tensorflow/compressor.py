"""``TensorFlowCompressor``, the compression object that Horovod and the user call.

While Horovod traces, it calls ``compress`` with a gradient, allreduces the result, and calls
``decompress`` with the reduced value. For a compressed tensor the result is a probe, a tensor with
a single 1.0, while the exchange itself is a separate part of the graph, see ``graph``. The sum is
multiplied by the reduced probe, which contains Horovod's op and scaling factors.
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
from horovod_fftcomp.adapter.settings import Settings, is_elastic
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.policy import Scheduled
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.monitor.step_log import AddScalar
from horovod_fftcomp.schemes.hierarchical import Ranks
from horovod_fftcomp.tensorflow import graph, horovod_internals
from horovod_fftcomp.tensorflow.device import memory_of
from horovod_fftcomp.tensorflow.rounds import GraphRound, start_round
from horovod_fftcomp.tensorflow.steps import TensorFlowStepDriver
from horovod_fftcomp.tensorflow.variables import Variables, pairs_of

KERAS_3 = (
    "Horovod's DistributedOptimizer does not reduce the gradients of Keras 3: use "
    "horovod_fftcomp.tensorflow.keras3.DistributedOptimizer(optimizer, compression), or Keras 2 by "
    "TF_USE_LEGACY_KERAS=1 in the environment, which needs the package tf_keras"
)
_untraced = tf.autograph.experimental.do_not_convert


class TensorFlowCompressor(Compressor, tf.train.experimental.PythonState):
    """Compressor of the gradients of one model or tape; made by the factories of ``Compression``.

    A ``tf.train.Checkpoint`` can contain it; every rank has to write its own.

    Parameters
    ----------
    model
        The Keras model whose gradients are exchanged, its ``trainable_variables``, or (name,
        variable) pairs; None: the variables that the optimizer or tape exchanges first.
    policy, settings
        Recipe with its schedule, and settings; made by the factory.
    """

    driver: TensorFlowStepDriver  # set once the variables are known
    _parameters: Variables
    _IN_ELASTIC_JOBS = "; in elastic jobs use horovod_fftcomp.tensorflow.TensorFlowKerasState"

    def __init__(self, model: Any = None, *, policy: Scheduled, settings: Settings) -> None:
        super().__init__(policy, settings)
        policy = self._on_nodes(lambda: process_sets.ranks_per_node(settings))
        _check_scaler(settings.grad_scaler)
        self._set = settings.process_set or hvd.global_process_set
        self._make_groups = process_sets.makers(policy, settings)
        self._make_connection(start_round, hvd.shutdown)
        self._name = self.connection.name
        with tf.init_scope(), tf.device("/CPU:0"):
            self._counter = tf.Variable(0, dtype=tf.int64, trainable=False, name=self._name)
        self._model = model
        self._saved: dict[str, Any] | None = None  # state loaded before the variables were known
        self._exchange: graph.TracedStep | None = None  # of the present trace
        self._trains_in = threading.get_ident()  # the thread that traces and runs the graph
        if model is not None and getattr(model, "built", True):
            self._bind(pairs_of(model))

    def _bind(self, pairs: Sequence[tuple[str, Any]]) -> None:
        """Set the variables and make what depends on them; once."""
        self._parameters = variables = Variables(pairs)
        self._tensors = variables.specs()
        self._dtypes = [variable.dtype.name for variable in variables.variables]
        buckets = self._buckets_of(self._tensors)
        for bucket in buckets:
            bucket.policy.after_warmup.check_optimizer(f"recipe {self.policy.recipe!r}")
        member = self._set.included()  # on other ranks Horovod only traces the compressor
        memory = memory_of(variables.variables, buckets) if member else None
        device, hashes = None if memory is None else memory.device, GraphRound()
        parts = self._make_parts(buckets, device, hashes)
        self.driver = TensorFlowStepDriver(parts, variables, hashes, self.rejoin, memory)
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self.load_state_dict(saved)

    def _deciding_size(self) -> int:
        """Return the number of ranks for which exchange "auto" is decided.

        A graph is traced for one exchange, but elastic jobs change the number: they gather.
        """
        return 1 if is_elastic() else super()._deciding_size()

    def bind(self, model: Any) -> None:
        """Use the model's variables, unless variables are known already."""
        if not self.is_bound:
            self._bind(pairs_of(model))

    def __repr__(self) -> str:
        if self.is_bound:
            return super().__repr__()
        return f"Compression.{self.policy.written()}: without variables yet"

    def __getattr__(self, name: str) -> Any:
        if name in ("engine", "driver", "_parameters", "_tensors", "_dtypes", "_slots"):
            raise UnsupportedError(
                "this compressor knows no variables before its first step; give it the model: "
                "Compression.fft(model)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_bound(self) -> bool:
        """Whether the variables are known."""
        return "driver" in vars(self)

    def __hash__(self) -> int:
        """Return a hash by identity, by which Horovod caches its traced functions.

        Raises UnsupportedError if Horovod is about to wrap a Keras 3 optimizer, whose gradients it
        would not reduce.
        """
        kinds = type(horovod_internals.optimizer_to_wrap()).__mro__
        if any(kind.__module__.startswith("keras.") for kind in kinds):
            raise UnsupportedError(KERAS_3)
        return id(self)

    # Horovod calls these two.

    @_untraced
    def compress(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Start the exchange of a gradient; return the tensor to be allreduced, and a context."""
        if not is_elastic() and (not self._set.included() or self._set.size() == 1):
            return tensor, None  # traced but never run
        exchange = self._exchange
        number = None if exchange is None else exchange.start_gradient(tensor)
        if exchange is None or number is None:
            exchange = self._exchange = self._trace_call()
            number = exchange.start_gradient(tensor)
            assert number is not None
        total = exchange.sums[number]
        if not exchange.untaken:
            self._exchange = None  # a reference would keep the graph alive
        return exchange.horovod_inputs[number], None if total is None else (total, tensor.dtype)

    @_untraced
    def decompress(self, tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the reduced gradient; ``tensor``: allreduce of the result of ``compress``."""
        if ctx is None:
            return tensor
        total, dtype = ctx
        return tf.cast(total * tf.reshape(tensor / self._size(), []), dtype)

    def reduced(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the means over ranks of ``grads``, for use without Horovod's optimizer.

        It has to be called in a ``tf.function``. None stays None; IndexedSlices become dense.
        Raises UnsupportedError in eager execution and in elastic jobs.
        """
        if is_elastic():
            raise UnsupportedError(
                "elastic jobs need Horovod's own optimizer or tape, and so Keras 2: set "
                "TF_USE_LEGACY_KERAS=1"
            )
        dense = [tf.convert_to_tensor(g) if g is not None else None for g in grads]
        if self._set.size() == 1 or not self._set.included():
            return dense
        if tf.executing_eagerly():
            raise UnsupportedError("reduced() works in a tf.function only; use run_eagerly=False")
        exchange = self._trace_step(dense, variables)
        means: list[Any] = []
        for number, (grad, total) in enumerate(zip(dense, exchange.sums, strict=True)):
            if grad is None:
                means.append(None)
            elif total is not None:
                means.append(tf.cast(total / self._size(), grad.dtype))
            else:
                sent, name = exchange.horovod_inputs[number], f"{self._name}.dense.{number}"
                means.append(hvd.allreduce(sent, name=name, process_set=self._set))
        return means

    def _check_optimizer(self, optimizer: Any) -> None:
        """Warn if the recipe and a Keras optimizer do not go together."""
        found = {option: getattr(optimizer, option, None) for option in ("momentum", "beta_1")}
        momenta = {o: value for o, value in found.items() if isinstance(value, float) and value}
        self._warn_of_two_momenta(type(optimizer).__name__, momenta)
        if hasattr(optimizer, "epsilon"):
            self._warn_of_squares(type(optimizer).__name__)

    def _size(self) -> tf.Tensor:
        if is_elastic():
            return tf.cast(horovod_internals.size_in_graph(self._set), tf.float32)
        return tf.constant(float(self._set.size()))

    def _trace_call(self) -> graph.TracedStep:
        """Add the exchange of all gradients of the Horovod call to the graph around it."""
        call = horovod_internals.find_call()
        self._check_optimizer(call.optimizer)
        if call.op == hvd.Adasum:
            raise UnsupportedError(
                "op=hvd.Adasum cannot be compressed; use op=hvd.Average or op=hvd.Sum"
            )
        with horovod_internals.graph_around().as_default():
            return self._trace_step(
                call.grads, call.variables, call.process_set, call.op != hvd.Sum
            )

    def _trace_step(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any] | None,
        process_set: Any = None,
        averages: bool = True,
    ) -> graph.TracedStep:
        if not self.is_bound:
            if self._model is None and variables is None:
                raise UnsupportedError(
                    "the compressor knows no variables; give it a model: Compression.fft(model)"
                )
            self._bind(pairs_of(variables if self._model is None else self._model))
        known, slots = self._parameters, self._slots
        if variables is None:
            variables = known.variables
        if len(variables) != len(grads):
            raise UnsupportedError(f"got {len(grads)} gradients for {len(variables)} variables")
        self._trains_in = threading.get_ident()
        self.driver.optimizers_set = process_set or self._set
        numbers = [known.number(variable) for variable in variables]
        return graph.TracedStep(
            self.driver,
            grads,
            [slots[number] for number in numbers],
            identified=self._identified(variables, numbers),
            groups=self._groups,
            counter=self._counter,
            scale=self._loss_scale(),
            averages=averages,
        )

    @functools.cached_property
    def _groups(self) -> Mapping[Ranks, Any]:
        """Process sets for rounds among a part of the ranks.

        Operations are built for them before the handshake of the first step, so ranks compare
        ``ranks_per_node`` here; once only, since a later trace may be on one rank only.
        """
        if not self._buckets:
            return {}
        if self.policy.node_size > 1:
            facts = {"ranks_per_node": self.policy.node_size}
            handshake.compare_facts(self.connection.gather("the first step", facts))
        return self._make_groups()

    def _identified(self, variables: Sequence[Any], numbers: Sequence[int]) -> dict[int, tf.Tensor]:
        """Return values of compressed variables whose memory each step checks, by number.

        Only where Horovod may reuse the trace for other variables, see ``Variables.check``.
        """
        if not horovod_internals.is_called_eagerly():
            return {}
        return {
            number: variable.read_value()
            for variable, number in zip(variables, numbers, strict=True)
            if self._slots[number] is not None and "CPU" in variable.device
        }

    def _loss_scale(self) -> tf.Tensor:
        scaler = self._settings.grad_scaler
        if scaler is None:
            return tf.constant(1.0)
        scale = scaler() if callable(scaler) else scaler.loss_scale
        if not isinstance(scale, tf.Tensor | tf.Variable):
            raise TypeError(
                f"grad_scaler gave the number {scale!r}, which would be constant in the graph; let "
                "it return a tensor or a variable"
            )
        return tf.cast(scale, tf.float32)

    def _raise(self, error: type[BaseException]) -> None:
        """Raise ``error`` in the training thread when TensorFlow's present call returns to it.

        Steps are closed by operations, which TensorFlow runs in its own threads, and whose errors
        it converts to its own types. All ranks complete the present call.
        """
        target = ctypes.py_object(error)
        if not ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._trains_in), target):
            main = threading.main_thread().ident or 0  # the thread that traced has ended
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), target)

    def _add_scalar(self) -> AddScalar | None:
        scalars = self._settings.scalars
        if hasattr(scalars, "as_default"):
            return functools.partial(_add_scalar, scalars)
        return super()._add_scalar()

    # Further user methods.

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on this rank, or a gathered one."""
        if self.is_bound:
            super().load_state_dict(saved)
        else:
            self._saved = saved

    def serialize(self) -> bytes:
        """Return this rank's state for a ``tf.train.Checkpoint``; every rank has to write one."""
        return checkpoint.pack(self.state_dict() if self.is_bound else self._saved)

    def deserialize(self, string_value: bytes) -> None:
        """Load the result of ``serialize``; called by ``tf.train.Checkpoint``.

        Raises ValueError for a pickle, which versions before 0.1.0 wrote.
        """
        saved = checkpoint.unpack(string_value)
        if saved is not None:
            self.load_state_dict(saved)


def _add_scalar(writer: tf.summary.SummaryWriter, name: str, value: float, step: int) -> None:
    """Write a scalar like ``tf.summary.scalar``, which needs an installed TensorBoard."""
    plugin = tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars")
    metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin, data_class="DATA_CLASS_SCALAR")
    with tf.init_scope(), writer.as_default():  # the caller may be tracing
        # Made inside ``write``, the constant is on the host, whatever devices there are.
        tf.summary.write(name, lambda: tf.constant(value, tf.float32), step, metadata)


def _check_scaler(scaler: Any | Callable[[], Any]) -> None:
    if scaler is not None and not callable(scaler) and not hasattr(scaler, "loss_scale"):
        raise TypeError(
            "grad_scaler must have loss_scale, as LossScaleOptimizer has, or be a function that "
            f"returns the scale; got {type(scaler).__name__}"
        )
