"""Benchmark of collectives between the ranks of a job, which ``advise`` runs as a module.

Its argument is JSON: a list of [collective, bytes that each rank sends, dtype of sums]. Every rank
reports to ``launcher.launch``: ``times``, medians in seconds in the order of the list, and
``spreads``, the results of ``cost_model.spread``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable

import horovod.torch as hvd
import torch

from horovod_fftcomp.adapter.torch_tensors.job_check import timed
from horovod_fftcomp.tools.advise.cost_model import spread
from horovod_fftcomp.tools.run import launcher

_MIN_REPEATS, _MAX_REPEATS = 3, 20
_BUDGET_S = 1.0  # for each collective


def main() -> None:
    """Time the collectives named on the command line."""
    messages = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    times = [_times_s(_collective(*message)) for message in messages]
    report = {"world_size": hvd.size(), "local_size": hvd.local_size()}
    report |= {"times": list(map(statistics.median, times)), "spreads": list(map(spread, times))}
    launcher.report({"rank": hvd.rank(), **report})
    hvd.shutdown()


def _collective(kind: str, nbytes: int, dtype: str) -> Callable[[], object]:
    name = f"fftcomp.network.{kind}.{nbytes}.{dtype}"
    if kind == "allreduce":
        of_sums = getattr(torch, dtype)
        # Small values like those of gradients: Gloo adds float16 in software, slower for these.
        values = torch.randn(max(1, nbytes // of_sums.itemsize)).mul_(1e-4).to(of_sums)
        return lambda: hvd.allreduce(values, name=name, op=hvd.Sum)
    data = torch.zeros(max(1, nbytes), dtype=torch.uint8)
    return lambda: hvd.allgather(data, name=name)


def _times_s(collective: Callable[[], object]) -> list[float]:
    """Return times in seconds; equally many on all ranks, by the time of the slowest rank."""
    collective()  # warm-up: connections and buffers
    once_s = torch.tensor(timed(collective, 1))
    slowest_s = float(hvd.allgather(once_s, name="fftcomp.network.once").max())
    repeat = min(_MAX_REPEATS, max(_MIN_REPEATS, int(_BUDGET_S / slowest_s)))
    return timed(collective, repeat)


if __name__ == "__main__":
    main()
