"""Counts the Python calls that a training step makes inside the package, by file.

    python benchmarks/calls.py --tensors 1 20

Exchanges the gradients of so many weight matrices on a CPU with PyTorch, as one rank, and counts
the calls of functions of ``horovod_fftcomp`` in all threads, and its frames that are on the stack
when a kernel reads gradients. Calls the compressor as Horovod's optimizer does, which itself
exchanges nothing with one rank. Prints the smallest count of some steps, as polling adds a few.
With ``--json FILE`` it writes the counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import horovod.torch as hvd
import torch

import horovod_fftcomp
from horovod_fftcomp.torch import Compression

PACKAGE = str(Path(horovod_fftcomp.__file__).parent)
WARM_UP, COUNTED = 3, 10  # below ``MEASURE_EVERY`` in all: steps that measure errors do more
TIMED = 200


class Calls:
    """Calls by (file, function), between ``__enter__`` and ``__exit__``."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str]] = Counter()
        self.depth = 0
        self._counts = False

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count a call; a profile function of ``sys.setprofile``."""
        del argument
        if self._counts and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            file = frame.f_code.co_filename[len(PACKAGE) + 1 :]
            self.found[file, frame.f_code.co_qualname] += 1
            if frame.f_code.co_qualname.startswith("Group.encode"):  # its kernels are no frames
                frames = (each.f_code.co_filename for each, _ in traceback.walk_stack(frame))
                self.depth = max(self.depth, sum(name.startswith(PACKAGE) for name in frames))

    def __enter__(self) -> Calls:
        self.found.clear()
        self.depth = 0
        self._counts = True
        sys.setprofile(self.note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self._counts = False


def make_step(n_tensors: int, recipe: str, width: int) -> Callable[[], None]:
    """Return a function that exchanges the gradients of one step."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(width, width, bias=False) for _ in range(n_tensors))
    model = torch.nn.Sequential(*layers)
    compression = getattr(Compression, recipe)(model, replica_check="off", warmup_steps=0)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn(width, width)

    def step() -> None:
        sent = [compression.compress(parameter.grad) for parameter in parameters]
        for parameter, (probe, context) in zip(parameters, sent, strict=True):
            parameter.grad.set_(compression.decompress(probe, context))

    return step


def count(n_tensors: int, recipe: str, width: int) -> dict[str, Any]:
    """Count the calls of a step; ``us``: median time of a step without counting."""
    calls = Calls()
    threading.setprofile(calls.note)  # for the thread that encodes
    step = make_step(n_tensors, recipe, width)
    for _ in range(WARM_UP):
        step()
    threading.setprofile(None)  # type: ignore[arg-type]
    steps = []
    for _ in range(COUNTED):
        with calls:
            step()
        steps.append((calls.found.copy(), calls.depth))
    functions, depth = min(steps, key=lambda step: step[0].total())
    files: Counter[str] = Counter()
    for (file, _), number in functions.items():
        files[file] += number
    step, times = make_step(n_tensors, recipe, width), []
    for _ in range(TIMED):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return {
        "tensors": n_tensors,
        "recipe": recipe,
        "calls": files.total(),
        "depth": depth,
        "us": round(1e6 * sorted(times)[TIMED // 2]),
        "files": dict(files.most_common()),
        "functions": {f"{file}:{name}": n for (file, name), n in functions.most_common()},
    }


def main() -> None:
    """Count, and print a table for each number of tensors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 20])
    parser.add_argument("--recipe", default="topk")
    parser.add_argument("--width", type=int, default=64, help="of a square matrix (default: 64)")
    parser.add_argument("--functions", action="store_true", help="list functions instead of files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    found = [count(n_tensors, args.recipe, args.width) for n_tensors in args.tensors]
    for each in found:
        files, tensors = each["files"], each["tensors"]
        print(f"{args.recipe}, tensors: {tensors}, calls: {each['calls']}, files: {len(files)}")
        print(f"{each['depth']} frames deep, {each['us']} us a step")
        for name, number in each["functions" if args.functions else "files"].items():
            print(f"{number:7}  {name}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
