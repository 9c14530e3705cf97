"""What the nodes of tests/test_cluster.py train in an elastic job: it goes on when a host is lost.

Its argument is the number of steps. Tells of each step of the first rank and, whenever ranks have
gone, whether each survivor's residuals are those of the last commit.
"""

from __future__ import annotations

import hashlib
import socket
import sys
import time

import horovod.torch as hvd
import torch

from horovod_fftcomp.torch import Compression

EVERY = 5  # steps between commits


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
    committed = []

    def residuals() -> str:
        names = [tensor.name for tensor in compression.tensors() if len(tensor.shape) == 2]
        whole = b"".join(compression.residual(name).numpy().tobytes() for name in names)
        return hashlib.sha256(whole).hexdigest()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        if committed:
            same = "unchanged" if residuals() == committed[-1] else "CHANGED"
            print(f"{socket.gethostname()}: {hvd.size()} ranks, residuals {same}", flush=True)
        while state.step < int(sys.argv[1]):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            state.step += 1
            if state.step % EVERY == 0:
                committed.append(residuals())
                state.commit()
            if hvd.rank() == 0:
                print(f"step {state.step}", flush=True)
            time.sleep(0.05)  # so that there is a moment to take a host away

    torch.manual_seed(1 + hvd.rank())
    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, step=0))
    found = hvd.allgather_object((socket.gethostname(), compression.digest()), name="digests")
    if hvd.rank() == 0:
        hosts, digests = zip(*found, strict=True)
        print(f"hosts {' '.join(hosts)}; {len(set(digests))} kinds of parameters", flush=True)


if __name__ == "__main__":
    main()
