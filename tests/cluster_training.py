"""What the nodes of tests/test_cluster.py train: a small net with compression, until told to stop.

Its argument is the number of steps. Prints each step of the first rank, then whether all ranks have
the same parameters.
"""

from __future__ import annotations

import hashlib
import socket
import sys

import horovod.torch as hvd
import torch

from horovod_fftcomp.torch import Compression


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    compression = Compression.topk(model, timeout_s=20, warmup_steps=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
        compression=compression,
    )
    torch.manual_seed(hvd.rank())
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if hvd.rank() == 0:
            print(f"step {step}", flush=True)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    found = hvd.allgather_object((socket.gethostname(), hashlib.sha256(weights).hexdigest()))
    if hvd.rank() == 0:
        hosts, digests = zip(*found, strict=True)
        print(f"hosts {' '.join(hosts)}; {len(set(digests))} kinds of parameters", flush=True)


if __name__ == "__main__":
    main()
