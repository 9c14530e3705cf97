"""Train a small conv net on handwritten digits by ``model.fit``, once with each recipe.

    horovodrun -np 2 python examples/keras_digits.py

The images come with scikit-learn. What compression adds to a Horovod script is marked in ``train``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # Horovod knows Keras 2; read at import
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import digits
import horovod.tensorflow.keras as hvd
import tensorflow as tf
import tf_keras as keras
from horovod.tensorflow import allgather_object
from tensorflow_digits import EXCHANGE, accuracy_of, load_data, make_model, make_optimizer

from horovod_fftcomp.tensorflow import Compression


class Watch(keras.callbacks.Callback):
    """Callback: times the steps, records their losses and calls ``progress``."""

    def __init__(
        self, recipe: str, clock: digits.Clock, progress: Callable[[str, float], None]
    ) -> None:
        super().__init__()
        self._recipe, self._clock, self._progress = recipe, clock, progress
        self._epoch = 0
        self.losses: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Record the epoch, from 0."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Begin to time the step."""
        self.model.reset_metrics()  # else the loss would be the mean of the epoch so far
        self._clock.begin()

    def on_train_batch_end(self, batch: int, logs: dict) -> None:
        """End the step."""
        self._clock.end()
        self.losses.append(logs["loss"])
        epoch = f"{self._epoch + 1:>2}/{self.params['epochs']}"
        text = f"{self._recipe:<4} epoch {epoch}  loss {self.losses[-1]:.4f}"
        self._progress(text, 1 / self.params["steps"])


def train(
    recipe: str, options: dict, args: argparse.Namespace, progress: Callable[[str, float], None]
) -> digits.Run:
    """Train in a Horovod job and measure; ``progress`` is called after every step."""
    keras.utils.set_random_seed(args.seed)
    train_set, test_set = load_data(args)
    model = make_model()
    optimizer = make_optimizer(args, len(train_set))

    # Compression: this line and the argument below, e.g. Compression.fft(model, density=0.15).
    compression = getattr(Compression, recipe)(model, **digits.SHORT | options)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    clock = digits.Clock(compression.stats)
    watch = Watch(recipe, clock, progress)
    callbacks = [watch, hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0)]
    model.fit(train_set, epochs=args.epochs, callbacks=callbacks, verbose=0)
    return digits.make_run(
        recipe,
        options,
        accuracy=accuracy_of(model, test_set),
        stats=compression.stats(),
        losses=watch.losses,
        seconds=clock.seconds,
        weights=model.get_weights(),
        gather=allgather_object,
    )


def main() -> None:
    """Train once for each recipe; rank 0 reports."""
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the ranks share the cores
    digits.main("keras_digits", __doc__.splitlines()[0], hvd, train, EXCHANGE)


if __name__ == "__main__":
    main()
