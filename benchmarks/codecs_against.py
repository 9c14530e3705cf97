"""Time of encoding and decoding by one thread, against another commit, in turns in one run.

    git worktree add /tmp/before COMMIT
    python benchmarks/codecs_against.py --before /tmp/before --commit COMMIT

Exchanges random gradients of the tensors of ResNet-50, of a transformer of six layers of width 512,
and of single large tensors, as one of two ranks (scalecom: as one alone), with the residuals of the
step before. A process of each commit takes a step in turn; prints the least processor times in
milliseconds and their ratio, and writes results/codecs_against.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROUNDS = 9
RECIPES = ("topk", "fft", "qsgd", "onebit", "scalecom")
OUT = Path(__file__).parent / "results" / "codecs_against.json"


def resnet_50() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's convolutions and of its last layer."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    before = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            shapes += [(4 * width, before, 1, 1)] if not block else []
            before = 4 * width
    return [*shapes, (1000, 2048)]


MODELS: dict[str, list[tuple[int, ...]]] = {
    "resnet-50": resnet_50(),
    "transformer": [(1536, 512), (512, 512), (2048, 512), (512, 2048)] * 6,
    "4096 x 4096": [(4096, 4096)],
    "25 M": [(25_000_000,)],
}


def serve() -> None:
    """Take a step of the recipe and model that each line names; print its processor time."""
    from horovod_fftcomp import get_scheme, set_num_threads
    from horovod_fftcomp.schemes import Context, Tensor

    set_num_threads(1)
    models: dict[str, tuple[list[Tensor], list[np.ndarray]]] = {}
    states: dict[str, tuple[int, dict]] = {}
    for line in sys.stdin:
        recipe, model = line.strip().split("/")
        if model not in models:
            models.clear()
            states.clear()
            rng, shapes = np.random.default_rng(0), MODELS[model]
            grads = [rng.standard_normal(int(np.prod(s)), dtype=np.float32) for s in shapes]
            models[model] = [Tensor(f"t{n}", s) for n, s in enumerate(shapes)], grads
        tensors, grads = models[model]
        step, state = states.get(recipe, (0, {}))
        begin = time.thread_time()
        ranks = 1 if recipe == "scalecom" else 2  # whose ranks choose positions of parts each
        exchange = get_scheme(recipe).exchange(tensors, grads, state, Context(step + 1, 0, ranks))
        made = next(exchange)
        try:
            while True:
                times = ranks if made.collective == "allgather" else 1
                made = exchange.send(np.concatenate([made.data] * times))
        except StopIteration as stop:
            states[recipe] = step + 1, stop.value.state
        print(time.thread_time() - begin, flush=True)


class Worker:
    """Process that serves the package of one folder."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )

    def seconds(self, recipe: str, model: str) -> float:
        """Return the processor time of a step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(f"{recipe}/{model}", file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def main() -> None:
    """Print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--before", type=Path, help="checkout of the other commit")
    parser.add_argument("--commit", help="its name, for the results")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    from horovod_fftcomp.tools import environment

    workers = {"before": Worker(options.before), "now": Worker(Path(__file__).parents[1])}
    found = []
    for model in options.models:
        for recipe in options.recipes:
            times: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(options.rounds + 2):
                for name, worker in workers.items():
                    times[name].append(1e3 * worker.seconds(recipe, model))
            least = {name: round(min(values[2:]), 3) for name, values in times.items()}
            ratio = round(least["now"] / least["before"], 3)
            found.append({"model": model, "recipe": recipe, **least, "ratio": ratio})
            print(
                f"{model:12s} {recipe:10s} {least['before']:9.2f} {least['now']:9.2f} {ratio:6.2f}"
            )
    if options.commit:
        machine = environment.describe()
        out = {"commit": options.commit, "rounds": options.rounds, "ms": found, "machine": machine}
        OUT.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
