"""Small models and loops that TensorFlow's parallel tests share; see ``models`` for PyTorch's."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from horovod_fftcomp.tensorflow import Compression

EXACT = {"density": 1.0, "bits": 32}  # every value as float32: compression that loses nothing


class Layers:
    """Four layers of 40 x 40 side by side under a head, with names that all ranks share."""

    def __init__(self, seed: int = 0, n_layers: int = 4, dtype: str = "float32") -> None:
        rng = np.random.default_rng(seed)
        self.pairs = []
        for number in range(n_layers):
            self._add(f"layers.{number}", rng.normal(size=(40, 40)) / 6, dtype)
        self._add("head", rng.normal(size=(40, 10)) / 6, dtype)
        self.variables = [variable for _, variable in self.pairs]

    def _add(self, name, weight, dtype):
        bias = np.zeros(weight.shape[1])
        for kind, values in (("weight", weight), ("bias", bias)):
            variable = tf.Variable(values.astype(dtype), name=f"{name}.{kind}")
            self.pairs.append((variable.name.removesuffix(":0"), variable))

    def __call__(self, x):
        weights, biases = self.variables[0::2], self.variables[1::2]
        layers = zip(weights[:-1], biases[:-1], strict=True)
        hidden = tf.add_n([tf.nn.relu(x @ w + b) for w, b in layers])
        return hidden @ weights[-1] + biases[-1]

    def loss(self, x, y):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self(x))
        return tf.reduce_mean(losses)


def batches(steps: int, seed: int = 0):
    """Yield this rank's batches of a task that can be learned."""
    teacher = np.random.default_rng(5).normal(size=(40, 10))
    rng = np.random.default_rng([seed, hvd.rank()])
    for _ in range(steps):
        x = rng.normal(size=(32, 40)).astype(np.float32)
        yield tf.constant(x), tf.constant((x @ teacher).argmax(1))


def small_buckets(model: Layers, recipe: str, **options):
    factory = getattr(Compression, recipe)
    return factory(model.pairs, bucket_nbytes=16_000, **{"timeout_s": 200, **options})


def stepper(
    model, compression, lr=0.05, graph=True, poison=None, momentum=0.9, unscale=1.0, **options
):
    """Return a function that steps by SGD with momentum unless the gradients are not finite."""
    velocities = [tf.Variable(tf.zeros_like(v), trainable=False) for v in model.variables]

    def step(x, y):
        with tf.GradientTape() as plain:
            loss = model.loss(x, y)
            if poison is not None:
                loss = loss * poison
        tape = hvd.DistributedGradientTape(plain, compression=compression, **options)
        grads = [tf.convert_to_tensor(g) / unscale for g in tape.gradient(loss, model.variables)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(grad)) for grad in grads])
        for variable, velocity, grad in zip(model.variables, velocities, grads, strict=True):
            velocity.assign(tf.where(finite, momentum * velocity + grad, velocity))
            variable.assign_sub(lr * velocity)
        return loss, grads

    return tf.function(step) if graph else step


def train(model, compression, steps, **options):
    step = stepper(model, compression, **options)
    return [float(step(x, y)[0]) for x, y in batches(steps)]


def digits_accuracy(keras, distribute, callback, recipe):
    """Return test accuracy and weights of a small net trained on digits, by either Keras."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    x, x_test, y, y_test = train_test_split(images, digits.target, test_size=0.25, random_state=0)
    own = slice(hvd.rank(), 640 * hvd.size(), hvd.size())
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(10),
        ]
    )
    model.build((None, 8, 8, 1))
    compression = getattr(Compression, recipe)(model, timeout_s=200)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = distribute(keras.optimizers.SGD(0.05, momentum=0.9), compression=compression)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    model.fit(x[own], y[own], batch_size=32, epochs=8, callbacks=[callback], verbose=0)
    weights = [np.asarray(w) for w in model.get_weights()]
    return model.evaluate(x_test, y_test, verbose=0)[1], weights
