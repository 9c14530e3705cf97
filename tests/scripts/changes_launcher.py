"""Train with several recipes, in parts that continue what another launcher has saved.

    LAUNCHER changes_launcher.py horovod|ddp FOLDER PART ...

A part is FIRST:LAST:FROM:TO: the steps from FIRST to LAST. It continues the files named FROM, if
that is not empty, and is saved in files named TO.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

LAUNCHER, FOLDER = sys.argv[1], Path(sys.argv[2])
RECIPES = {"topk": {"density": 0.05}, "fft": {}, "qsgd": {}, "powersgd": {}, "scalecom": {}}

if LAUNCHER == "horovod":
    import horovod.torch as hvd

    from horovod_fftcomp.torch import Compression

    hvd.init()
    rank = hvd.rank()
else:
    import torch.distributed as dist

    from horovod_fftcomp.torch_distributed import compress

    dist.init_process_group("gloo")
    rank = dist.get_rank()


def train(recipe: str, steps: range, saved: dict | None) -> dict:
    """Train, and return what a checkpoint holds of this rank."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 8))
    model = net
    optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
    if LAUNCHER == "horovod":
        compression = getattr(Compression, recipe)(net, warmup_steps=0, **RECIPES[recipe])
        optimizer = hvd.DistributedOptimizer(
            optimizer, net.named_parameters(), compression=compression
        )
    else:
        model = nn.parallel.DistributedDataParallel(net)
        compression = compress(model, recipe, warmup_steps=0, **RECIPES[recipe])
    if saved is not None:
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        compression.load_state_dict(saved["compression"])
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(16, 80, generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), inputs[:, :8].argmax(1)).backward()
        optimizer.step()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "compression": compression.state_dict(),
    }


def path(name: str) -> Path:
    """Return the file of this rank."""
    return FOLDER / f"{name}-{rank}.pt"


for part in sys.argv[3:]:
    first, last, source, target = part.split(":")
    before = torch.load(path(source), weights_only=True) if source else {}
    steps = range(int(first), int(last))
    results = {recipe: train(recipe, steps, before.get(recipe)) for recipe in RECIPES}
    torch.save(results, path(target))
