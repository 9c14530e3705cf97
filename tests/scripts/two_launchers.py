"""Write averages and states of a few steps, under horovodrun or over ``torch.distributed``."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch
from torch import nn

from horovod_fftcomp import list_compressors

LAUNCHER, FOLDER, SIZE = sys.argv[1], Path(sys.argv[2]), int(os.environ["FFTCOMP_TEST_RANKS"])
EVERY = [(recipe, {}) for recipe in list_compressors() if recipe != "hard_threshold"]
CHOICES = [
    *EVERY,
    ("hard_threshold", {"threshold": 0.5}),  # payloads of unequal sizes
    ("hard_threshold", {"calibrate_steps": 2}),
    *((recipe, {"exchange": "sharded"}) for recipe in ("topk", "fft", "qsgd", "onebit")),
    *([] if SIZE % 2 else [("topk", {"ranks_per_node": 2})]),
]

if LAUNCHER == "horovod":
    import horovod.torch as hvd

    from horovod_fftcomp.torch import Compression, LocalSteps

    hvd.init()
    rank = hvd.rank()
else:
    import torch.distributed as dist

    from horovod_fftcomp.torch_distributed import LocalSteps, compress

    rank = int(os.environ["FFTCOMP_TEST_RANK"])
    store = f"file://{os.environ['FFTCOMP_TEST_STORE']}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE)


def averages(recipe: str, options: dict) -> dict:
    """Return the averages of some steps, and the state after them."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 80))
    names = list(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if LAUNCHER == "horovod":
        compression = getattr(Compression, recipe)(model, warmup_steps=0, **options)
        optimizer = hvd.DistributedOptimizer(optimizer, names, compression=compression)
    else:
        model = nn.parallel.DistributedDataParallel(model)
        compression = compress(model, recipe, warmup_steps=0, **options)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(16, 80, generator=generator)).square().sum().backward()
        optimizer.step()
        found.append({name: parameter.grad.clone() for name, parameter in names})
    return {"averages": found, "state": compression.state_dict()}


def local_steps() -> dict:
    """Return the state of local steps with an outer momentum, and the compressor's."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(80, 80)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if LAUNCHER == "horovod":
        compression = Compression.topk(model, warmup_steps=0)
    else:
        model = nn.parallel.DistributedDataParallel(model)
        compression = compress(model, "topk", warmup_steps=0)
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    local = LocalSteps(model, compression, 3, outer=outer)
    for step in range(10):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(16, 80, generator=generator)).square().mean().backward()
        optimizer.step()
        local.after_step()
    return {"local": local.state_dict(), "state": compression.state_dict()}


results = {f"{recipe} {options}": averages(recipe, options) for recipe, options in CHOICES}
results["local steps"] = local_steps()
torch.save(results, FOLDER / f"{LAUNCHER}-{rank}.pt")
