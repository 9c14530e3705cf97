"""Two ranks that do not make the same calls: ``calls.py FRAMEWORK WHAT``.

``density``: rank 0 calls ``set_density`` and the other one goes on training. ``order``: rank 1
makes its two compressors in another order. ``forgotten``: rank 1 has no compressor. ``never``:
there is one compressor alone, and rank 1 begins no step.
"""

from __future__ import annotations

import sys
import time

FRAMEWORK, WHAT = sys.argv[1:]


def with_torch() -> None:
    import horovod.torch as hvd
    import torch

    from horovod_fftcomp.torch import Compression

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 96)]
    numbers = [1, 0] if WHAT == "order" and hvd.rank() == 1 else [0, 1]
    numbers = [0] if WHAT == "never" else numbers
    made = {number: Compression.topk(models[number], timeout_s=20) for number in numbers}
    if WHAT == "never" and hvd.rank() == 1:
        time.sleep(600)
    if WHAT == "forgotten" and hvd.rank() == 1:
        made[0] = hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(models[0].parameters(), lr=0.01),
        named_parameters=models[0].named_parameters(),
        compression=made[0],
    )
    for step in range(6):
        if WHAT == "density" and step == 3 and hvd.rank() == 0:
            made[0].set_density(0.1)
        optimizer.zero_grad()
        models[0](torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


def with_tensorflow() -> None:
    import horovod.tensorflow as hvd

    from tests.parallel.tensorflow_models import Layers, batches, small_buckets, stepper

    hvd.init()
    models = [Layers(), Layers(n_layers=5)]
    numbers = [1, 0] if WHAT == "order" and hvd.rank() == 1 else [0, 1]
    made = {n: small_buckets(models[n], "topk", timeout_s=20) for n in numbers}
    if WHAT == "forgotten" and hvd.rank() == 1:
        made[0] = hvd.Compression.none
    step = stepper(models[0], made[0])
    for number, (x, y) in enumerate(batches(6)):
        if WHAT == "density" and number == 3 and hvd.rank() == 0:
            made[0].set_density(0.1)
        step(x, y)


if __name__ == "__main__":
    (with_torch if FRAMEWORK == "torch" else with_tensorflow)()
