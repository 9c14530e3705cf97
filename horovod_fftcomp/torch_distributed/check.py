"""The job of ``horovod-fftcomp check`` under torchrun."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.adapter.torch_tensors.job_check import Job
from horovod_fftcomp.torch_distributed import compress
from horovod_fftcomp.torch_distributed.rounds import Network, RankGroup

CONNECTS = "init_process_group()"


def connect(timeout_s: float) -> Job:
    """Initialize the process group and return this rank's job.

    Under Slurm without torchrun the script, too, needs MASTER_ADDR and MASTER_PORT.
    """
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").replace(",", "(")  # "2(x4),1"
        os.environ.setdefault("LOCAL_WORLD_SIZE", tasks.partition("(")[0])
    dist.init_process_group("gloo")
    place = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    network, group = Network(), RankGroup(range(place[1]), "fftcomp.check", timeout_s)
    end = dist.destroy_process_group
    return Job(*place, "Gloo", partial(network.send, group=group), _prepare, end, timeout_s)


def _prepare(layer: torch.nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
    model = DistributedDataParallel(layer)
    return model, optimizer, compress(model, "fft", **settings)
