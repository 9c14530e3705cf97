"""Gather the state of two ranks under DDP when the interpreter exits."""

from __future__ import annotations

import atexit
import os


@atexit.register
def save() -> None:
    """Gather, after the exit handlers of all that is imported below."""
    print(len(compression.gathered_state_dict()["ranks"]), "states")


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from horovod_fftcomp.torch_distributed import compress  # noqa: E402

rank = int(os.environ["FFTCOMP_TEST_RANK"])
store = f"file://{os.environ['FFTCOMP_TEST_STORE']}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
compression = compress(ddp, "topk", timeout_s=20, warmup_steps=0)
ddp(torch.randn(4, 64)).square().sum().backward()
