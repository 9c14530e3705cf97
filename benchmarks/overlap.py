"""How much of the encoding passes beside the backward pass, and what a step gains by that.

    horovodrun -np 2 python benchmarks/overlap.py

Trains a 9.5 M-parameter net in five ways, step by step in turn, so that a busy machine treats all
alike, and writes results/overlap.json: the first rank's times.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch import Compression

WIDTH, LAYERS = 1024, 9
ROWS = (32, 256)  # of a rank's batch: backward takes time by them, encoding does not
WARM_UP, STEPS = 5, 20
WAYS = {  # name: (recipe, whether it is encoded in the hooks)
    "none": ("none", False),
    "topk, in hooks": ("topk", True),
    "topk": ("topk", False),
    "fft, in hooks": ("fft", True),
    "fft": ("fft", False),
}
SPENT = ("encode_s", "encode_hidden_s", "encode_wait_s", "wait_s", "decode_s")
OUT = Path(__file__).parent / "results" / "overlap.json"


class _InHooks:
    """Computes in the thread that asks, in the place of a compressor's worker."""

    def submit(self, work: Any) -> Future:
        done: Future = Future()
        done.set_result(work())
        return done


class Run:
    """One way to train; its own model."""

    def __init__(self, recipe: str, in_hooks: bool) -> None:
        self.overlaps = recipe != "none" and not in_hooks
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        self.compression = getattr(Compression, recipe)(
            self.model, replica_check="off", warmup_steps=0
        )
        if in_hooks:
            self.compression.driver.pipeline.worker = _InHooks()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1e-3),
            named_parameters=self.model.named_parameters(),
            compression=self.compression,
        )
        self.steps: list[dict[str, float]] = []

    def step(self, rows: int) -> None:
        """Train one step and take down what it took, in seconds."""
        inputs, targets = torch.randn(rows, WIDTH), torch.zeros(rows).long()
        before = self.compression.stats()
        hvd.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        after = self.compression.stats()
        self.steps.append(
            {"step_s": end - begin, "backward_s": backward - forward}
            | {key: after[key] - before[key] for key in (*SPENT, "sent_nbytes")}
        )


def summary(run: Run) -> dict[str, Any]:
    """Return medians and, of a whole step, the quartiles; the share hidden is that of all steps."""
    steps = run.steps[WARM_UP:]
    of_steps = [1e3 * step["step_s"] for step in steps]
    result: dict[str, Any] = {
        "step_ms": round(statistics.median(of_steps), 1),
        "step_ms_quartiles": [round(q, 1) for q in statistics.quantiles(of_steps, n=4)[::2]],
        "sent_nbytes": steps[-1]["sent_nbytes"],
    }
    for key in ("backward_s", *SPENT):
        if run.overlaps or key not in ("encode_hidden_s", "encode_wait_s"):
            median_s = statistics.median(step[key] for step in steps)
            result[key.removesuffix("_s") + "_ms"] = round(1e3 * median_s, 1)
    if run.overlaps:
        hidden_s, encode_s = (sum(s[k] for s in steps) for k in ("encode_hidden_s", "encode_s"))
        result["share_hidden"] = round(hidden_s / encode_s, 3)
    return result


def measure(rows: int) -> dict[str, Any]:
    """Return the summary of each way to train with batches of ``rows``."""
    runs = {name: Run(*way) for name, way in WAYS.items()}
    for step in range(WARM_UP + STEPS):
        for run in runs.values():
            run.step(rows)
        if hvd.rank() == 0 and step % 10 == 0:
            print(f"{rows} rows: step {step} of {WARM_UP + STEPS}", flush=True)
    return {name: summary(run) for name, run in runs.items()}


def main() -> None:
    """Train, and let the first rank write the result."""
    hvd.init()
    torch.set_num_threads(1)
    ways = {f"{rows} rows": measure(rows) for rows in ROWS}
    if hvd.rank() == 0:
        result = {
            "command": f"horovodrun -np {hvd.size()} python benchmarks/overlap.py",
            "machine": environment.describe(),
            "parameters": LAYERS * WIDTH * (WIDTH + 1) + 10 * (WIDTH + 1),
            "warm_up": WARM_UP,
            "steps": STEPS,
            "times": ways,
        }
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        json.dump(result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
