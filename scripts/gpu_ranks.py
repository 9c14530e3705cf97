"""One rank of a small training under DDP on a GPU, by some recipes; a line of JSON for each.

Started by gpu_first_minutes.py with RANK, WORLD_SIZE and STORE, a file by which ranks meet.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_cases import waits_of
from gpu_processes import say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.simulation import exchange_once
from horovod_fftcomp.torch_distributed import compress, compressor

RECIPES = ("topk", "fft", "powersgd", "qsgd", "scalecom")
BATCHES = 4
# The host also waits in the checks of parameters in steps 10, 20 and 30: of those whose waits are
# counted, 21 to 28, none is among them.
STEPS = 21
COMPARED, MOST = 4, 0.01  # steps; the norm of a difference, as a share: transforms may round apart


def model_of(width: int) -> nn.Module:
    """Return the same model on each rank."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, 8))


def steps_of(ddp: nn.Module, width: int, place: str) -> Callable[[], torch.Tensor]:
    """Return what makes a step by the next batch and returns its loss."""
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    batches = [torch.randn(64, width, generator=generator).to(place) for _ in range(BATCHES)]

    def step() -> torch.Tensor:
        x = batches[0]
        batches.append(batches.pop(0))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), torch.sin(3 * x[:, :8]))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def train(recipe: str, place: str) -> dict[str, Any]:
    """Train by a recipe; return whether it learned, alike on all ranks, and what it cost."""
    width = 64 if place == "cpu" else 1024
    model = model_of(width).to(place)
    ddp = DistributedDataParallel(model, bucket_cap_mb=4)
    compression = compress(ddp, recipe, warmup_steps=0)
    step = steps_of(ddp, width, place)
    losses, seconds = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        losses.append(step().item())
        seconds.append(time.perf_counter() - began)
    waits = waits_of(step) if place == "cuda" else {}
    whole = np.concatenate([p.detach().cpu().numpy().ravel() for p in model.parameters()])
    stats, there = compression.stats(), compression.engine.computes_on_device(0)
    equal = len({*gathered(hashlib.sha256(whole.tobytes()).hexdigest(), place)}) == 1
    difference = difference_from_cpu(recipe, place)
    learned = sum(losses[-BATCHES:]) < sum(losses[:BATCHES])  # not if one is NaN
    return {
        "recipe": recipe,
        "ok": learned and there and equal and not stats["skipped_steps"] and difference <= MOST,
        "difference": difference,
        "losses": [round(losses[0], 4), round(losses[-1], 4)],
        "on_device": there,
        "ranks_equal": equal,
        "step_ms": round(1e3 * statistics.median(seconds), 2),
        "ratio": round(stats["ratio"], 1),
        "waits": waits,
    }


class Slopes(nn.Module):
    """Layer whose gradient is its input, and whose tensor has the name of a simulation's."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gradient = nn.Parameter(torch.zeros(n // 100, 100))  # vectors are sent dense

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        """Return the sum of the elements times their slopes."""
        return (self.gradient.view(-1) * slopes).sum()


def difference_from_cpu(recipe: str, place: str) -> float:
    """Return the largest difference of DDP's sums from the CPU's, by norms, as a share."""
    n, rank, size = 20_000 if place == "cpu" else 1_000_000, dist.get_rank(), dist.get_world_size()
    tensors = (Tensor("gradient", (n // 100, 100)),)
    bucket = Bucket(tensors, make_policy(recipe, warmup_steps=0).decided(tensors, size))
    engines = [Engine([bucket], number, size) for number in range(size)]
    ddp = DistributedDataParallel(Slopes(n).to(place))
    compression = compress(ddp, recipe, warmup_steps=0)
    rng, largest = np.random.default_rng(0), 0.0
    for _ in range(COMPARED):
        slopes = rng.standard_normal((size, n), dtype=np.float32)
        exchange_once(engines, [[[own]] for own in slopes], random.Random(0))
        [expected] = engines[0].sums(0)
        for engine in engines:
            engine.settle()
        ddp.zero_grad()
        ddp(torch.from_numpy(slopes[rank]).to(place)).backward()
        compression.note_used()
        apart = size * ddp.module.gradient.grad.view(-1).cpu().numpy() - expected
        share = np.linalg.norm(apart) / np.linalg.norm(expected)
        largest = max(largest, float(share)) if share == share else np.inf
    return largest


def gathered(text: str, place: str) -> list[str]:
    """Return the text of each rank."""
    numbers = torch.tensor(list(text.encode()), dtype=torch.uint8, device=place)
    rows = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, numbers)
    return [bytes(row.tolist()).decode() for row in rows]


def main() -> None:
    """Train by all recipes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--emulated", action="store_true")
    args = parser.parse_args()
    store = f"file://{os.environ['STORE']}"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = "cpu" if args.emulated else "cuda"
    if args.emulated:
        from tests.gpu.torch_emulator import TorchEmulator

        compressor.device_of = lambda parameters, buckets: TorchEmulator()
    else:
        torch.cuda.set_device(0)
    dist.init_process_group(args.backend, init_method=store, rank=rank, world_size=size)
    for recipe in RECIPES:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = train(recipe, place)
        found["warnings"] = sorted({str(warning.message)[:160] for warning in warned})[:4]
        if rank == 0:
            say(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
