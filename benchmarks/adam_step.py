"""A step of this package's AdamW against ``torch.optim.AdamW(foreach=True)``, without a network.

    python benchmarks/adam_step.py

One rank and one thread, on the models of language_model.py with 0.4 M and 25 M parameters.
Both optimizers take turns with the same gradients; a step of ours is one that leaves the second
moments, one that updates them, or one that takes first moments. Writes results/adam_step.json.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from language_model_training import GPT, SIZES

from horovod_fftcomp.adapter.torch_tensors.optimizers import note_exchanged
from horovod_fftcomp.engine.overlap import Slot
from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch import AdamW

ROUNDS = 31
OUT = Path(__file__).parent / "results" / "adam_step.json"


class Exchanged:
    """Stands for the engine of a compressor, of which an optimizer reads what was exchanged."""

    def __init__(self) -> None:
        self.n_exchanges, self.n_compressed, self.momenta = [0], [0], [0.0]
        self.buckets: list[Any] = []  # of which none sends first moments by itself

    def moments(self) -> None:
        """Count an exchange of first moments."""
        self.n_exchanges[0] += 1
        self.momenta[0] = 0.9

    def exchange(self, compresses: bool) -> None:
        """Count an exchange."""
        self.n_exchanges[0] += 1
        self.n_compressed[0] += compresses
        self.momenta[0] = 0.0


def measure(size: str) -> dict[str, float]:
    """Return median milliseconds of a step of each kind."""
    models = [GPT(*SIZES[size][:2]) for _ in range(2)]
    theirs = torch.optim.AdamW(models[0].parameters(), lr=1e-3, foreach=True)
    ours, engine = AdamW(models[1].parameters(), lr=1e-3), Exchanged()
    parameters = list(models[1].parameters())
    note_exchanged(parameters, [Slot(0, 0)] * len(parameters), engine)  # type: ignore[arg-type]
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    kinds = {"torch": theirs, "compressed": ours, "uncompressed": ours, "first moments": ours}
    samples: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(ROUNDS + 3):
        for kind, optimizer in kinds.items():
            if kind == "first moments":
                engine.moments()
            else:
                engine.exchange(kind == "compressed" and number > 0)
            begin = time.perf_counter()
            optimizer.step()
            if number >= 3:
                samples[kind].append(1e3 * (time.perf_counter() - begin))
    return {kind: statistics.median(found) for kind, found in samples.items()}


def main() -> None:
    """Measure, print and write the results."""
    torch.set_num_threads(1)
    results = {}
    for size in ("0.4M", "25M"):
        found = results[size] = measure(size)
        for kind in ("compressed", "uncompressed", "first moments"):
            ratio = found[kind] / found["torch"]
            print(f"{size:>5}  {kind:13}  {found[kind]:8.2f} ms  {ratio:.2f} times torch's")
    content = {"command": "python benchmarks/adam_step.py", "machine": environment.describe()}
    OUT.write_text(
        json.dumps({**content, "rounds": ROUNDS, "milliseconds": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
