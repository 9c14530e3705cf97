"""A training in which rank 0 keeps the others waiting.

``stall.py FRAMEWORK MODE TIMEOUT_S [RANKS_PER_NODE]``.

``sleep``: rank 0 sleeps in step 3. ``between``: it sleeps between ``backward()`` and ``step()``.
``loop``: it loops for ever. ``uneven``: it has fewer batches, and goes on to a collective of its
own. ``killed``: it is killed. ``late``: it is late by 0.8 of the time limit in three steps, which
is allowed. ``warn``: it is late by twice the limit where the others are to go on waiting.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import horovod_fftcomp as hfc

FRAMEWORK, MODE, TIMEOUT_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
STEPS = 10
OPTIONS = {
    "warmup_steps": 0,
    "timeout_s": TIMEOUT_S,
    "on_timeout": "warn" if MODE == "warn" else "raise",
    "ranks_per_node": int(sys.argv[4]) if len(sys.argv) > 4 else 1,
}


# Where no compiled kernels are cached, compiling them takes longer than the time limits here: both
# those of a step that measures and those of other steps.
for _ in hfc.simulate("topk", np.ones((2, 1, 4096), np.float32)):
    pass


def stalls(step: int, rank: int, collective) -> bool:
    """Do what ``MODE`` says, before a step; return whether the training ends for this rank."""
    if rank != 0 or step not in ((3, 6, 9) if MODE == "late" else (3,)):
        return False
    if MODE == "sleep":
        time.sleep(600)
    if MODE == "warn":
        time.sleep(2.5 * TIMEOUT_S)
    if MODE == "loop":
        while True:
            step += 1
    if MODE == "killed":
        print(f"killed at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if MODE == "late":
        time.sleep(0.8 * TIMEOUT_S)
    if MODE == "uneven":
        collective()
    return MODE == "uneven"


def with_torch() -> None:
    import horovod.torch as hvd
    import torch

    from horovod_fftcomp.torch import Compression

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=Compression.topk(model, **OPTIONS),
    )
    hvd.barrier()  # on a busy machine loading takes some ranks longer than others
    for step in range(STEPS):
        if stalls(step, hvd.rank(), lambda: hvd.allgather_object(0)):
            break
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        if MODE == "between" and step == 3 and hvd.rank() == 0:
            time.sleep(600)
        optimizer.step()
    print(f"rank {hvd.rank()} ends well", flush=True)


def with_tensorflow() -> None:
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from horovod_fftcomp.tensorflow import Compression

    hvd.init()
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(64), tf.keras.layers.Dense(64)]
    model = tf.keras.Sequential([tf.keras.layers.Input((64,)), *layers])
    compression = Compression.topk(model, **OPTIONS)
    optimizer = tf.keras.optimizers.SGD(0.01)

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x)))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    train.get_concrete_function(tf.TensorSpec((8, 64)))
    hvd.allreduce(tf.zeros(1))  # on a busy machine loading takes some ranks longer than others
    for step in range(STEPS):
        if stalls(step, hvd.rank(), lambda: hvd.allgather_object(0)):
            break
        train(tf.random.normal((8, 64)))
    print(f"rank {hvd.rank()} ends well", flush=True)


if __name__ == "__main__":
    (with_torch if FRAMEWORK == "torch" else with_tensorflow)()
