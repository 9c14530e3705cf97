"""The job of ``horovod-fftcomp check`` under Horovod's launchers."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from horovod_fftcomp.adapter.torch_tensors.job_check import Job
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.torch.compression import Compression
from horovod_fftcomp.torch.rounds import HorovodRound

CONNECTS = "hvd.init()"


def connect(timeout_s: float) -> Job:
    """Initialize Horovod and return this rank's job."""
    hvd.init()
    place = hvd.rank(), hvd.size(), hvd.local_size()
    transport = "MPI" if hvd.mpi_enabled() else "Gloo"
    return Job(*place, transport, _send, _prepare, hvd.shutdown, timeout_s)


def _send(round_: Round, name: str) -> HorovodRound:
    return HorovodRound(round_, name, hvd.global_process_set)


def _prepare(layer: torch.nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
    compression, named = Compression.fft(layer, **settings), layer.named_parameters()
    return layer, hvd.DistributedOptimizer(optimizer, named, compression), compression
