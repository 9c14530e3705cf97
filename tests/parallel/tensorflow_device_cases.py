"""TensorFlow's steps on a GPU, here an emulated one; started by test_parallel.py.

Its tensors reach the emulator as they would reach a GPU: by their addresses, from DLPack.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from horovod_fftcomp import ConfigMismatchError
from horovod_fftcomp.tensorflow import compressor
from horovod_fftcomp.tensorflow.device import TensorFlowMemory, memory_of
from tests.contracts import HOST_ONLY
from tests.gpu.emulator import Emulator
from tests.parallel import told_of_nan
from tests.parallel.tensorflow_models import Layers, batches, small_buckets, stepper, train


@pytest.fixture
def on_gpu(monkeypatch):
    """Make compressors that learn of their variables from now on use the emulated GPU."""

    def use():
        memory = TensorFlowMemory(Emulator(), "/CPU:0")
        monkeypatch.setattr(compressor, "memory_of", lambda variables, buckets: memory)

    return use


def trained(recipe, steps, graph=True, dtype="float32", **options):
    model = Layers(dtype=dtype)
    compression = small_buckets(model, recipe, **options)
    train(model, compression, steps, graph=graph)
    return model, compression


@pytest.mark.parametrize(
    ("recipe", "options", "graph"),
    [
        ("topk", {}, True),
        ("topk", {}, False),
        ("topk", {"warmup_steps": 3}, True),  # a dense sum first
        ("fp16", {}, True),
        ("scalecom", {}, True),
        ("scalecom", {}, False),
        ("scalecom", {"selector": "exact"}, True),  # of the host
        ("random_k", {}, True),
        ("hard_threshold", {"calibrate_steps": 3}, True),
        ("signum", {}, True),
        ("dgc", {"density": 0.1, "max_norm": 1.0, "warmup_steps": 2}, True),
        ("powersgd", {"rank": 2}, True),
        ("topk", {"scope": "bucket"}, True),
        ("wangni", {}, True),
        ("gtopk", {}, True),  # of the host, as the next
        ("sketchsgd", {"momentum": 0.0}, True),
    ],
)
def test_a_training_is_the_cpus(recipe, options, graph, on_gpu, same_everywhere):
    expected, theirs = trained(recipe, 8, graph, **options)
    on_gpu()
    model, ours = trained(recipe, 8, graph, **options)
    same_everywhere(*model.variables)
    # How Horovod rounds a sum of float16 depends on where it lies among others.
    tolerance = 2e-3 if recipe == "fp16" else 0
    for found, wanted in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)
    for name in ("sent_nbytes", "received_nbytes", "collectives", "steps", "skipped_steps"):
        assert ours.stats()[name] == theirs.stats()[name]
    assert ours.residual_norm() == theirs.residual_norm()
    on_host = recipe in HOST_ONLY or options == {"selector": "exact"}
    assert ours.engine.computes_on_device(0) != on_host
    assert theirs.engine.device is None


@pytest.mark.parametrize("recipe", ["fft", "auto"])
def test_ranks_stay_equal(recipe, on_gpu, same_everywhere):
    on_gpu()
    model, compression = trained(recipe, 8)
    same_everywhere(*model.variables)
    assert compression.stats()["steps"] == 8
    assert 0 < compression.stats()["relative_error"] < 1


@told_of_nan
def test_a_step_with_nan_leaves_no_trace(on_gpu, same_everywhere):
    on_gpu()
    model = Layers()
    poison = tf.Variable(1.0, trainable=False)
    compression = small_buckets(model, "topk")
    step = stepper(model, compression, 0.0, poison=poison)
    data = list(batches(3))
    step(*data[0])
    before = compression.residual_norm()
    poison.assign(np.nan if hvd.rank() == 1 else 1.0)
    _, grads = step(*data[1])
    assert all(np.isnan(tf.convert_to_tensor(grad)).any() for grad in grads)
    poison.assign(1.0)
    assert compression.residual_norm() == before > 0
    assert compression.stats()["skipped_steps"] == 1
    _, grads = step(*data[2])
    same_everywhere(*(tf.convert_to_tensor(grad) for grad in grads))


@told_of_nan
def test_a_gradient_that_horovod_exchanges_makes_the_whole_step_bad(on_gpu):
    on_gpu()
    model = Layers()
    compression = small_buckets(model, "topk")
    step = stepper(model, compression, 0.0)
    data = list(batches(2))
    step(*data[0])
    before = compression.residual_norm()
    # A bias that no other gradient depends on: the head's.
    model.variables[-1].assign(tf.zeros(10) + (np.inf if hvd.rank() == 1 else 0.0))
    step(data[1][0] * 0.0, data[1][1])
    assert compression.residual_norm() == before > 0
    assert compression.stats()["skipped_steps"] == 1


def test_a_sum_beyond_float16_is_a_step_that_does_not_count(on_gpu):
    on_gpu()
    model = Layers(dtype="float16")
    compression = small_buckets(model, "topk", density=1.0, bits=32)

    @tf.function
    def reduce(factor):
        with tf.GradientTape() as plain:
            loss = tf.add_n([tf.reduce_sum(variable * factor) for variable in model.variables])
        tape = hvd.DistributedGradientTape(plain, compression=compression, op=hvd.Sum)
        return tape.gradient(loss, model.variables)

    for factor, skipped in ((1.0, 0), (6e4, 1)):
        grads = reduce(tf.constant(factor, tf.float16))
        assert np.isinf(grads[0]).all() == bool(skipped)
        assert compression.stats()["skipped_steps"] == skipped


def test_a_loss_scale_that_changes_brings_the_residual_along(on_gpu):
    norms = []
    for there in (False, True):
        if there:
            on_gpu()
        model = Layers()
        scale = tf.Variable(1.0, trainable=False)
        compression = small_buckets(model, "topk", grad_scaler=lambda scale=scale: scale)
        step = stepper(model, compression, 0.0)
        for factor, (x, y) in zip((1.0, 8.0, 4.0), batches(3), strict=True):
            scale.assign(factor)
            step(x, y)
        norms.append(compression.residual_norm())
    assert norms[0] == norms[1] > 0


def test_a_state_saved_on_the_gpu_goes_on_on_the_cpu(on_gpu, monkeypatch, same_everywhere):
    def run(model, compression, data):
        step = stepper(model, compression, momentum=0.0)
        for x, y in data:
            step(x, y)

    data = list(batches(6))
    expected = Layers()
    run(expected, small_buckets(expected, "topk"), data)
    model = Layers()
    with monkeypatch.context():
        on_gpu()
        first = small_buckets(model, "topk")
        run(model, first, data[:3])
    monkeypatch.undo()
    second = small_buckets(model, "topk")
    second.load_state_dict(first.state_dict())
    assert second.engine.device is None
    run(model, second, data[3:])
    same_everywhere(*model.variables)
    for found, wanted in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_recorded_gradients_are_the_cpus(on_gpu, tmp_path):
    recorded = []
    for there in (False, True):
        if there:
            on_gpu()
        model = Layers()
        path = tmp_path / f"{there}"
        compression = small_buckets(model, "topk", record=path, record_every=2)
        train(model, compression, 4)
        if hvd.rank() == 0:
            compression.recorder.flush()
            recorded.append({
                f"{file.stem}/{name}": grad
                for file in path.iterdir()
                for name, grad in np.load(file).items()
            })  # fmt: skip
    if hvd.rank() == 0:
        assert recorded[0].keys() == recorded[1].keys() != set()
        for name, values in recorded[0].items():
            np.testing.assert_array_equal(recorded[1][name], values)


def test_tensors_go_out_and_in_without_sharing_memory():
    device = Emulator()
    memory = TensorFlowMemory(device, "/CPU:0")
    for dtype in (np.uint8, np.float32):
        array = device.upload(np.arange(100).astype(dtype))
        tensor = memory.tensor_of(array)
        array[:] = 0
        np.testing.assert_array_equal(tensor, np.arange(100).astype(dtype))
        same = memory.array_of(tensor)
        assert same.ctypes.data == memory.array_of(tensor).ctypes.data
        del tensor
        np.testing.assert_array_equal(same, np.arange(100).astype(dtype))  # it is kept alive
    assert memory.array_of(tf.zeros([0])).size == 0
    assert memory.tensor_of(device.empty(0, np.uint8)).shape == [0]


def test_variables_on_no_gpu_are_the_hosts():
    model = Layers()
    compression = small_buckets(model, "topk")
    assert memory_of(model.variables, compression.engine.buckets) is None


def test_a_rank_whose_gpu_computes_nothing_is_told_by_all(on_gpu):
    if hvd.rank() == 0:
        on_gpu()
    with pytest.raises(Exception, match="steps computed on") as caught:
        trained("topk", 1)
    assert ConfigMismatchError.__name__ in str(caught.value)
