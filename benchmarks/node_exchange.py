"""What ``ranks_per_node`` gains: hosts with two ranks each behind a slow link, under DDP.

    python benchmarks/node_exchange.py --matrices 5 --hosts 2 --json result.json

As root: every host is a network namespace (docker/netns), in which torchrun starts two ranks. A
recipe's ways, with and without nodes, take steps in turn, so that a busy machine treats both alike:
compare ratios within one recipe. ``--leaders``: the folder of an older version, in whose nodes
one leader exchanged all of a bucket, for rows of its own. Prints the median of a step's exchange
over steps, of the slowest rank, and the mean bytes that a host's interface sends in it.
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
LOCAL, PORT = 2, 29500
WIDTH, WARM_UP, MOST_DENSE, TIME_LIMIT_S = 1024, 3, 3, 2400
INTERFACE = Path("/sys/class/net/eth0/statistics/tx_bytes")
RECIPES = ("topk", "fft")
DENSE = "DDP, dense"
NODES, LEADERS = ", ranks_per_node=2", ", leaders"


def options_of(way: str) -> dict[str, Any]:
    """Return the arguments of ``compress`` for a way."""
    recipe = way.removesuffix(NODES).removesuffix(LEADERS)
    per_node = {} if way == recipe else {"ranks_per_node": LOCAL}
    return {"recipe": recipe, "warmup_steps": 0, **per_node}


class _Given(torch.autograd.Function):
    """A loss of weights whose gradients are given, from memory."""

    @staticmethod
    def forward(ctx: Any, given: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.given = given
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        return None, *ctx.given


class Matrices(nn.Module):
    """Matrices whose gradients are given, and cost no time to compute."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(WIDTH, WIDTH) for _ in range(count))

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        """Return a loss whose gradients are ``given``."""
        return _Given.apply(given, *self.weights)


def step_of(model: DistributedDataParallel, given: list[torch.Tensor]) -> tuple[float, int]:
    """Take a step; return its seconds, and the bytes that this host has sent meanwhile."""
    model.zero_grad()
    dist.barrier()
    sent, begin = int(INTERFACE.read_text()), time.perf_counter()
    model(given).backward()
    dist.barrier()
    return time.perf_counter() - begin, int(INTERFACE.read_text()) - sent


def measure(matrices: int, steps: int, ways: list[str]) -> dict[str, dict[str, float]]:
    """Return seconds and bytes of a step of each way, on this rank."""
    torch.set_num_threads(1)
    models, compressors = {}, {}
    for way in ways:
        given = Matrices(matrices)
        how = {"gradient_as_bucket_view": True, "init_sync": False}  # all weights are zero
        models[way] = model = DistributedDataParallel(given, **how)
        if way != DENSE:
            compressors[way] = compress(model, **options_of(way))
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in models}
    before = {}
    random = torch.Generator().manual_seed(dist.get_rank())
    both = [
        [torch.randn(WIDTH, WIDTH, generator=random) for _ in range(matrices)] for _ in range(2)
    ]
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            before = {way: made.stats()["received_nbytes"] for way, made in compressors.items()}
        for name, model in models.items():
            found[name].append(step_of(model, both[step % 2]))
        for compressor in compressors.values():
            # No optimizer takes these steps; older versions need not be told.
            getattr(compressor, "note_used", int)()
    result = {}
    for way, rows in found.items():
        seconds, sent = zip(*rows[WARM_UP:], strict=True)
        result[way] = {"step_s": statistics.median(seconds), "sent": statistics.mean(sent)}
        if way in compressors:
            received = compressors[way].stats()["received_nbytes"] - before[way]
            result[way]["received"] = received / steps
    return result


def run_rank(args: argparse.Namespace) -> None:
    """Measure as one rank; the first one writes what all have found."""
    dist.init_process_group("gloo")
    own = measure(args.matrices, args.steps, args.ways)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if dist.get_rank() == 0:
        ways = {
            way: {
                "steps": args.steps,
                "step_s": max(ranks[way]["step_s"] for ranks in everyone),
                "host_sent_nbytes": round(everyone[0][way]["sent"]),
                "payload_nbytes": sum(ranks[way].get("received", 0) for ranks in everyone[:LOCAL]),
            }
            for way in args.ways
        }
        result = {"environment": environment.describe(), "ways": ways}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    ways = result["ways"]
    lines = ["| way | step, s | times as fast | MB sent by a host | MB of payloads |"]
    lines.append("|---|---:|---:|---:|---:|")
    for name, way in ways.items():
        recipe = ways[name.removesuffix(NODES).removesuffix(LEADERS)]
        of_nodes = f"{way['payload_nbytes'] / 1e6:.2f}" if way is not recipe else "-"
        figures = f"{way['step_s']:.2f} | {recipe['step_s'] / way['step_s']:.2f}"
        lines.append(f"| {name} | {figures} | {way['host_sent_nbytes'] / 1e6:.2f} | {of_nodes} |")
    return "\n".join(lines)


def cluster(args: argparse.Namespace, ways: list[str], folder: str | None) -> dict[str, Any]:
    """Measure ``ways`` on a cluster of their own, by the package in ``folder``, if any."""
    steps = min(args.steps, MOST_DENSE) if ways == [DENSE] else args.steps
    given = ["--matrices", args.matrices, "--hosts", args.hosts, "--steps", steps]
    given += ["--json", Path(args.json).resolve(), "--ways", *ways]
    hosts = [HERE.parent.parent / "docker" / "netns", "-n", args.hosts, "-r", f"{args.mbit}mbit"]
    command = [*hosts, "--gloo", sys.executable, HERE, "--as", "host", *given]
    env = {**os.environ, **({"PYTHONPATH": str(Path(folder).resolve())} if folder else {})}
    subprocess.run(list(map(str, command)), check=True, timeout=TIME_LIMIT_S, env=env)
    return json.loads(Path(args.json).read_text(encoding="utf-8"))


def run_all(args: argparse.Namespace) -> None:
    """Measure all ways; write and print what was found."""
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"numel": args.matrices * WIDTH**2, "mbit_per_s": args.mbit}
    result |= {"hosts": args.hosts, "ranks_per_host": LOCAL, "ways": {}}
    for recipe in (DENSE, *RECIPES):
        ways = [recipe] if recipe == DENSE else [recipe, recipe + NODES]
        found = cluster(args, ways, None)
        result["environment"] = found["environment"]
        result["ways"] |= found["ways"]
        if args.leaders and recipe != DENSE:
            result["ways"] |= cluster(args, [recipe + LEADERS], args.leaders)["ways"]
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


def main() -> None:
    """Start the hosts, or be one of them, or one of their ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrices", type=int, default=24, help=f"of {WIDTH} x {WIDTH} each")
    parser.add_argument("--hosts", type=int, default=4, help=f"with {LOCAL} ranks each")
    parser.add_argument("--mbit", type=int, default=100, help="of a host's link")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--leaders", help="folder of a version whose nodes have leaders")
    parser.add_argument("--json", default="out/node_exchange.json")
    parser.add_argument("--as", dest="role", choices=["starter", "host", "rank"], default="starter")
    parser.add_argument("--ways", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "rank":
        run_rank(args)
    elif args.role == "host":
        hosts = ["--nnodes", args.hosts, "--nproc-per-node", LOCAL, "--rdzv-backend", "c10d"]
        given = [word if word != "host" else "rank" for word in sys.argv[1:]]
        hosts += ["--rdzv-endpoint", f"node1:{PORT}", HERE, *given]
        launcher = [sys.executable, "-m", "torch.distributed.run", *map(str, hosts)]
        subprocess.run(launcher, check=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"})
    else:
        run_all(args)


if __name__ == "__main__":
    main()
