"""State that outlives a process, in TensorFlow: see ``state_cases``."""

from __future__ import annotations

import os
import pickle
import warnings

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from horovod_fftcomp import UnsupportedError
from horovod_fftcomp.tensorflow import Compression, TensorFlowKerasState
from tests.parallel.tensorflow_models import Layers, batches, small_buckets, stepper, train

NAME = "layers.0.weight"


def flat(model):
    return np.concatenate([v.numpy().ravel() for v in model.variables])


@pytest.mark.sampled
@pytest.mark.transport
@pytest.mark.parametrize(
    "recipe", [pytest.param("topk", marks=pytest.mark.more), "fft", "scalecom"]
)
def test_saved_at_20_and_run_to_40_equals_40_straight(recipe, tmp_path, same_everywhere):
    straight = Layers()
    train(straight, small_buckets(straight, recipe), 40, momentum=0.0)
    data = list(batches(40))
    prefix = str(tmp_path / f"rank{hvd.rank()}")
    for begin in (0, 20):
        model = Layers()
        compression = small_buckets(model, recipe)
        checkpoint = tf.train.Checkpoint(variables=model.variables, compression=compression)
        if begin:
            checkpoint.read(prefix).assert_consumed()
        step = stepper(model, compression, momentum=0.0)
        for x, y in data[begin : begin + 20]:
            step(x, y)
        checkpoint.write(prefix)
    np.testing.assert_array_equal(flat(model), flat(straight))
    same_everywhere(flat(model))


class _Malicious:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (self._path,)


def test_a_pickled_state_in_a_checkpoint_is_refused_and_not_run(tmp_path):
    """As development versions wrote it; the key that the message names is TensorFlow's."""

    class Pickled(tf.train.experimental.PythonState):
        def serialize(self):
            return pickle.dumps(_Malicious(str(tmp_path / "ran")))

        def deserialize(self, string_value):
            raise AssertionError

    path = tf.train.Checkpoint(compression=Pickled()).write(str(tmp_path / "saved"))
    compression = small_buckets(Layers(), "topk")
    with pytest.raises(ValueError, match=r"load_state_dict\(pickle\.loads\(data\)\)") as caught:
        tf.train.Checkpoint(compression=compression).read(path)
    assert not (tmp_path / "ran").exists()
    key = str(caught.value).partition("get_tensor('")[2].partition("'")[0]
    assert tf.train.load_checkpoint(path).get_tensor(key)[:1] == b"\x80"


def test_gathered_state_resumes_too():
    model = Layers()
    compression = small_buckets(model, "fft")
    train(model, compression, 5)
    gathered = compression.gathered_state_dict()
    other = small_buckets(Layers(), "fft")
    other.load_state_dict(gathered)
    np.testing.assert_array_equal(other.residual(NAME), compression.residual(NAME))
    sums = hvd.allgather_object(float(compression.residual(NAME).sum()))
    assert len(set(sums)) == hvd.size()


def test_state_of_another_rank_is_refused():
    compression = small_buckets(Layers(), "topk")
    saved = compression.state_dict()
    saved["rank"] = (hvd.rank() + 1) % hvd.size()
    with pytest.raises(ValueError, match="gathered_state_dict"):
        compression.load_state_dict(saved)


def test_state_that_is_loaded_before_the_variables_are_known():
    model = Layers()
    compression = small_buckets(model, "topk")
    train(model, compression, 3)
    later = Compression.topk(bucket_nbytes=16_000, timeout_s=200)
    with pytest.raises(UnsupportedError, match="no variables"):
        later.stats()
    saved = compression.state_dict()
    later.load_state_dict(saved)
    train(model, later, 1)
    assert later.state_dict()["step"] == 4


def keras_model():
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(64, input_shape=(40,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def train_keras(model, compression, steps):
    rng = np.random.default_rng(hvd.rank())
    for _ in range(steps):
        x = tf.constant(rng.normal(size=(8, 40)).astype(np.float32))
        with tf.GradientTape() as plain:
            loss = tf.reduce_mean(model(x) ** 2)
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))


def test_elastic_state_commits_and_restores_each_ranks_residual(same_everywhere):
    model = keras_model()
    compression = Compression.topk(model, timeout_s=200)
    train_keras(model, compression, 3)
    state = TensorFlowKerasState(model, model.optimizer, compression=compression, batch=3)
    committed, weights = compression.residual("dense/kernel"), flat(model)
    train_keras(model, compression, 2)
    assert not np.array_equal(compression.residual("dense/kernel"), committed)
    state.restore()
    np.testing.assert_array_equal(compression.residual("dense/kernel"), committed)
    np.testing.assert_array_equal(flat(model), weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.sync()
    np.testing.assert_array_equal(compression.residual("dense/kernel"), committed)
    train_keras(model, compression, 2)
    state.save()
    same_everywhere(flat(model))


def test_a_lost_hosts_residual_is_reported_and_the_survivors_unchanged(same_everywhere):
    model = Layers()
    compression = small_buckets(model, "topk")
    train(model, compression, 4)
    kept = compression.residual(NAME)
    # As if these two had been ranks 0 and 2 of three, and the host of rank 1 had gone.
    compression.engine.rank, compression.engine.world_size = 2 * hvd.rank(), 3
    with pytest.warns(RuntimeWarning, match=r"former ranks \[1\] are lost"):
        assert compression.rejoin() == [1]
    np.testing.assert_array_equal(compression.residual(NAME), kept)
    train(model, compression, 2)
    same_everywhere(flat(model))


def test_scripted_loss_scales_do_not_change_the_training(same_everywhere):
    outcomes = []
    for scales in ([1.0], [1024.0, 1024.0, 64.0, 8192.0]):
        model = Layers()
        scale = tf.Variable(1.0, trainable=False)
        options = (
            {} if len(scales) == 1 else {"grad_scaler": lambda scale=scale: scale.read_value()}
        )
        compression = small_buckets(model, "fft", **options)
        step = stepper(model, compression, poison=scale, momentum=0.0, unscale=scale)
        for number, (x, y) in enumerate(batches(12)):
            scale.assign(scales[number % len(scales)])
            step(x, y)
        outcomes.append(flat(model))
    same_everywhere(*outcomes)
    np.testing.assert_allclose(*outcomes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("action", ["warn", "broadcast"])
@pytest.mark.parametrize("recipe", ["none", "topk"])
def test_a_flipped_bit_in_one_rank_is_reported_by_name(action, recipe, same_everywhere):
    model = Layers()
    compression = small_buckets(model, recipe, replica_check=action)
    if hvd.rank() == 1:
        model.variables[-1].assign_add(tf.constant([1e-3] + 9 * [0.0]))
    step = stepper(model, compression)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(110):
            step(x, y)
        told = [str(w.message) for w in caught if "no longer hold the same" in str(w.message)]
    assert told
    assert "'head.bias'" in told[0]
    if action == "broadcast":
        assert "replaced by the first rank's" in told[0]
        assert len(told) < 12
        train(model, compression, 110, momentum=0.0)
        same_everywhere(model.variables[-1])


def test_density_changes_and_warm_up(same_everywhere):
    model = Layers()
    compression = small_buckets(model, "topk", density=0.01, warmup_steps=2)
    step = stepper(model, compression)
    data = list(batches(6))
    sent = []
    for number, (x, y) in enumerate(data):
        if number == 4:
            compression.set_density(0.2)
        before = compression.stats()["sent_nbytes"]
        step(x, y)
        sent.append(compression.stats()["sent_nbytes"] - before)
    assert sent[0] == sent[1] > 4 * sent[2]
    assert sent[2] == sent[3] < sent[4] == sent[5]
    same_everywhere(flat(model))


def test_the_first_ranks_gradients_are_recorded(tmp_path, same_everywhere):
    path = tmp_path / "gradients"
    model = Layers()
    compression = small_buckets(model, "topk", record=path, record_every=2)
    train(model, compression, 5)
    compression.stats()
    if hvd.rank() == 0:
        compression.recorder.flush()
        assert {file.name for file in path.iterdir()} == {"0.npz", "2.npz", "4.npz"}
        assert np.load(path / "2.npz")[NAME].shape == (40, 40)
    same_everywhere(flat(model))


@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["topk", pytest.param("powersgd", marks=pytest.mark.more)])
def test_a_discarded_pass_leaves_no_trace(recipe, same_everywhere):
    made = []
    for discards in (False, True):
        model = Layers()
        compression = small_buckets(model, recipe)

        @tf.function
        def gradients(x, y, model=model, compression=compression):
            with tf.GradientTape() as plain:
                loss = model.loss(x, y)
            tape = hvd.DistributedGradientTape(plain, compression=compression)
            return [tf.convert_to_tensor(grad) for grad in tape.gradient(loss, model.variables)]

        got = []
        for step, batch in enumerate(batches(4)):
            if discards:
                gradients(*next(batches(1, seed=50 + step)))
                compression.discard()
            got += gradients(*batch)
        residual = compression.residual("layers.0.weight")
        made.append(([*got, residual], compression.stats()["sent_nbytes"]))
    (expected, sent), (found, sent_too) = made
    assert sent == sent_too
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
    same_everywhere(*found[:-1])
