"""What a step costs through the TensorFlow adapter, beside Horovod's own ``Compression.none``.

    horovodrun -np 2 python benchmarks/tensorflow_step.py

Trains a net of 20 layers in several ways, a step of each in turn, in an order that is drawn anew
for each turn, all ranks beginning together, so that a busy machine treats all alike. Writes
results/tensorflow_step.json: the first rank's times.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

import horovod.tensorflow as hvd
import tensorflow as tf

from horovod_fftcomp.tensorflow import Compression
from horovod_fftcomp.tools import environment

WIDTH, LAYERS, ROWS = 256, 20, 256
WARM_UP, STEPS = 10, 400
HOROVODS = "hvd.Compression.none"
AGAIN = f"{HOROVODS}, again"  # how much chance there is in a ratio
WAYS = (HOROVODS, AGAIN, "none", "fp16", "topk", "fft")
OUT = Path(__file__).parent / "results" / "tensorflow_step.json"


def make_step(way: str) -> Any:
    """Return one way's step, on a model of its own."""
    tf.random.set_seed(0)
    weights = [tf.Variable(tf.random.normal([WIDTH, WIDTH]) / 16) for _ in range(LAYERS)]
    biases = [tf.Variable(tf.zeros([WIDTH])) for _ in range(LAYERS)]
    variables = [*weights, *biases]
    ours = not way.startswith(HOROVODS)
    compression = hvd.Compression.none
    if ours:
        compression = getattr(Compression, way)(variables, warmup_steps=0)

    @tf.function
    def step(inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as plain:
            hidden = inputs
            for weight, bias in zip(weights, biases, strict=True):
                hidden += tf.nn.relu(hidden @ weight + bias)
            loss = tf.reduce_mean(tf.square(hidden))
        tape = hvd.DistributedGradientTape(plain, compression=compression)
        for variable, grad in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(1e-6 * grad)
        return loss

    return step


def main() -> None:
    """Train, and let the first rank write the result."""
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    inputs = tf.random.normal([ROWS, WIDTH])
    steps = {way: make_step(way) for way in WAYS}
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(0)  # the same on all ranks
    for number in range(WARM_UP + STEPS):
        for way in order.sample(WAYS, len(WAYS)):
            step = steps[way]
            hvd.allreduce(tf.zeros(1), name="together")
            begin = time.perf_counter()
            step(inputs).numpy()
            took[way].append(1e3 * (time.perf_counter() - begin))
        if hvd.rank() == 0 and number % 50 == 0:
            print(f"step {number} of {WARM_UP + STEPS}", flush=True)
    if hvd.rank() == 0:
        timed = {way: times[WARM_UP:] for way, times in took.items()}
        yardstick = statistics.median(timed[HOROVODS])
        result = {
            "command": f"horovodrun -np {hvd.size()} python benchmarks/tensorflow_step.py",
            "machine": environment.describe(),
            "parameters": LAYERS * WIDTH * (WIDTH + 1),
            "steps": STEPS,
            "times": {
                way: {
                    "step_ms": round(statistics.median(times), 2),
                    "step_ms_quartiles": [
                        round(q, 2) for q in statistics.quantiles(times, n=4)[::2]
                    ],
                    "over_horovods_none": round(statistics.median(times) / yardstick, 3),
                }
                for way, times in timed.items()
            },
        }
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        json.dump(result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
