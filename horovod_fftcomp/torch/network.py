"""Times of collectives between the ranks of a job; ``advise`` starts it as a module.

Its argument is JSON: a list of [collective, bytes that each rank hands in, dtype of sums]. Every
rank reports for ``jobs.launch``; ``times`` are medians in seconds, in the order of the list, and
``spreads`` what ``cost_model.spread`` makes of them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import horovod.torch as hvd
import torch

from horovod_fftcomp.tools.advise.cost_model import spread
from horovod_fftcomp.tools.run import launcher

_AT_LEAST, _AT_MOST = 3, 20  # times of each
_BUDGET_S = 1.0


def main() -> None:
    """Time the collectives that the command line names."""
    messages = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    times = [_times_s(_collective(*message)) for message in messages]
    found = {"world_size": hvd.size(), "local_size": hvd.local_size()}
    found |= {"times": list(map(statistics.median, times)), "spreads": list(map(spread, times))}
    launcher.report({"rank": hvd.rank(), **found})
    hvd.shutdown()


def _collective(kind: str, nbytes: int, dtype: str) -> Callable[[], object]:
    name = f"fftcomp.network.{kind}.{nbytes}.{dtype}"
    if kind == "allreduce":
        of_sums = getattr(torch, dtype)
        # As small as gradients: Gloo adds float16 in software, and takes longer for those.
        values = torch.randn(max(1, nbytes // of_sums.itemsize)).mul_(1e-4).to(of_sums)
        return lambda: hvd.allreduce(values, name=name, op=hvd.Sum)
    data = torch.zeros(max(1, nbytes), dtype=torch.uint8)
    return lambda: hvd.allgather(data, name=name)


def _times_s(collective: Callable[[], object]) -> list[float]:
    """Return times in seconds, as many on all ranks, by what the slowest needs for one."""
    collective()  # makes connections and buffers
    begin = time.perf_counter()
    collective()
    once_s = torch.tensor([time.perf_counter() - begin])
    slowest_s = float(hvd.allgather(once_s, name="fftcomp.network.once").max())
    times = []
    for _ in range(min(_AT_MOST, max(_AT_LEAST, int(_BUDGET_S / slowest_s)))):
        begin = time.perf_counter()
        collective()
        times.append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
