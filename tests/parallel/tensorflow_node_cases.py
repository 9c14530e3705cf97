"""Two nodes of two ranks in TensorFlow."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from horovod_fftcomp import simulate
from horovod_fftcomp.adapter import watch
from horovod_fftcomp.tensorflow import Compression, compressor
from horovod_fftcomp.tensorflow.device import TensorFlowMemory
from tests import payloads
from tests.gpu.emulator import Emulator
from tests.parallel.tensorflow_models import Layers, small_buckets, train


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    """A look at other threads has to be safe at any moment."""
    monkeypatch.setattr(watch, "LOOK_S", 0.002)
    monkeypatch.setattr(watch, "TELL_S", 0.0)  # each time at the stacks of all threads as well


@pytest.mark.parametrize(
    "recipe", payloads.over_gloo_too(["fp16", "topk", "fft", "scalecom", "gtopk", "auto", "onebit"])
)
def test_nodes_of_two_are_those_of_a_simulation(recipe, same_everywhere):
    check_simulation(recipe, same_everywhere)


@pytest.mark.parametrize("recipe", ["fp16", "topk", "scalecom", "onebit"])
def test_and_on_a_gpu(recipe, same_everywhere, monkeypatch):
    memory = TensorFlowMemory(Emulator(), "/CPU:0")
    monkeypatch.setattr(compressor, "memory_of", lambda variables, buckets: memory)
    assert check_simulation(recipe, same_everywhere).engine.computes_on_device(0)


def check_simulation(recipe, same_everywhere):
    weight = tf.Variable(tf.zeros([64, 128]))
    options = {"ranks_per_node": 2, "timeout_s": 200, "warmup_steps": 1}
    compression = getattr(Compression, recipe)([("gradient", weight)], **options)

    @tf.function
    def reduce(own):
        with tf.GradientTape() as plain:
            loss = tf.reduce_sum(weight * own)
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        return tape.gradient(loss, [weight])[0]

    own = np.random.default_rng(0).standard_normal((5, hvd.size(), 8192)).astype(np.float32)
    steps = list(simulate(recipe, own, ranks_per_node=2, warmup_steps=1))
    for grads, expected in zip(own, steps, strict=True):
        mean = reduce(grads[hvd.rank()].reshape(64, 128))
        same_everywhere(mean)
        tolerance = 2e-3 * np.abs(expected.average).max() if recipe == "fp16" else 0
        np.testing.assert_allclose(mean.numpy().ravel(), expected.average, rtol=0, atol=tolerance)
    residual = compression.residual("gradient").ravel()
    assert residual.tobytes() == steps[-1].residual[hvd.rank()].tobytes()
    sent = [step.sent_bytes[hvd.rank()] for step in steps]
    inside_nbytes = payloads.inside_nbytes(recipe, sent, hvd.size() // 2)
    assert compression.stats()["inside_nbytes"] == inside_nbytes
    return compression


def test_a_model_in_two_levels(same_everywhere):
    for recipe in ("topk", "scalecom"):
        model = Layers()
        train(model, small_buckets(model, recipe, ranks_per_node=2, warmup_steps=2), 6)
        same_everywhere(*(tf.convert_to_tensor(v) for v in model.variables))
