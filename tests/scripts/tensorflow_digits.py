"""Train on the digits in a loop with a tape, as Horovod's documentation shows it."""

import hashlib
import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # what Horovod 0.28.1 knows

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

# Horovod: initialize Horovod.
hvd.init()
tf.keras.utils.set_random_seed(42)
tf.config.threading.set_intra_op_parallelism_threads(1)

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().batch(64)

model = tf.keras.Sequential(
    [tf.keras.layers.Dense(256, "relu", input_shape=(64,)), tf.keras.layers.Dense(10)]
)
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
# Horovod: adjust learning rate based on number of GPUs.
opt = tf.optimizers.legacy.SGD(0.05 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))
    # Horovod: add Horovod Distributed GradientTape.
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
    return loss_value


for batch, (images, labels) in enumerate(dataset.take(15)):
    loss_value = training_step(images, labels, batch == 0)
    if hvd.rank() == 0:
        print(f"loss {float(loss_value).hex()}", flush=True)
if hvd.rank() == 0:
    weights = b"".join(array.tobytes() for array in model.get_weights())
    print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)
