"""What is refused in TensorFlow, by name and with the mend; see ``refusal_cases``."""

from __future__ import annotations

import re
import time

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

from horovod_fftcomp import Recover, UnsupportedError
from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.tensorflow import Compression
from tests.parallel.tensorflow_models import Layers, batches, small_buckets, stepper, train


def stop_of(model, compression):
    """Return the message with which a first step ends, and how long it took to come."""
    step = stepper(model, compression)
    x, y = next(iter(batches(1)))
    step.get_concrete_function(x, y)
    hvd.allreduce(tf.zeros(1), name="barrier")
    begin = time.monotonic()
    with pytest.raises(tf.errors.UnknownError) as caught:
        step(x, y)
    [text] = re.findall(r"^(?:\w+\.)*ConfigMismatchError: .*$", caught.value.message, re.M)[:1]
    return text, time.monotonic() - begin


@pytest.mark.sampled
@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["options", "recipe", "none", "buckets", "order", "version"])
def test_ranks_that_differ_all_stop_with_the_same_message(recipe, same_everywhere, monkeypatch):
    odd, model = hvd.rank() == 1, Layers()
    name, options, pairs = "topk", {}, model.pairs
    if recipe == "options" and odd:
        options = {"density": 0.5}
    elif recipe in ("recipe", "none") and odd:
        name = "fft" if recipe == "recipe" else "none"
    elif recipe == "buckets" and odd:
        options = {"bucket_nbytes": 100}
    elif recipe == "order" and odd:
        pairs = pairs[::-1]
    elif recipe == "version" and odd:
        monkeypatch.setattr(handshake, "__version__", "9.9.9")
    compression = getattr(Compression, name)(pairs, timeout_s=200, **options)
    text, seconds = stop_of(model, compression)
    assert seconds < 60
    same_everywhere(text)
    named = {"options": "differently: density is 0.038 on rank 0 but 0.5 on rank 1. Start",
             "recipe": "recipe is topk on rank 0 but fft on rank 1",
             "none": "recipe is topk on rank 0 but none on rank 1", "buckets": "buckets is ",
             "order": "(hash)", "version": "but 9.9.9 on rank 1"}  # fmt: skip
    assert named[recipe] in text
    with pytest.raises(UnsupportedError, match="interrupted by ConfigMismatchError"):
        compression.residual_norm()


def test_adasum_is_refused():
    model = Layers()
    with pytest.raises(UnsupportedError, match=r"Adasum.*op=hvd.Average"):
        train(model, small_buckets(model, "topk"), 1, op=hvd.Adasum)


def test_single_tensors_and_sessions_are_refused():
    compression = small_buckets(Layers(), "topk")
    with pytest.raises(UnsupportedError, match=r"DistributedGradientTape, which know the variab"):
        hvd.allreduce(tf.zeros([40, 40]), compression=compression, name="single")


@pytest.mark.parametrize("by_rule", [False, True])
def test_first_moments_are_refused(by_rule):
    moments = {"momentum": 0.9, "dense_every": 3}
    given = {"rules": [("*", moments)]} if by_rule else moments
    with pytest.raises(UnsupportedError, match="'dither' sends first moments"):
        small_buckets(Layers(), "dither", **given)


def test_models_without_variables_and_unknown_recipes():
    weight = tf.Variable(tf.zeros([40, 40]))
    with pytest.raises(ValueError, match="no trainable variables"):
        Compression.fft([])
    with pytest.raises(AttributeError, match=r"'ftt' .*did you mean 'fft'"):
        Compression.ftt([weight])
    with pytest.raises(ValueError, match="density must lie"):
        Compression.fft([weight], density=2)
    with pytest.raises(ValueError, match="come twice: a; pass"):
        Compression.fft([("a", weight), ("a", tf.Variable(1.0))])
    with pytest.raises(TypeError, match="is a ndarray, not a variable"):
        Compression.fft([("a", np.zeros(3))])
    with pytest.raises(TypeError, match="str is not a variable"):
        Compression.fft("abc")
    with pytest.raises(TypeError, match=r"model must be a Keras model.*, got a int of builtins"):
        Compression.fft(3)
    with pytest.raises(UnsupportedError, match="complex64"):
        Compression.fft([tf.Variable(tf.zeros([3, 3], tf.complex64))])
    with pytest.raises(ValueError, match="recipe 'fp16' has no density"):
        Compression.fp16([weight], recover=Recover())
    with pytest.raises(TypeError, match="grad_scaler must"):
        Compression.fft([weight], grad_scaler=3.0)
    assert {"fft", "topk"} <= set(dir(Compression))


@pytest.mark.parametrize("given", [Compression, Compression.topk])
@pytest.mark.parametrize("traced", [False, True])
def test_a_factory_is_no_compressor(given, traced):
    weight = tf.Variable(tf.ones([40, 40]))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        return hvd.DistributedGradientTape(tape, compression=given).gradient(loss, [weight])

    mend = r"give compression=Compression\..*\(model\), or with TensorFlow compression="
    with pytest.raises(UnsupportedError, match=mend):
        (tf.function(step) if traced else step)()
    with pytest.raises(UnsupportedError, match=mend):
        hvd.allreduce(weight, compression=given)


def test_a_compressor_is_not_pickled():
    import pickle

    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(small_buckets(Layers(), "topk"))
