"""How long an exchange takes by itself, on more and more hosts behind slow links.

    python benchmarks/exchange_alone.py

As root: every host is a network namespace (docker/netns). Each rank holds the gradient of one large
tensor; all meet before each round of each scheme, so nobody waits for a rank that comes later, and
no time is taken of what is computed in between. Writes results/exchange_alone.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from horovod_fftcomp import get_scheme
from horovod_fftcomp.cli.arguments import recipe_choices
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.schemes import Round, Tensor
from horovod_fftcomp.tools import environment

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "exchange_alone.json"
HOSTS = (2, 4, 8)
MBIT_PER_S = 100
N = 25_000_000  # elements, as many as a ResNet-50 has
STEPS = 3  # after one that does not count
RECIPES = (
    *("none", "fp16", "scalecom", "random_block"),
    *(f"{name}(exchange={how})" for name in ("topk", "fft") for how in ("gather", "sharded")),
)
TIME_LIMIT_S = 1200


def exchange(recipe: str, rank: int, world_size: int) -> list[list[float]]:
    """Return the seconds of each round in each step on this rank."""
    import horovod.torch as hvd

    from horovod_fftcomp.torch.rounds import HorovodRound

    [choice] = recipe_choices(recipe)
    policy = make_policy(choice.name, **{"warmup_steps": 0, **choice.options})
    engine = Engine([Bucket([Tensor("gradient", (N,))], policy)], rank, world_size)

    def carry_out(round_: Round, name: str) -> Any:
        # Its wait leaves the cores, which all hosts share, to others; that of a barrier does not.
        return HorovodRound(round_, name, hvd.global_process_set).wait(TIME_LIMIT_S)

    rng, spent = np.random.default_rng(rank), []
    for step in range(1 + STEPS):
        made = engine.resume(0, [rng.standard_normal(N, np.float32)])
        spent.append([])
        while isinstance(made, Round):
            name = f"{recipe}.{step}.{len(spent[-1])}"
            carry_out(Round("allreduce", np.ones(1, np.float32)), f"{name}.meeting")
            began = time.perf_counter()
            output = carry_out(made, name)
            spent[-1].append(time.perf_counter() - began)
            made = engine.resume(0, output)
        engine.settle()
    return spent[1:]


def work(out: Path) -> None:
    """Exchange by all recipes as one of the ranks; the first writes what all have found."""
    import horovod.torch as hvd

    hvd.init()
    found = {}
    for recipe in RECIPES:
        of_ranks = hvd.allgather_object(exchange(recipe, hvd.rank(), hvd.size()))
        longest = np.max(of_ranks, 0)  # [steps, rounds]
        [choice] = recipe_choices(recipe)
        scheme = get_scheme(choice.name, **choice.options)
        found[recipe] = {
            "ms": [1e3 * float(ms) for ms in longest.sum(1)],
            "rounds": dict(zip(scheme.rounds, (1e3 * np.median(longest, 0)).tolist(), strict=True)),
            "received_bytes": scheme.received_nbytes(Tensor("gradient", (N,)), hvd.size()),
        }
        if hvd.rank() == 0:
            print(hvd.size(), "hosts", recipe, found[recipe], flush=True)
    if hvd.rank() == 0:
        out.write_text(json.dumps({"machine": environment.describe(), "recipes": found}))


def measure(hosts: int) -> dict[str, Any]:
    """Return what a cluster of so many hosts found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        cluster = [HERE.parent / "docker" / "netns", "-n", str(hosts), "-r", f"{MBIT_PER_S}mbit"]
        command = [*cluster, "--gloo", sys.executable, __file__, "--worker", out]
        patience = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIME_LIMIT_S), "OMP_NUM_THREADS": "1"}
        variables = {**os.environ, **patience}
        subprocess.run(command, check=True, timeout=TIME_LIMIT_S, env=variables)
        return json.loads(out.read_text(encoding="utf-8"))


def median_ms(result: dict[str, Any], hosts: int, recipe: str) -> float:
    """Return the median of an exchange."""
    return statistics.median(result["hosts"][str(hosts)]["recipes"][recipe]["ms"])


def table(result: dict[str, Any]) -> str:
    """Return milliseconds by recipe and hosts, and how they grow."""
    first, *others = HOSTS
    titles = [f"{hosts} hosts, ms" for hosts in HOSTS]
    titles += [f"{first} to {hosts}" for hosts in others]
    received = [f"MB on {hosts}" for hosts in HOSTS]
    lines = [f"| exchange | {' | '.join(received + titles)} |"]
    lines.append("|---|" + "---:|" * len(received + titles))
    for recipe in RECIPES:
        ms = [median_ms(result, hosts, recipe) for hosts in HOSTS]
        rows = [result["hosts"][str(hosts)]["recipes"][recipe] for hosts in HOSTS]
        cells = [f"{row['received_bytes'] / 1e6:.2f}" for row in rows]
        cells += [f"{each:.0f}" for each in ms]
        cells += [f"{each / ms[0]:.2f}" for each in ms[1:]]
        lines.append(f"| `{recipe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw how the time grows with the hosts."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = [*dict.fromkeys(recipe.split("(")[0] for recipe in RECIPES)]
    for recipe in RECIPES:
        ms = [median_ms(result, hosts, recipe) for hosts in HOSTS]
        style = "o--" if "sharded" in recipe else "o-"
        colour = f"C{names.index(recipe.split('(')[0])}"
        axes.plot(HOSTS, [each / ms[0] for each in ms], style, color=colour, label=recipe)
    axes.set(xlabel="hosts", ylabel=f"time over that on {HOSTS[0]} hosts", xticks=HOSTS)
    axes.set_title(f"Exchange of {result['n'] // 10**6} M elements, links of {MBIT_PER_S} Mbit/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure on all numbers of hosts, or report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    if args.report:
        result = json.loads(OUT.read_text(encoding="utf-8"))
    else:
        result = {
            "command": "python benchmarks/exchange_alone.py",
            "n": N,
            "mbit_per_s": MBIT_PER_S,
            "hosts": {str(hosts): measure(hosts) for hosts in HOSTS},
        }
        OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(result, OUT.with_suffix(".png"))
    print(table(result))


if __name__ == "__main__":
    main()
