"""Train on the digits with layers that stay local: with a Keras optimizer, then with a tape."""

import hashlib
import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # what Horovod 0.28.1 knows

import horovod.keras
import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().batch(64)
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model():
    """Return a model, of which the second layer is another on each rank, and that layer."""
    tf.keras.utils.set_random_seed(42)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(256, "relu", input_shape=(64,)),
            tf.keras.layers.Dense(256, "relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.layers[1].kernel.assign_add(0.01 * hvd.rank() * tf.ones((256, 256)))
    return model, model.layers[1]


def tell(what, model, local):
    own = {variable.ref() for variable in local.variables}
    for kind, wanted in (("shared", False), ("local", True)):
        arrays = [v.numpy().tobytes() for v in model.variables if (v.ref() in own) == wanted]
        print(f"{what}: {kind} {hvd.rank()} {hashlib.sha256(b''.join(arrays)).hexdigest()}.\n",
              end="", flush=True)  # fmt: skip


model, local = make_model()
optimizer = horovod.keras.PartialDistributedOptimizer(
    tf.keras.optimizers.SGD(0.05), local_layers=local
)
model.compile(optimizer, loss)
model.fit(dataset, steps_per_epoch=12, verbose=0)
tell("optimizer", model, local)

model, local = make_model()
optimizer = tf.keras.optimizers.SGD(0.05)
for inputs, targets in dataset.take(4):
    with tf.GradientTape() as tape:
        value = loss(targets, model(inputs, training=True))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=[local])
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
tell("tape", model, local)
