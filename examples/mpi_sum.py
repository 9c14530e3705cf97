"""Sum NumPy arrays over the ranks of an MPI job, once with each recipe, without a framework.

    mpirun -np 4 python -m mpi4py examples/mpi_sum.py
    mpirun -np 4 python -m mpi4py examples/mpi_sum.py --compression "topk(density=0.001),scalecom"

As gradients, each rank's array is the sum of a common part and of noise of its own.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from mpi4py import MPI

from horovod_fftcomp import RECIPES
from horovod_fftcomp.cli.arguments import COMPRESSIONS, RecipeChoice, recipe_choices
from horovod_fftcomp.cli.console import Table, make_console
from horovod_fftcomp.mpi import Reducer

COMM = MPI.COMM_WORLD


def arrays_of(step: int, numel: int) -> dict[str, np.ndarray]:
    """Return this rank's arrays of a step."""
    common = np.random.default_rng(0).standard_normal(numel, np.float32)
    own = np.random.default_rng([1 + COMM.rank, step]).standard_normal(numel, np.float32)
    return {"matrix": (common + own)[: numel - 100].reshape(-1, 100), "vector": own[-100:]}


def run(choice: RecipeChoice, args: argparse.Namespace) -> tuple[float, float, float]:
    """Return (relative error of the sum over all steps, bytes a step, ms a step)."""
    reducer = Reducer(choice.name, **{"warmup_steps": 0, **choice.options})
    total, exact, seconds = 0.0, 0.0, []
    for step in range(args.steps):
        arrays = arrays_of(step, args.numel)
        COMM.Barrier()
        begin = time.perf_counter()
        sums = reducer.sum(arrays)
        seconds.append(time.perf_counter() - begin)
        total = total + sums["matrix"].astype(np.float64)
        exact = exact + COMM.allreduce(arrays["matrix"].astype(np.float64))
    error = float(np.linalg.norm(total - exact) / np.linalg.norm(exact))
    return error, reducer.costs.sent_nbytes / args.steps, 1e3 * float(np.median(seconds))


def main() -> None:
    """Sum with each recipe; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--compression",
        type=recipe_choices,
        default="none,fp16,topk,fft,random_k,scalecom",
        metavar=COMPRESSIONS,
        help=f"of: {', '.join(RECIPES)} (default: %(default)s)",
    )
    add("--numel", type=int, default=1_000_000, help="elements (default: %(default)s)")
    add("--steps", type=int, default=20, help="sums (default: %(default)s)")
    args = parser.parse_args()
    if args.numel < 200 or args.numel % 100 or args.steps < 1:
        parser.error("--numel must be a multiple of 100 from 200 up, --steps at least 1")
    names = ("error of the sum of all steps", "kB a step", "ratio", "ms a step")
    table = Table("compression", names)
    console = make_console(quiet=COMM.rank != 0)
    for choice in args.compression:
        console.print(f"{choice.label} ...")
        error, nbytes, ms = run(choice, args)
        ratio = 4 * args.numel / nbytes
        table.add_row(
            choice.label, f"{error:.2g}", f"{nbytes / 1e3:.1f}", f"{ratio:.1f}", f"{ms:.2f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
