"""What a step costs through the PyTorch adapter, beside Horovod's own ``Compression.none``.

    horovodrun -np 2 python benchmarks/torch_step.py

Trains two models in several ways: a net of 20 layers with 1.3 million parameters, and a ResNet-18
for images of 32 x 32. A step of each way comes in turn, in an order that is drawn anew for each
turn, all ranks beginning together, so that a busy machine treats all alike. Writes
results/torch_step.json: the first rank's times.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")

import horovod.torch as hvd
import torch
from torch import nn

from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch import Compression

WARM_UP = 10
HOROVODS = "hvd.Compression.none"
AGAIN = f"{HOROVODS}, again"  # how much chance there is in a ratio
WAYS = (HOROVODS, AGAIN, "none", "fp16", "topk", "fft", "qsgd", "scalecom")
OUT = Path(__file__).parent / "results" / "torch_step.json"


class Layers(nn.Module):
    """Residual net of 20 dense layers of 256 units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(20))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the outputs, ``[rows, 256]``."""
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        return hidden


class Block(nn.Module):
    """Basic block of a ResNet (He et al., CVPR 2016)."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        same = before == width and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs, ``[images, width, height, width]``."""
        return torch.relu(self.body(inputs) + self.skip(inputs))


def resnet18() -> nn.Module:
    """Return a ResNet-18 with the first layer for small images."""
    blocks, before = [], 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Block(before, width, stride), Block(width, width, 1)]
        before = width
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


class Case(NamedTuple):
    """A model, its inputs and the number of steps to time."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    steps: int


CASES = {
    "20 layers of 256 units": Case(Layers, (256, 256), 300),
    "ResNet-18": Case(resnet18, (4, 3, 32, 32), 60),
}


def make_step(way: str, case: Case) -> Callable[[torch.Tensor], Any]:
    """Return one way's step, on a model of its own."""
    torch.manual_seed(0)
    model = case.make()
    named = list(model.named_parameters())
    if way.startswith(HOROVODS):
        compression = hvd.Compression.none
    else:
        compression = getattr(Compression, way)(model, warmup_steps=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6), named, compression=compression
    )

    def step(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def measured(name: str, case: Case) -> dict[str, Any]:
    """Return the times of all ways to train a model."""
    inputs = torch.randn(case.shape)
    steps = {way: make_step(way, case) for way in WAYS}
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(0)  # the same on all ranks
    for number in range(WARM_UP + case.steps):
        for way in order.sample(WAYS, len(WAYS)):
            hvd.allreduce(torch.zeros(1), name="together")
            begin = time.perf_counter()
            steps[way](inputs)
            took[way].append(1e3 * (time.perf_counter() - begin))
        if hvd.rank() == 0 and number % 50 == 0:
            print(f"{name}: step {number} of {WARM_UP + case.steps}", flush=True)
    timed = {way: times[WARM_UP:] for way, times in took.items()}
    yardstick = statistics.median(timed[HOROVODS])
    return {
        way: {
            "step_ms": round(statistics.median(times), 2),
            "step_ms_quartiles": [round(q, 2) for q in statistics.quantiles(times, n=4)[::2]],
            "over_horovods_none": round(statistics.median(times) / yardstick, 3),
        }
        for way, times in timed.items()
    }


def main() -> None:
    """Train, and let the first rank write the result."""
    hvd.init()
    torch.set_num_threads(1)
    times = {name: measured(name, case) for name, case in CASES.items()}
    if hvd.rank() == 0:
        result = {
            "command": f"horovodrun -np {hvd.size()} python benchmarks/torch_step.py",
            "machine": environment.describe(),
            "models": {
                name: {
                    "parameters": sum(p.numel() for p in case.make().parameters()),
                    "steps": case.steps,
                    "times": times[name],
                }
                for name, case in CASES.items()
            },
        }
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        json.dump(result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
