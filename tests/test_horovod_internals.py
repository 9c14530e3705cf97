"""Private parts of Horovod are as the adapters expect them: one test for each, with the real one.

Nothing is exchanged: Horovod's own functions run, or are traced, in one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from horovod_fftcomp.adapter.settings import is_elastic


def _torch():
    pytest.importorskip("horovod.torch", exc_type=ImportError)
    from horovod_fftcomp.torch import horovod_internals

    return horovod_internals


def _tensorflow():
    pytest.importorskip("horovod.tensorflow", exc_type=ImportError)
    from horovod_fftcomp.tensorflow import horovod_internals

    return horovod_internals


@pytest.mark.torch
@pytest.mark.parametrize(("version", "n_warnings"), [("0.28.7", 0), ("0.29.0", 1), ("0.2.28", 1)])
def test_another_version_of_horovod_is_warned_of_once(monkeypatch, recwarn, version, n_warnings):
    horovod = pytest.importorskip("horovod")
    from horovod_fftcomp.adapter.horovod_internals import check_version

    monkeypatch.setattr(horovod, "__version__", version)
    check_version.cache_clear()
    try:
        for _ in range(2):
            check_version()
    finally:
        monkeypatch.undo()
        check_version.cache_clear()
    assert len(recwarn) == n_warnings
    for warned in recwarn:
        assert f"Horovod {version} is installed" in str(warned.message)
        assert "horovod==0.28.1" in str(warned.message)


@pytest.mark.more
@pytest.mark.torch
def test_n_ranks_and_registered_process_sets():
    pytest.importorskip("horovod.torch", exc_type=ImportError)
    script = (
        "import horovod.torch as hvd; hvd.init()\n"
        "from horovod_fftcomp.adapter import horovod_internals as internals\n"
        "print(internals.n_ranks(), dict(internals.registered_process_sets()))"
    )
    allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | allowed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.strip().endswith("1 {(0,): 0}"), ran.stdout + ran.stderr


class _Hooked:
    """A compression that tells what is found from within the hook that Horovod calls."""

    def __init__(self, look):
        self.look, self.seen, self.hashed_by = look, [], []

    def compress(self, tensor):
        self.seen.append(self.look())
        return tensor, None

    def decompress(self, tensor, ctx):
        return tensor


def _optimizer_with(compression, monkeypatch):
    """Return what a hook of Horovod's optimizer sees as ``self``, and a parameter."""
    import torch
    from horovod.torch import optimizer as theirs

    assert "_compression" in theirs._DistributedOptimizer.__init__.__code__.co_names
    monkeypatch.setattr(theirs, "allreduce_async_", lambda *args, **kwargs: None)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.ones(3, 2).to_sparse()
    optimizer = SimpleNamespace(
        _compression=compression, _parameter_names={parameter: "w"}, sparse_as_dense=True,
        op=theirs.Sum, process_set=None,
    )  # fmt: skip
    return optimizer, parameter, theirs._DistributedOptimizer._allreduce_grad_async


@pytest.mark.torch
def test_calling_optimizer(monkeypatch):
    internals = _torch()
    compression = _Hooked(lambda: internals.calling_optimizer(compression))
    optimizer, parameter, hook = _optimizer_with(compression, monkeypatch)
    hook(optimizer, parameter)
    assert compression.seen == [optimizer]
    assert internals.calling_optimizer(compression) is None


@pytest.mark.torch
def test_parameter_of_hook(monkeypatch):
    internals = _torch()
    compression = _Hooked(internals.parameter_of_hook)
    optimizer, parameter, hook = _optimizer_with(compression, monkeypatch)
    hook(optimizer, parameter)
    assert len(compression.seen) == 1
    assert compression.seen[0] is parameter
    assert internals.parameter_of_hook() is None


@pytest.mark.torch
def test_shut_down_keeps_handles(monkeypatch):
    internals = _torch()
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    done = []
    monkeypatch.setattr(mpi_ops._basics, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr(mpi_ops.mpi_lib, "horovod_torch_reset", lambda: done.append("reset"))
    hvd.shutdown()
    assert done == ["reset", "shutdown"]
    internals.shut_down()
    assert done[2:] == ["shutdown"]


@pytest.mark.torch
def test_register_state_handler(monkeypatch):
    internals = _torch()
    from horovod.torch.elastic import state as elastic

    class Kind:
        pass

    class Handler(elastic.StateHandler):
        pass

    before = elastic.get_handler_registry()
    try:
        for _ in range(2):
            internals.register_state_handler(Kind, Handler)
        assert len(elastic.get_handler_registry()) == len(before) + 1
        assert type(elastic._get_handler(Kind())) is Handler
    finally:
        elastic.set_handler_registry(before)


@pytest.mark.torch
@pytest.mark.parametrize("asynchronous", [False, True])
def test_wait_for_horovod(monkeypatch, asynchronous):
    """What Horovod does on a GPU is seen on one alone; here, what we do about it."""
    internals = _torch()
    import torch

    done = []
    current = SimpleNamespace(wait_stream=lambda stream: done.append(("wait", stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setenv("HOROVOD_ENABLE_ASYNC_COMPLETION", str(int(asynchronous)))
    output = SimpleNamespace(
        device="cuda", is_sparse=False, record_stream=lambda stream: done.append(("record", stream))
    )
    internals.wait_for_horovod(output)
    assert done == [("wait", "default")] * asynchronous + [("record", current)]


class _TwoRanks:
    """A process set that can be traced without ``hvd.init()``."""

    process_set_id, ranks = 0, [0, 1]

    def included(self):
        return True

    def size(self):
        return 2

    def rank(self):
        return 0


TWO_RANKS = _TwoRanks()


def _traced(compression, groups=None):
    """Return the function that Horovod makes to reduce gradients, and its variables."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    made = hvd._make_allreduce_grads_fn(
        "Distributed", "", "", compression, False, hvd.Sum, 1.0, groups, TWO_RANKS
    )
    return made, [tf.Variable(tf.zeros([2, 3])), tf.Variable(tf.zeros([4]))]


@pytest.mark.tf
@pytest.mark.parametrize("groups", [None, 1])
def test_find_call(groups):
    internals = _tensorflow()
    import horovod.tensorflow as hvd
    import tensorflow as tf

    compression = _Hooked(internals.find_call)
    reduce, variables = _traced(compression, groups)
    given = [tf.TensorSpec(variable.shape) for variable in variables]
    reduce.get_concrete_function(given, variables)
    assert compression.seen
    for call in compression.seen:
        assert [grad.shape for grad in call.grads] == [spec.shape for spec in given]
        assert all(a is b for a, b in zip(call.variables, variables, strict=True))
        assert (call.process_set, call.op) == (TWO_RANKS, hvd.Sum)
        assert call.optimizer is None
    from horovod_fftcomp import UnsupportedError

    with pytest.raises(UnsupportedError, match="which know the variables"):
        internals.find_call()


@pytest.mark.tf
def test_find_call_knows_the_optimizer_of_keras():
    internals = _tensorflow()
    keras = pytest.importorskip("tf_keras")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    compression = _Hooked(internals.find_call)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), compression=compression, op=hvd.Sum, process_set=TWO_RANKS
    )
    variable = tf.Variable(tf.zeros([2, 3]))

    @tf.function
    def step():
        optimizer.minimize(lambda: tf.reduce_sum(variable), [variable], tf.GradientTape())

    step.get_concrete_function()
    assert [call.optimizer for call in compression.seen] == [optimizer]


@pytest.mark.tf
def test_graph_around_and_is_called_eagerly():
    internals = _tensorflow()
    import tensorflow as tf

    from horovod_fftcomp import UnsupportedError

    def look():
        graph = internals.graph_around()
        with graph.as_default():
            return graph, internals.is_called_eagerly()

    compression = _Hooked(look)
    reduce, variables = _traced(compression)
    given = [tf.TensorSpec(variable.shape) for variable in variables]
    concrete = reduce.get_concrete_function(given, variables)
    assert compression.seen
    assert all(graph is concrete.graph for graph, _ in compression.seen)
    assert all(eager for _, eager in compression.seen)

    inside = _Hooked(look)

    with tf.Graph().as_default():  # where Horovod does not make a function of its own
        plain = _traced(inside)[0]

    @tf.function
    def step(*grads):
        return plain(list(grads), variables)

    outer = step.get_concrete_function(*given)
    assert inside.seen
    assert all(graph is outer.graph for graph, _ in inside.seen)
    assert not any(eager for _, eager in inside.seen)

    @tf.function(jit_compile=True)
    def compiled(*grads):
        return plain(list(grads), variables)

    with pytest.raises(UnsupportedError, match="jit_compile=False"):
        compiled.get_concrete_function(*given)


@pytest.mark.tf
def test_optimizer_to_wrap():
    internals = _tensorflow()
    keras = pytest.importorskip("tf_keras")
    import horovod.tensorflow as hvd

    class Hashed(_Hooked):
        def __hash__(self):
            self.hashed_by.append(internals.optimizer_to_wrap())
            return id(self)

    compression, optimizer = Hashed(None), keras.optimizers.SGD(0.1)
    hvd.DistributedOptimizer(optimizer, compression=compression)
    assert compression.hashed_by
    assert all(found is optimizer for found in compression.hashed_by)
    assert internals.optimizer_to_wrap() is None


@pytest.mark.tf
def test_calling_objects_in_keras_3():
    internals = _tensorflow()
    keras = pytest.importorskip("keras", minversion="3")
    import tensorflow as tf

    seen = []

    class Inner(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            seen.extend(internals.calling_objects())
            return super().apply(grads, trainable_variables)

    scaled = keras.optimizers.LossScaleOptimizer(inner := Inner(0.1), initial_scale=1.0)
    variable = keras.Variable(tf.zeros([2]))
    scaled.build([variable])
    scaled.apply([tf.ones([2])], [variable])
    assert any(owner is scaled for owner in seen)
    assert any(owner is inner for owner in seen)


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True)])
def test_is_elastic_asks_as_horovod_does(monkeypatch, value, expected):
    monkeypatch.setenv("HOROVOD_ELASTIC", value)
    assert is_elastic() is expected
    monkeypatch.delenv("HOROVOD_ELASTIC")
    assert is_elastic() is False


@pytest.mark.tf
def test_size_in_graph():
    internals = _tensorflow()
    import horovod.tensorflow as hvd
    import tensorflow as tf

    with tf.Graph().as_default():
        size = internals.size_in_graph(hvd.global_process_set)
    assert (size.op.type, size.dtype) == ("HorovodSize", tf.int32)
    assert size.op.get_attr("process_set_id") == 0


@pytest.mark.tf
@pytest.mark.parametrize("collective", ["allreduce", "allgather"])
def test_elastic_scope(monkeypatch, collective):
    internals = _tensorflow()
    import tensorflow as tf
    from horovod.common.exceptions import HorovodInternalError
    from horovod.tensorflow import elastic

    with tf.Graph().as_default(), internals.elastic_scope(collective):
        name = tf.constant(0, name="x").op.name
    monkeypatch.setattr(elastic, "run_fn", lambda func, reset: func)

    def fail(state):
        raise tf.errors.UnknownError(None, None, f"a rank was lost in {name}")

    with pytest.raises(HorovodInternalError):
        elastic.run(fail)(None)


@pytest.mark.tf
def test_fatal_in_elastic_job(monkeypatch):
    internals = _tensorflow()
    import tensorflow as tf
    from horovod.tensorflow import elastic

    monkeypatch.setattr(elastic, "run_fn", lambda func, reset: func)

    def fail():
        raise internals.FatalInElasticJob("HorovodAllreduce: the ranks differ")

    @tf.function
    def train(state):
        return tf.numpy_function(fail, [], tf.int32)

    with pytest.raises(tf.errors.UnimplementedError, match="the ranks differ"):
        elastic.run(train)(None)


@pytest.mark.tf
def test_execution_code():
    internals = _tensorflow()
    import tensorflow as tf

    main, seen = threading.get_ident(), []

    def look():
        seen.append(sys._current_frames()[main].f_code)
        return np.int32(0)

    @tf.function
    def step():
        return tf.numpy_function(look, [], tf.int32)

    step()
    assert seen == [internals.execution_code()]
