"""Keras 2 on stock Horovod with compression; started by ``tests/test_parallel.py``."""

from __future__ import annotations

import warnings

import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from horovod_fftcomp import UnsupportedError
from horovod_fftcomp.tensorflow import Compression
from tests.parallel import told_of_nan
from tests.parallel.tensorflow_models import digits_accuracy

# Horovod's callbacks take the backend of whatever `import keras` finds, which is Keras 3 by now.
hvd.callbacks.K = keras.backend


def make_model(dtype=None):
    keras.backend.clear_session()  # names of layers count from 0 again
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Dense(64, "relu", input_shape=(40,), dtype=dtype),
            keras.layers.Dense(64, "relu", dtype=dtype),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


def data(n=256):
    teacher = np.random.default_rng(5).normal(size=(40, 10))
    x = np.random.default_rng(hvd.rank()).normal(size=(n, 40)).astype(np.float32)
    return x, (x @ teacher).argmax(1)


def small(model, recipe, **options):
    options = {"min_numel": 500, "bucket_nbytes": 12_000, "timeout_s": 200, **options}
    return getattr(Compression, recipe)(model, **options)


def compiled(model, compression, rate=0.05, run_eagerly=None, **options):
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], run_eagerly=run_eagerly)
    return model


def flat(model):
    return np.concatenate([w.numpy().ravel() for w in model.variables])


@pytest.mark.sampled
@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["none", "fp16", "topk", "fft", "scalecom"])
def test_fit_with_callbacks(recipe, same_everywhere):
    model = make_model()
    if hvd.rank() == 1:
        model.set_weights([w + 1 for w in model.get_weights()])  # to be overwritten by rank 0's
    compression = small(model, recipe)
    compiled(model, compression, 0.05 * hvd.size())
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.1, 2, momentum_correction=False),
    ]
    history = model.fit(*data(), batch_size=32, epochs=4, callbacks=callbacks, verbose=0)
    same_everywhere(flat(model))
    losses = history.history["loss"]
    assert losses[-1] < 0.9 * losses[0]
    assert compression.stats()["steps"] == 4 * 8
    assert compression.stats()["skipped_steps"] == 0


@pytest.mark.parametrize("mode", [{"run_eagerly": True}, {"steps_per_execution": 4}], ids=str)
def test_modes_of_fit_give_the_same_weights(mode, same_everywhere):
    weights = []
    for options in ({}, mode):
        model = make_model()
        compression = small(model, "topk")
        compiled(model, compression)
        model.compile(model.optimizer, model.loss, **options)
        model.fit(*data(), batch_size=32, epochs=2, shuffle=False, verbose=0)
        assert compression.stats()["steps"] == 16
        weights.append(flat(model))
    same_everywhere(*weights)
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-4)


def test_lossless_compression_equals_horovods_own_training(same_everywhere):
    weights = []
    for recipe in (None, "topk"):
        model = make_model()
        exact = {"density": 1.0, "bits": 32}
        compression = small(model, recipe, **exact) if recipe else hvd.Compression.none
        compiled(model, compression).fit(*data(), batch_size=32, shuffle=False, verbose=0)
        weights.append(flat(model))
    same_everywhere(*weights)
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-4)


@pytest.mark.sampled
@told_of_nan
@pytest.mark.transport
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "Inf in one pass"])
def test_aggregation_of_passes_compresses_once_a_step(bad, same_everywhere):
    model = make_model()
    compression = small(model, "topk")
    compiled(model, compression, backward_passes_per_step=2)
    x, y = data()
    model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    assert compression.stats()["steps"] == 4
    same_everywhere(flat(model))
    if bad:
        residuals = {n: compression.residual(n) for n in ("dense/kernel", "dense_1/kernel")}
        weights = model.get_weights()
        if hvd.rank() == 1:
            x = x[:64].copy()
            x[33:] = np.inf  # the second of two passes
        model.fit(x[:64], y[:64], batch_size=32, shuffle=False, verbose=0)
        assert compression.stats()["steps"] == 5
        assert compression.stats()["skipped_steps"] == 1
        for name, residual in residuals.items():
            np.testing.assert_array_equal(compression.residual(name), residual)
        model.set_weights(weights)


def test_mixed_precision_skips_bad_steps_on_all_ranks(same_everywhere):
    model = make_model("mixed_float16")
    compression = small(model, "fft", grad_scaler=lambda: optimizer.loss_scale)
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), compression=compression)
    optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=2.0**30)
    optimizer._loss_scale._growth_steps = 10
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    history = model.fit(*data(), batch_size=32, epochs=8, shuffle=False, verbose=0)
    same_everywhere(flat(model))
    stats = compression.stats()
    assert stats["steps"] == 64
    assert 3 < stats["skipped_steps"] < 40  # the scale of 2^30 is too large for float16
    assert np.isfinite(flat(model)).all()
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_a_saved_model_is_loaded_and_goes_on(tmp_path, same_everywhere):
    model = make_model()
    compiled(model, small(model, "topk")).fit(*data(), batch_size=32, verbose=0)
    path = str(tmp_path / "model.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Keras would have it in its newer format
        model.save(path)
    config = model.optimizer.get_config()
    assert type(model.optimizer).from_config(config).get_config() == config
    compression = Compression.topk(min_numel=500, timeout_s=200)  # the model is not there yet
    loaded = hvd.load_model(path, compression=compression)
    np.testing.assert_array_equal(flat(loaded), flat(model))
    loaded.fit(*data(), batch_size=32, verbose=0)
    same_everywhere(flat(loaded))
    assert compression.stats()["steps"] == 8


@pytest.mark.more
@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["topk", "fft"])
def test_resumed_from_a_checkpoint_equals_uninterrupted(recipe, tmp_path, same_everywhere):
    straight = compiled(*(lambda m: (m, small(m, recipe)))(make_model()))
    x, y = data()
    fit = {"batch_size": 32, "shuffle": False, "verbose": 0}
    straight.fit(x, y, epochs=4, **fit)
    prefix = str(tmp_path / f"rank{hvd.rank()}")  # of each rank: residuals differ
    for begins in (True, False):
        model = make_model()
        compression = small(model, recipe)
        compiled(model, compression)
        saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer, compression=compression)
        if begins:
            model.fit(x, y, epochs=2, **fit)
            path = saved.write(prefix)
        else:
            model.optimizer.build(model.trainable_variables)
            saved.read(path).assert_consumed()
            model.fit(x, y, epochs=2, **fit)
    np.testing.assert_array_equal(flat(model), flat(straight))
    same_everywhere(flat(model))
    assert compression.state_dict()["step"] == 32


@pytest.mark.parametrize("given", [Compression, Compression.fft])
def test_a_factory_is_no_compressor(given):
    with pytest.raises(UnsupportedError, match=r"give compression=Compression\.fft\(model\)"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=given)


def test_jit_compile_is_refused():
    model = make_model()
    compiled(model, small(model, "topk"))
    model.compile(model.optimizer, model.loss, jit_compile=True)
    with pytest.raises(Exception, match="jit_compile=False"):
        model.fit(*data(), batch_size=32, verbose=0)


def test_data_of_unknown_length_end_each_epoch(same_everywhere):
    """Keras asks once too often, in a call of the graph that then ends without gradients."""
    x, y = data()
    signature = (tf.TensorSpec([None, 40]), tf.TensorSpec([None], tf.int64))

    def batches():
        for begin in range(0, 256, 32):
            yield x[begin : begin + 32], y[begin : begin + 32]

    model = make_model()
    compression = small(model, "topk")
    compiled(model, compression)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.fit(dataset, epochs=3, verbose=0)
    assert compression.stats()["steps"] == 24
    same_everywhere(flat(model))


def test_scales_that_part_stop_all_ranks():
    model = make_model("mixed_float16")
    compression = small(model, "topk", grad_scaler=lambda: optimizer.loss_scale)
    inner = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), compression=compression, backward_passes_per_step=2
    )
    optimizer = keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=2.0**10)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data()
    x = x.copy()
    if hvd.rank() == 1:
        x[0] = np.inf  # only in the first pass, and only here
    with pytest.raises(tf.errors.UnknownError, match="the ranks' loss scales differ"):
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)


def test_digits_are_learned_as_well_as_by_the_other_keras(same_everywhere):
    accuracy, weights = digits_accuracy(
        keras, hvd.DistributedOptimizer, hvd.callbacks.BroadcastGlobalVariablesCallback(0), "fft"
    )
    same_everywhere(*weights)
    assert accuracy > 0.94  # Keras 2 and 3 begin with other weights


def test_a_layer_unfrozen_later_is_refused_by_name():
    model = make_model()
    model.layers[0].trainable = False
    compression = small(model, "topk")
    compiled(model, compression).fit(*data(64), batch_size=32, verbose=0)
    model.layers[0].trainable = True
    with pytest.raises(UnsupportedError, match=r"'dense/kernel:0' .* was not trainable when the"):
        compiled(model, compression).fit(*data(64), batch_size=32, verbose=0)


def test_two_momenta_are_named():
    model = make_model()
    compiled(model, small(model, "dgc"))
    with pytest.warns(RuntimeWarning, match=r"'dgc' keeps a momentum .* SGD has .* \(momentum=0.9"):
        model.fit(*data(64), batch_size=32, verbose=0)


@pytest.mark.parametrize(("recipe", "options"), [("topk", {}), ("qsgd", {"levels": 1})])
def test_second_moments_beside_a_recipe_that_loses_by_them_are_named(recipe, options):
    model = make_model()
    compression = small(model, recipe, **options)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(), compression=compression)
    model.compile(optimizer, "mse")
    with pytest.warns(RuntimeWarning, match="roots of squared gradients"):
        model.fit(*data(64), batch_size=32, verbose=0)


@pytest.mark.transport
def test_the_first_nan_is_told_once_with_its_tensor_and_rank():
    model = make_model()
    compiled(model, small(model, "topk"))
    x, y = data(96)
    if hvd.rank() == 1:
        x[40:] = np.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    told = [str(w.message) for w in caught if "NaN or Inf" in str(w.message)]
    assert len(told) == 1
    assert "dense/kernel" in told[0]
    origin = "gradients of some rank" if hvd.rank() == 0 else "rank 1 has NaN or Inf in the grad"
    assert origin in told[0]
