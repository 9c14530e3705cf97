"""Train under DDP with ranks of which the second one does not begin its third step.

It "dies", "sleeps", "gathers" the state of all ranks or "discards" its last step instead. Or it
"lacks" a compressor of which the first one waits for it, or its recipe "differs". Or it "stalls"
while the first one waits for a sum, and tells whether that has ended meanwhile. Four ranks are two
nodes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.torch_distributed import compress

rank, failure = int(os.environ["FFTCOMP_TEST_RANK"]), sys.argv[1]
size = int(os.environ["FFTCOMP_TEST_RANKS"])
store = f"file://{os.environ['FFTCOMP_TEST_STORE']}"
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
if failure == "lacks" and rank == 1:
    time.sleep(13)
    sys.exit(1)
first = torch.tensor([os.getpid()])
if failure == "stalls":
    dist.broadcast(first, 0)
recipe, timeout_s = ("none", 30) if failure == "gathers" else ("topk", 2)
recipe = "none" if failure == "stalls" else recipe
timeout_s = 9 if failure == "lacks" else timeout_s
recipe = "fft" if failure == "differs" and rank == 1 else recipe
if size == 4:
    timeout_s = 15  # four ranks share two cores, and some compile kernels in the first step
options = {"timeout_s": timeout_s, "warmup_steps": 0, "ranks_per_node": 2 if size == 4 else 1}
compression = compress(ddp, recipe, **options)
for step in range(4):
    if step == 2 and rank == 1:
        if failure == "dies":
            os._exit(9)
        if failure == "gathers":
            compression.gathered_state_dict()
        if failure == "discards":
            compression.discard()
        time.sleep(10 * timeout_s if failure == "stalls" else 5 * timeout_s)
        if failure == "stalls":
            print("the first one runs:", Path(f"/proc/{first.item()}").exists())
            sys.exit(1)
    ddp(torch.randn(4, 64)).square().sum().backward()
