"""Benchmark of collectives between the ranks of a job, which ``advise`` runs as a module.

Its argument, which counts on the first rank, is JSON: [bytes of the model's gradients, dtypes of
sums, ranks of a node]. Every rank reports to ``launcher.launch``: ``load``, see
``load.share_of_others``, from before the first collective; ``messages``, the fields of each
``cost_model.Message``; ``times``, two lists of medians in seconds in their order, from all messages
twice; ``spreads``, the results of ``cost_model.spread``.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from collections.abc import Iterator

import numpy as np

from horovod_fftcomp.adapter.torch_tensors.job_check import Job, timed
from horovod_fftcomp.cli.check import launched_adapter
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.tools.advise import load
from horovod_fftcomp.tools.advise.cost_model import Message, spread
from horovod_fftcomp.tools.run import launcher

_TIMEOUT_S = 120
_MIN_REPEATS, _MAX_REPEATS = 3, 10
_BUDGET_S = 0.5  # for each collective, each time
_LONGEST_S = 2.0  # larger ones of the kind take in proportion
_USUAL_NBYTES = (4, 1 << 16, 1 << 20)
_MOST_NBYTES = 64_000_000


def main() -> None:
    """Look at the load, then time all collectives, and once more."""
    job = launched_adapter().connect(_TIMEOUT_S)
    own = np.frombuffer(sys.argv[1].encode(), np.uint8)
    asked = job.exchange(Round("allgather", own if job.rank == 0 else own[:0]), "asked").tobytes()
    looks = job.exchange(Round("allgather", load.look().view(np.uint8)), "load").view(np.int64)
    nbytes, dtypes, node_size = json.loads(asked)
    messages = list(_messages(nbytes, dtypes, node_size))
    first, second = (_measured(job, messages, node_size) for _ in range(2))
    both = {message: (first[message], second[message]) for message in first if message in second}
    values = {
        "rank": job.rank,
        "load": load.share_of_others(looks.reshape(-1, 4)),
        "messages": list(both),
        "times": [[statistics.median(times[n]) for times in both.values()] for n in (0, 1)],
        "spreads": [spread([*some, *others]) for some, others in both.values()],
    }
    launcher.report(values)
    job.finish()


def _messages(nbytes: int, dtypes: list[str], node_size: int) -> Iterator[Message]:
    """Yield what to time, of each kind the smallest first; ``nbytes``: of the model's gradients."""
    kinds = [("allreduce", dtype, np.dtype(dtype).itemsize / 4) for dtype in dtypes]
    kinds += [("allgather", "float32", 1 / 4), *[("inside", "float32", 1.0)] * (node_size > 1)]
    for collective, dtype, share in kinds:
        most = int(min(_MOST_NBYTES, share * nbytes))
        sizes = {*_USUAL_NBYTES, most, *(1 << n for n in range(22, 27, 2) if 1 << n < most)}
        yield from (Message(collective, max(4, size), dtype) for size in sorted(sizes))


def _measured(job: Job, messages: list[Message], node_size: int) -> dict[Message, list[float]]:
    """Return the times of each collective, of the slowest rank each; large ones may be left out."""
    found: dict[Message, list[float]] = {}
    slow = set()
    for message in messages:
        kind = message.collective, message.dtype
        if kind in slow:
            continue
        round_ = round_of(job, message, node_size)
        exchange = functools.partial(job.exchange, round_, str(message))
        exchange()  # connections and buffers
        [once_s] = _slowest(job, timed(exchange, 1))
        repeat = min(_MAX_REPEATS, max(_MIN_REPEATS, int(_BUDGET_S / once_s)))
        found[message] = _slowest(job, timed(exchange, repeat))
        if once_s > _LONGEST_S:
            slow.add(kind)
    return found


def round_of(job: Job, message: Message, node_size: int) -> Round:
    """Return a collective; that inside nodes is an alltoall which sends other nodes nothing."""
    if message.collective == "allgather":
        return Round("allgather", np.zeros(message.nbytes, np.uint8))
    if message.collective == "inside":
        own = job.rank // node_size
        each = -(-message.nbytes // node_size)
        splits = tuple(each * (rank // node_size == own) for rank in range(job.size))
        return Round("alltoall", np.zeros(sum(splits), np.uint8), splits=splits)
    # Small values like those of gradients: Gloo adds float16 in software, slower for these.
    numel = message.nbytes // np.dtype(message.dtype).itemsize
    values = 1e-4 * np.random.default_rng(0).standard_normal(numel, np.float32)
    return Round("allreduce", values.astype(message.dtype))


def _slowest(job: Job, times_s: list[float]) -> list[float]:
    all_times = job.exchange(Round("allgather", np.array(times_s).view(np.uint8)), "times")
    slowest: list[float] = all_times.view(np.float64).reshape(job.size, -1).max(axis=0).tolist()
    return slowest


if __name__ == "__main__":
    main()
