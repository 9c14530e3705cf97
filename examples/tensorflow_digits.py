"""Train a small conv net on handwritten digits in a custom training loop, once with each recipe.

    horovodrun -np 2 python examples/tensorflow_digits.py

The images come with scikit-learn. What compression adds to a Horovod script is marked in ``train``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod knows Keras 2; read at import
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import digits
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import tf_keras as keras

from horovod_fftcomp.tensorflow import Compression

EXCHANGE = """\
stats()'s wait_s, from the last encoding on. What Horovod exchanges without us (biases; of none, \
everything) is a part of compute."""


def load_data(args: argparse.Namespace) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return this rank's batches, reshuffled in each epoch, and the test set, with a channel."""
    x_train, x_test, y_train, y_test = digits.load_data()
    # All ranks take as many steps, with as many images: few in the last step, which moves the
    # weights as far, would make the accuracy after it a matter of luck.
    n = len(x_train) // hvd.size()
    train_set = tf.data.Dataset.from_tensor_slices((x_train[..., None], y_train))
    train_set = train_set.shuffle(len(x_train), args.seed).take(n * hvd.size())
    train_set = train_set.shard(hvd.size(), hvd.rank())
    train_set = train_set.batch(min(args.batch_size, n), drop_remainder=True)
    test_set = tf.data.Dataset.from_tensor_slices((x_test[..., None], y_test))
    return train_set, test_set.batch(len(x_test))


def accuracy_of(model: keras.Model, test_set: tf.data.Dataset) -> float:
    """Return the accuracy of the model on the images."""
    [(images, labels)] = test_set
    return float(np.mean(np.argmax(model(images), axis=1) == labels))


def make_model() -> keras.Model:
    """Return a net of 151,306 parameters."""
    conv1 = keras.layers.Conv2D(32, 3, padding="same", activation="relu", input_shape=(8, 8, 1))
    conv2 = keras.layers.Conv2D(64, 3, padding="same", activation="relu")
    head = keras.layers.Dense(128, "relu"), keras.layers.Dense(10)
    return keras.Sequential([conv1, conv2, keras.layers.MaxPool2D(), keras.layers.Flatten(), *head])


def make_optimizer(args: argparse.Namespace, steps_per_epoch: int) -> keras.optimizers.Optimizer:
    """Return SGD whose learning rate rises linearly at first."""
    n = digits.LR_WARM_UP_EPOCHS * steps_per_epoch
    rate = keras.optimizers.schedules.PolynomialDecay(args.lr / n, n, args.lr)
    return keras.optimizers.SGD(rate, momentum=0.9)


def train(
    recipe: str, options: dict, args: argparse.Namespace, progress: Callable[[str, float], None]
) -> digits.Run:
    """Train in a Horovod job and measure; ``progress`` is called after every step."""
    keras.utils.set_random_seed(args.seed)
    train_set, test_set = load_data(args)
    model = make_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = make_optimizer(args, len(train_set))
    hvd.broadcast_variables(model.variables, root_rank=0)

    # Compression: this line and the argument below, e.g. Compression.fft(model, density=0.15).
    compression = getattr(Compression, recipe)(model, **digits.SHORT | options)

    @tf.function(input_signature=train_set.element_spec)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    losses, clock = [], digits.Clock(compression.stats)
    for epoch in range(args.epochs):
        for images, labels in train_set:
            clock.begin()
            loss = step(images, labels)
            losses.append(float(loss))
            clock.end()
            text = f"{recipe:<4} epoch {epoch + 1:>2}/{args.epochs}  loss {losses[-1]:.4f}"
            progress(text, 1 / len(train_set))
    return digits.make_run(
        recipe,
        options,
        accuracy=accuracy_of(model, test_set),
        stats=compression.stats(),
        losses=losses,
        seconds=clock.seconds,
        weights=model.get_weights(),
        gather=hvd.allgather_object,
    )


def main() -> None:
    """Train once for each recipe; rank 0 reports."""
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks share the cores
    digits.main("tensorflow_digits", __doc__.splitlines()[0], hvd, train, EXCHANGE)


if __name__ == "__main__":
    main()
