"""What ``ranks_per_node`` gains: two hosts with two ranks each behind a slow link, under DDP.

    python benchmarks/node_exchange.py --matrices 5 --json result.json

As root: every host is a network namespace (docker/netns), in which torchrun starts two ranks. Each
way takes a step in turn, so that a busy machine treats all alike: compare ratios within one run.
Prints the median of a step's exchange over steps, of the slowest rank, and the bytes that a host's
interface sends in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_fftcomp.tools import environment
from horovod_fftcomp.torch_distributed import compress

HERE = Path(__file__).resolve()
HOSTS, LOCAL, PORT = 2, 2, 29500
WIDTH, WARM_UP, TIME_LIMIT_S = 1024, 2, 1200
INTERFACE = Path("/sys/class/net/eth0/statistics/tx_bytes")
RECIPES = ("topk", "fft")
WAYS: dict[str, dict[str, Any] | None] = {"DDP, dense": None}
for _recipe in RECIPES:
    WAYS[_recipe] = _given = {"recipe": _recipe, "warmup_steps": 0}
    WAYS[f"{_recipe}, ranks_per_node=auto"] = {**_given, "ranks_per_node": "auto"}


class Matrices(nn.Module):
    """Matrices whose gradients are random, and cost no time to compute."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(count))

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        """Return a loss whose gradients are ``given``."""
        pairs = zip(self.weights, given, strict=True)
        return sum((weight * grad).sum() for weight, grad in pairs)


def step_of(model: DistributedDataParallel, given: list[torch.Tensor]) -> tuple[float, int]:
    """Take a step; return its seconds, and the bytes that this host has sent meanwhile."""
    model.zero_grad()
    dist.barrier()
    sent, begin = int(INTERFACE.read_text()), time.perf_counter()
    model(given).backward()
    dist.barrier()
    return time.perf_counter() - begin, int(INTERFACE.read_text()) - sent


def measure(matrices: int, steps: int) -> dict[str, Any]:
    """Return seconds and bytes of a step of each way, on this rank."""
    torch.set_num_threads(1)
    models, compressors = {}, []
    for name, options in WAYS.items():
        models[name] = model = DistributedDataParallel(Matrices(matrices))
        if options is not None:
            compressors.append(compress(model, **options))
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in models}
    for step in range(WARM_UP + steps):
        random = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        given = [torch.randn(WIDTH, WIDTH, generator=random) for _ in range(matrices)]
        for name, model in models.items():
            taken = step_of(model, given)
            if step >= WARM_UP:
                found[name].append(taken)
        for compressor in compressors:
            compressor.note_used()  # no optimizer takes these steps
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }


def run_rank(args: argparse.Namespace) -> None:
    """Measure as one rank; the first one writes what all have found."""
    dist.init_process_group("gloo")
    own, everyone = measure(args.matrices, args.steps), [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if dist.get_rank() == 0:
        ways = {
            name: {
                "step_s": max(ranks[name][0] for ranks in everyone),
                "host_sent_nbytes": everyone[0][name][1],
            }
            for name in WAYS
        }
        settings = {"numel": args.matrices * WIDTH**2, "mbit_per_s": args.mbit}
        settings |= {"hosts": HOSTS, "ranks_per_host": LOCAL, "steps": args.steps}
        result = {**settings, "environment": environment.describe(), "ways": ways}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    ways = result["ways"]
    lines = ["| way | step, s | MB sent by a host |", "|---|---:|---:|"]
    for name, way in ways.items():
        lines.append(f"| {name} | {way['step_s']:.2f} | {way['host_sent_nbytes'] / 1e6:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Start the hosts, or be one of them, or one of their ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, default=5, help=f"of {WIDTH} x {WIDTH} each")
    parser.add_argument("--mbit", type=int, default=100, help="of a host's link")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", default="out/node_exchange.json")
    parser.add_argument("--as", dest="role", choices=["starter", "host", "rank"], default="starter")
    args = parser.parse_args()
    given = ["--matrices", args.matrices, "--mbit", args.mbit, "--steps", args.steps]
    given = [*map(str, given), "--json", str(Path(args.json).resolve())]
    if args.role == "rank":
        run_rank(args)
    elif args.role == "host":
        hosts = ["--nnodes", HOSTS, "--nproc-per-node", LOCAL, "--rdzv-backend", "c10d"]
        hosts += ["--rdzv-endpoint", f"node1:{PORT}", HERE, "--as", "rank", *given]
        launcher = [sys.executable, "-m", "torch.distributed.run", *map(str, hosts)]
        subprocess.run(launcher, check=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"})
    else:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        cluster = [
            HERE.parent.parent / "docker" / "netns",
            "-n",
            str(HOSTS),
            "-r",
            f"{args.mbit}mbit",
        ]
        command = [*cluster, "--gloo", sys.executable, HERE, "--as", "host", *given]
        subprocess.run(command, check=True, timeout=TIME_LIMIT_S)
        print(table(json.loads(Path(args.json).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
