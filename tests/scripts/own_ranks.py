"""Train with DDP on two ranks that this script starts: by "spawn", "fork" or "commands"."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel


def train(rank: int) -> None:
    """Take eight steps."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(100, 100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(4, 100)).square().sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    how = sys.argv[1]
    if how == "rank":
        train(1)
        sys.exit()
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    if how == "spawn":
        torch.multiprocessing.spawn(train, nprocs=2)
    elif how == "fork":
        context = torch.multiprocessing.get_context("fork")
        ranks = [context.Process(target=train, args=(rank,)) for rank in range(2)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        sys.exit(max(one.exitcode for one in ranks))
    else:
        with subprocess.Popen([sys.executable, __file__, "rank"]) as other:
            try:
                train(0)
            finally:
                other.kill()
