"""Two ranks that do not make the same calls: ``calls.py FRAMEWORK WHAT``.

``density``: rank 0 calls ``set_density`` and the other one goes on training. ``order``: rank 1
makes its two compressors in another order. ``forgotten``: rank 1 has no compressor. ``never``:
there is one compressor alone, and rank 1 begins no step. ``more``: rank 1 makes one more, before
that which trains; ``more-call``: and both make a call before the first step. ``unused``: rank 1
makes one more after it, which nobody needs.
"""

from __future__ import annotations

import sys
import time

FRAMEWORK, WHAT = sys.argv[1:]
TIMEOUT_S = 600 if WHAT.startswith("more") else 20


def numbers_made(rank: int) -> list[int]:
    """Return the models for which a rank makes a compressor, in this order; [] if not told."""
    if WHAT.startswith("more"):
        return [1, 0] if rank == 1 else [0]
    return ([0, 1] if rank == 1 else [0]) if WHAT == "unused" else []


def with_torch() -> None:
    import horovod.torch as hvd
    import torch

    from horovod_fftcomp.torch import Compression

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 96)]
    numbers = [1, 0] if WHAT == "order" and hvd.rank() == 1 else [0, 1]
    numbers = [0] if WHAT == "never" else numbers_made(hvd.rank()) or numbers
    made = {number: Compression.topk(models[number], timeout_s=TIMEOUT_S) for number in numbers}
    if WHAT == "never" and hvd.rank() == 1:
        time.sleep(600)
    if WHAT == "forgotten" and hvd.rank() == 1:
        made[0] = hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(models[0].parameters(), lr=0.01),
        named_parameters=models[0].named_parameters(),
        compression=made[0],
    )
    if WHAT == "more-call":
        made[0].gathered_state_dict()
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
    numbers = numbers_made(hvd.rank()) or numbers
    made = {n: small_buckets(models[n], "topk", timeout_s=TIMEOUT_S) for n in numbers}
    if WHAT == "forgotten" and hvd.rank() == 1:
        made[0] = hvd.Compression.none
    step = stepper(models[0], made[0])
    for number, (x, y) in enumerate(batches(6)):
        if WHAT == "density" and number == 3 and hvd.rank() == 0:
            made[0].set_density(0.1)
        step(x, y)


if __name__ == "__main__":
    (with_torch if FRAMEWORK == "torch" else with_tensorflow)()
