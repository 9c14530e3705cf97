"""What comparing the parameters between ranks costs, as a share of a training step.

    horovodrun -np 2 python benchmarks/replica_check.py

Trains a 10 M-parameter net with the check on and writes results/replica_check.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch import Compression

STEPS = 200  # every parameter is compared twice
WIDTH = 1024
LAYERS = 9
OUT = Path(__file__).parent / "results" / "replica_check.json"


def main() -> None:
    """Train, and let the first rank write the result."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    compression = Compression.topk(model, density=0.01, replica_check="warn", warmup_steps=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    step_s, checked_before = [], 0.0
    for step in range(STEPS + 5):
        if step == 5:  # kernels are compiled, memory is there
            checked_before = compression.stats()["check_s"]
        begin = time.perf_counter()
        optimizer.zero_grad()
        inputs = torch.randn(32, WIDTH)
        nn.functional.cross_entropy(model(inputs), torch.zeros(32).long()).backward()
        optimizer.step()
        if step >= 5:
            step_s.append(time.perf_counter() - begin)
        if hvd.rank() == 0 and step % 50 == 0:
            print(f"step {step} of {STEPS + 5}", flush=True)
    share = (compression.stats()["check_s"] - checked_before) / sum(step_s)
    if hvd.rank() == 0:
        result = {
            "command": f"horovodrun -np {hvd.size()} python benchmarks/replica_check.py",
            "machine": environment.describe(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": STEPS,
            "median_step_ms": round(1e3 * sorted(step_s)[len(step_s) // 2], 2),
            "share_of_step": round(share, 6),
        }
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        json.dump(result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
