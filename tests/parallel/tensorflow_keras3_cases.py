"""Keras 3 with compression; started by ``tests/test_parallel.py`` without the flag of Keras 2."""

from __future__ import annotations

import horovod.tensorflow as hvd
import horovod.tensorflow.keras
import keras
import numpy as np
import pytest
import tensorflow as tf

from horovod_fftcomp import UnsupportedError
from horovod_fftcomp.tensorflow import Compression
from horovod_fftcomp.tensorflow.keras3 import BroadcastCallback, DistributedOptimizer
from tests.parallel.tensorflow_models import digits_accuracy


def make_model(policy="float32"):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, "relu", dtype=policy) for _ in range(2)]
    head = keras.layers.Dense(10, dtype="float32")
    return keras.Sequential([keras.Input((40,)), *layers, head])


def data(n=256):
    teacher = np.random.default_rng(5).normal(size=(40, 10))
    x = np.random.default_rng(hvd.rank()).normal(size=(n, 40)).astype(np.float32)
    return x, (x @ teacher).argmax(1)


def compiled(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"jit_compile": False, "metrics": ["accuracy"], **options}
    model.compile(optimizer, loss, **options)
    return model


def small(model, recipe, **options):
    options = {"min_numel": 500, "bucket_nbytes": 12_000, "timeout_s": 200, **options}
    return getattr(Compression, recipe)(model, **options)


def flat(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def test_this_is_keras_3():
    assert keras.__version__.startswith("3.")


@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["none", "fp16", "topk", "fft", "scalecom"])
def test_fit_with_broadcast(recipe, same_everywhere):
    model = make_model()
    if hvd.rank() == 1:
        model.set_weights([w + 1 for w in model.get_weights()])  # to be overwritten
    compression = small(model, recipe)
    compiled(model, DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), compression))
    history = model.fit(
        *data(), batch_size=32, epochs=6, callbacks=[BroadcastCallback()], verbose=0
    )
    same_everywhere(flat(model))
    assert history.history["loss"][-1] < 0.9 * history.history["loss"][0]
    assert compression.stats()["steps"] == 48
    assert compression.stats()["skipped_steps"] == 0


def test_a_loop_of_ones_own_passes_the_variables_of_tensorflow(same_everywhere):
    model, optimizer = make_model(), keras.optimizers.SGD(0.1)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compression = small(model, "topk")
    images, labels = data(32)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        grads = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    losses = [float(step()) for _ in range(20)]
    same_everywhere(flat(model))
    assert losses[-1] < 0.9 * losses[0]
    assert compression.stats()["steps"] == 20
    assert compression.stats()["ratio"] > 2


def test_an_optimizer_keeps_its_moments_and_options():
    model = make_model()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    compiled(model, optimizer).fit(*data(64), batch_size=32, verbose=0)
    before = [variable.numpy() for variable in optimizer.variables]
    distributed = DistributedOptimizer(optimizer, small(model, "qsgd"))
    assert int(distributed.iterations) == 2
    for ours, theirs in zip(distributed.variables, before, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs)
    used = [distributed._use_weight_decay(variable) for variable in model.trainable_variables]
    assert used == [True, False] * 3
    compiled(model, distributed).fit(*data(64), batch_size=32, verbose=0)
    assert int(distributed.iterations) == 4


def test_lossless_compression_trains_as_one_process_with_both_batches(same_everywhere):
    model = make_model()
    compression = small(model, "topk", density=1.0, bits=32)
    compiled(model, DistributedOptimizer(keras.optimizers.SGD(0.1), compression))
    model.fit(*data(), batch_size=32, shuffle=False, verbose=0)
    same_everywhere(flat(model))
    everyones = [np.stack(part) for part in zip(*hvd.allgather_object(data()), strict=True)]
    x, y = (part.reshape(2, 8, 32, -1).swapaxes(0, 1).reshape(512, -1) for part in everyones)
    alone = compiled(make_model(), keras.optimizers.SGD(0.1))
    alone.fit(x, y[:, 0], batch_size=64, shuffle=False, verbose=0)
    np.testing.assert_allclose(flat(model), flat(alone), rtol=1e-3, atol=1e-4)


def test_mixed_precision_skips_bad_steps_on_all_ranks(same_everywhere):
    model = make_model("mixed_float16")
    compression = small(model, "fft", grad_scaler=lambda: optimizer.dynamic_scale.value)
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0**30, dynamic_growth_steps=10
    )
    optimizer = DistributedOptimizer(scaled, compression)
    compiled(model, optimizer, auto_scale_loss=False)
    model.fit(*data(), batch_size=32, epochs=8, shuffle=False, verbose=0)
    same_everywhere(flat(model))
    stats = compression.stats()
    assert stats["steps"] == 64
    assert 3 < stats["skipped_steps"] < 40
    assert np.isfinite(flat(model)).all()


def test_a_scaler_around_it_and_xla_are_refused():
    model = make_model("mixed_float16")
    inner = DistributedOptimizer(keras.optimizers.SGD(0.1), small(model, "topk"))
    compiled(model, keras.optimizers.LossScaleOptimizer(inner))
    with pytest.raises(UnsupportedError, match=r"put it inside: DistributedOptimizer\(LossScale"):
        model.fit(*data(), batch_size=32, verbose=0)
    model = make_model()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), small(model, "topk"))
    compiled(model, optimizer, jit_compile=True)
    with pytest.raises(UnsupportedError, match="jit_compile=False"):
        model.fit(*data(), batch_size=32, verbose=0)
    compiled(model, optimizer, run_eagerly=True)
    with pytest.raises(UnsupportedError, match="run_eagerly=False"):
        model.fit(*data(), batch_size=32, verbose=0)


def test_horovods_own_wrapper_is_refused():
    """It would train every rank alone, without a word."""
    compression = small(make_model(), "topk")
    with pytest.raises(UnsupportedError, match="Keras 3"):
        horovod.tensorflow.keras.DistributedOptimizer(
            keras.optimizers.SGD(0.1), compression=compression
        )


@pytest.mark.parametrize("given", [Compression, Compression.fft])
def test_a_factory_is_no_compressor(given):
    mend = r"give compression=Compression\.fft\(model\)"
    with pytest.raises(UnsupportedError, match=mend):
        horovod.tensorflow.keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=given)
    model = make_model()
    compiled(model, DistributedOptimizer(keras.optimizers.SGD(0.1), given))
    with pytest.raises(UnsupportedError, match=mend):
        model.fit(*data(), batch_size=32, verbose=0)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
def test_a_saved_model_loads_without_us(tmp_path):
    model = make_model()
    compiled(model, DistributedOptimizer(keras.optimizers.SGD(0.1), small(model, "topk")))
    model.fit(*data(), batch_size=32, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.SGD
    np.testing.assert_array_equal(flat(loaded), flat(model))


def test_digits_are_learned_as_well_as_by_the_other_keras(same_everywhere):
    accuracy, weights = digits_accuracy(keras, DistributedOptimizer, BroadcastCallback(), "fft")
    same_everywhere(*weights)
    assert accuracy > 0.94  # Keras 2 and 3 begin with other weights
