"""What the watch and the checks beside a step cost, as a share of steps of 50 ms.

    horovodrun -np 2 python benchmarks/watch.py

Trains a net of 161 tensors, and writes results/watch.json.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

from horovod_fftcomp.adapter.stalls import Progress, Status
from horovod_fftcomp.monitor.not_finite import NotFiniteWarning
from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch import Compression

STEPS, STEP_S = 600, 0.05
LAYERS, WIDTH = 80, 40  # as many tensors as a ResNet-50 has
OUT = Path(__file__).parent / "results" / "watch.json"


def main() -> None:
    """Train, and let the first rank write the result."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10, bias=False))
    compression = Compression.topk(model, density=0.01, replica_check="off", warmup_steps=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    began = cpu_s = 0.0
    for step in range(STEPS + 5):
        if step == 5:  # kernels are compiled, ranks have met
            began, cpu_s = time.perf_counter(), watch_s()
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, WIDTH)), torch.zeros(8).long()).backward()
        optimizer.step()
        time.sleep(max(0.0, begin + STEP_S - time.perf_counter()))
        if hvd.rank() == 0 and step % 100 == 0:
            print(f"step {step} of {STEPS + 5}", flush=True)
    share = (watch_s() - cpu_s) / (time.perf_counter() - began)
    step_s = (time.perf_counter() - began) / STEPS
    checks_s = seconds_of(lambda: compression._parameters.warn_of_unexchanged({}))
    checks_s += seconds_of(lambda: NotFiniteWarning(False).observe({}, 0, [0]))
    if hvd.rank() == 0:
        result = {
            "command": f"horovodrun -np {hvd.size()} python benchmarks/watch.py",
            "machine": environment.describe(),
            "tensors": len(list(model.parameters())),
            "mean_step_ms": round(1e3 * step_s, 2),
            "watch_share_of_step": round(share, 6),
            "checks_share_of_step": round(checks_s / step_s, 6),
            "seconds_of_a_report": seconds_of(one_report),
        }
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        json.dump(result, sys.stdout, indent=1)
        print()


def watch_s() -> float:
    """Return the CPU time of the thread that watches, so far."""
    [thread] = [t for t in threading.enumerate() if t.name == "fftcomp-watch"]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def one_report() -> None:
    """Do with a report of another rank what the first one does: read it, and make an answer."""
    report = Status(Progress(1000, 80, 80, False), 0.1)
    text = json.dumps({"to": "fftcomp.0", "rank": 1, "report": report})
    Status.unpack(json.loads(text)["report"])
    json.dumps({"to": "fftcomp.0", "told": 0, "text": ""})


def seconds_of(call: Callable[[], object], times: int = 1000) -> float:
    """Return the mean time of a call."""
    begin = time.perf_counter()
    for _ in range(times):
        call()
    return round((time.perf_counter() - begin) / times, 9)


if __name__ == "__main__":
    main()
