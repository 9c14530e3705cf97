"""Train on the digits with Keras, as Horovod's documentation shows it."""

import hashlib
import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # what Horovod 0.28.1 knows

import horovod.tensorflow.keras as hvd
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
    [
        tf.keras.layers.Dense(256, "relu", input_shape=(64,)),
        tf.keras.layers.Dense(256, "relu"),
        tf.keras.layers.Dense(10),
    ]
)
# Horovod: adjust learning rate based on number of GPUs, add Horovod Distributed Optimizer.
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05 * hvd.size()))
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss)


class PrintLoss(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs):
        print(f"loss {float(logs['loss']).hex()}", flush=True)


callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Horovod: average metrics among workers at the end of every epoch.
    hvd.callbacks.MetricAverageCallback(),
]
if hvd.rank() == 0:
    callbacks.append(PrintLoss())
model.fit(dataset, steps_per_epoch=15, callbacks=callbacks, verbose=0)
if hvd.rank() == 0:
    weights = b"".join(array.tobytes() for array in model.get_weights())
    print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)
