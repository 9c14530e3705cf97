"""Train a small language model with local steps and outer optimizers: quality against bytes.

    torchrun --nproc-per-node 4 benchmarks/local_steps.py            # minutes on 2 cores
    torchrun --nproc-per-node 4 benchmarks/local_steps.py --rows 0 11

The charlm task of convergence.py under DDP, with as many steps of each rank in every row. Prints
the table of docs/training.md.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import horovod_fftcomp
from horovod_fftcomp.torch_distributed import LocalSteps, compress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import comparison
import torch_charlm

ADD = functools.partial(torch.optim.SGD, lr=1.0)
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
SPARSE = {"density": 0.03, "decay": 0.95}


class Row(NamedTuple):
    """Training with a recipe, exchanged every ``period`` steps; 1: gradients, by DDP."""

    name: str
    recipe: str
    options: dict[str, Any]
    period: int = 1
    outer: Any = ADD


ROWS = [
    Row("DDP", "none", {}),
    Row("DDP", "topk", {}),
    *(
        row
        for period in (8, 30)
        for row in (
            Row("local SGD", "none", {}, period),
            Row("local SGD", "topk", {}, period),
            Row("DiLoCo", "none", {}, period, NESTEROV),
            Row("DiLoCo", "topk", {}, period, NESTEROV),
            Row("SparseLoCo", "topk", SPARSE, period),
        )
    ),
]


def train(row: Row, seed: int, n_steps: int) -> tuple[float, float, float]:
    """Return the validation loss, the bytes that a rank sends in a step, and those of gradients."""
    given = argparse.Namespace(seed=seed, lr=1e-2, batch_size=8, skew=0.0)
    task = torch_charlm.make_task(given, width=32, layers=1)
    model = DistributedDataParallel(task.model)
    compression = compress(model, row.recipe, warmup_steps=0, **row.options)
    local = LocalSteps(model, compression, row.period, row.outer) if row.period > 1 else None
    stream = task.batches(dist.get_rank(), dist.get_world_size())
    schedule = comparison.warm_up_of(task.optimizer, n_steps)
    for _ in range(n_steps):
        inputs, targets = next(stream)
        task.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        task.optimizer.step()
        schedule.step()
        if local is not None:
            local.after_step()
    if local is not None and local.steps:
        local.synchronize()
    dense = sum(parameter.nbytes for parameter in model.parameters())
    return task.quality(), compression.stats()["sent_nbytes"] / n_steps, dense


def main() -> None:
    """Train, and let the first rank print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600, help="of each rank")
    every = range(len(ROWS))
    parser.add_argument("--rows", type=int, nargs="+", default=every, choices=every, metavar="ROW")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores
    horovod_fftcomp.set_num_threads(1)
    dist.init_process_group("gloo")
    report = print if dist.get_rank() == 0 else lambda *line, **options: None
    report("| settings | recipe | period | validation loss | kB/step sent | ratio |")
    report("|---|---|---:|---:|---:|---:|")
    for row in (ROWS[number] for number in args.rows):
        runs = [train(row, seed, args.steps) for seed in range(args.seeds)]
        loss, sent, dense = np.mean(runs, axis=0)
        options = ", ".join(f"{key}={value}" for key, value in row.options.items())
        recipe = f"`{row.recipe}({options})`" if options else f"`{row.recipe}`"
        cells = f"{loss:.3f} | {sent / 1e3:.2f} | {dense / sent:.0f} |"
        report(f"| {row.name} | {recipe} | {row.period} | {cells}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
