"""What a step costs under DDP with the hook of this package, beside DDP without a hook.

    torchrun --nproc-per-node 2 benchmarks/ddp_step.py

As torch_step.py, with its models: a step of each way comes in turn, in an order that is drawn anew
for each turn, all ranks beginning together. A way is compared with DDP by the median of the ratios
of their steps in the same turn. Writes results/ddp_step.json: the first rank's times.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch_step import CASES, WARM_UP, Case

from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch_distributed import compress

DDP = "DDP"
AGAIN = "DDP, again"  # how much chance there is in a ratio
STOCK: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce_hook": lambda: (None, default_hooks.allreduce_hook),
    "fp16_compress_hook": lambda: (None, default_hooks.fp16_compress_hook),
    "powerSGD_hook": lambda: (
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
}
WAYS = (DDP, AGAIN, "none", *STOCK, "topk", "fft")
STEPS = {"20 layers of 256 units": 200, "ResNet-18": 60}
OUT = Path(__file__).parent / "results" / "ddp_step.json"


def make_step(way: str, case: Case) -> Callable[[torch.Tensor], Any]:
    """Return one way's step, on a model of its own."""
    torch.manual_seed(0)
    # Over Gloo DDP's PowerSGD crashes or stands still with several buckets: see ddp_torture.py.
    cap = 1024 if way == "powerSGD_hook" else None
    model = DistributedDataParallel(case.make(), broadcast_buffers=False, bucket_cap_mb=cap)
    if way in STOCK:
        model.register_comm_hook(*STOCK[way]())
    elif not way.startswith(DDP):
        compress(model, way, warmup_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def measured(name: str, case: Case, turns: int) -> dict[str, Any]:
    """Return the times of all ways to train a model."""
    inputs = torch.randn(case.shape)
    steps = {way: make_step(way, case) for way in WAYS}
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(0)  # the same on all ranks
    for number in range(WARM_UP + turns):
        for way in order.sample(WAYS, len(WAYS)):
            dist.barrier()
            begin = time.perf_counter()
            steps[way](inputs)
            took[way].append(1e3 * (time.perf_counter() - begin))
        if dist.get_rank() == 0 and number % 50 == 0:
            print(f"{name}: step {number} of {WARM_UP + turns}", flush=True)
    timed = {way: times[WARM_UP:] for way, times in took.items()}
    return {way: {**summary(times), **over(times, timed[DDP])} for way, times in timed.items()}


def summary(times: list[float]) -> dict[str, Any]:
    """Return the median and quartiles of a way's steps."""
    quartiles = [round(q, 2) for q in statistics.quantiles(times, n=4)[::2]]
    return {"step_ms": round(statistics.median(times), 2), "step_ms_quartiles": quartiles}


def over(times: list[float], yardstick: list[float]) -> dict[str, Any]:
    """Return the median and quartiles of the ratios to DDP's steps of the same turns."""
    ratios = [one / other for one, other in zip(times, yardstick, strict=True)]
    quartiles = [round(q, 3) for q in statistics.quantiles(ratios, n=4)[::2]]
    return {"over_ddp": round(statistics.median(ratios), 3), "over_ddp_quartiles": quartiles}


def main() -> None:
    """Train, and let the first rank write the result."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    times = {name: measured(name, case, STEPS[name]) for name, case in CASES.items()}
    if dist.get_rank() == 0:
        result = {
            "command": f"torchrun --nproc-per-node {dist.get_world_size()} benchmarks/ddp_step.py",
            "machine": environment.describe(),
            "models": {
                name: {
                    "parameters": sum(p.numel() for p in case.make().parameters()),
                    "steps": STEPS[name],
                    "times": times[name],
                }
                for name, case in CASES.items()
            },
        }
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        json.dump(result, sys.stdout, indent=1)
        print()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
