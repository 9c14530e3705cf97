"""What a training step gains by compression, on several hosts behind slow links.

    python benchmarks/cluster.py

As root: every host is a network namespace (docker/netns). Trains two nets at each number of hosts
and link speed (cluster_worker.py), and writes results/cluster.json, cluster.md, cluster.png and
headline.png. A point that is there already is not measured again; --points 1 stops after one,
--report measures nothing. --every-recipe measures one point with all recipes, --exchanges gathered
and sharded exchanges on 2, 4 and 8 hosts, --ddp trainings under DDP beside those under Horovod on
two hosts, for tables of their own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "cluster.json"
POINTS = [  # (model, hosts, what each host's interface may send in Mbit/s, images on each host)
    ("alexnet", 4, 70, 64),
    ("alexnet", 4, 100, 64),
    ("alexnet", 4, 150, 64),
    ("alexnet", 4, 100, 16),
    ("alexnet", 2, 100, 16),
    ("alexnet", 4, 300, 16),
    ("alexnet", 4, 1000, 16),
    ("resnet", 4, 100, 8),
    ("alexnet", 2, 300, 16),
    ("resnet", 4, 300, 8),
    ("resnet", 2, 100, 8),
    ("alexnet", 2, 1000, 16),
    ("resnet", 4, 1000, 8),
]
EXCHANGES = [("alexnet", hosts, 30, 2) for hosts in (2, 4, 8)]  # little of them is computing
DDP = [  # fastest links first: their steps are the shortest
    ("alexnet", 2, 1000, 16),
    ("alexnet", 2, 300, 16),
    ("alexnet", 2, 100, 16),
    ("resnet", 2, 100, 8),
]
HEADLINE = ("alexnet", 16, 4)  # of the README's figure: net, batch, hosts
OURS = ("random_block", "topk", "fft")
PLOTTED = {
    "random_block": "random_block (1 %)",
    "topk": "topk (3.8 %)",
    "fft": "fft",
    "fp16": "16-bit gradients (fp16)",
    "QSGD int8": "QSGD in torch, 8 bits a value",
    "Top-k 0.15, unpacked": "Top-k in torch, 15 %, 64 bits a value",
    "Top-k 0.01, unpacked": "Top-k in torch, 1 %, 64 bits a value",
}
TITLES = {"alexnet": "AlexNet-like net, 3.0 M", "resnet": "ResNet, 2.8 M"}
EVERY = ("alexnet", 4, 100, 16)  # where all recipes are compared
# Milliseconds between two talks about who is ready. Horovod's default of 1 keeps hosts busy that
# share the cores of one machine.
CYCLE_TIME = "5"
STEPS = 8  # each host leads equally often in scalecom's choice
TIME_LIMIT_S = 600
HEADER_NBYTES = 14 + 20 + 32  # of Ethernet, IPv4 and TCP with time stamps, in every packet
# By Okabe and Ito; the colour-blind can tell these apart.
COLOURS = ("#000000", "#7F3C8D", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")


def measure(model: str, hosts: int, mbit: int, batch: int, *more: str) -> dict[str, Any]:
    """Return what the training on one cluster found; ``more``: flags of the worker."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        worker = [sys.executable, HERE / "cluster_worker.py", model, out]
        worker += ["--batch", str(batch), "--steps", str(STEPS), *more]
        cluster = [HERE.parent / "docker" / "netns", "-n", str(hosts), "-r", f"{mbit}mbit"]
        # Kernels of many recipes may be compiled one after the other in a first step.
        patience = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(TIME_LIMIT_S)}
        environment = {**os.environ, "HOROVOD_CYCLE_TIME": CYCLE_TIME, **patience}
        command = [*cluster, "--gloo", *worker]
        subprocess.run(command, check=True, timeout=TIME_LIMIT_S, env=environment)
        return json.loads(out.read_text(encoding="utf-8"))


def measured(point: tuple[str, int, int, int], *more: str) -> dict[str, Any]:
    """Return a point as it is stored."""
    model, hosts, mbit, batch = point
    found = measure(model, hosts, mbit, batch, *more)
    return {"model": model, "hosts": hosts, "mbit_per_s": mbit, **found}


def speed_up(point: dict[str, Any], way: str, over: str = "none") -> float:
    """Return a step of ``over`` divided by one of ``way``."""
    return point["ways"][over]["step_s"] / point["ways"][way]["step_s"]


def ratio(point: dict[str, Any]) -> float:
    """Return communication over computation: what a dense step takes longer than one alone."""
    alone, none = (point["ways"][way]["step_s"] for way in ("alone", "none"))
    return none / alone - 1


def exchange_share(point: dict[str, Any]) -> float:
    """Return which part of a dense step waits for its exchange."""
    return point["ways"]["none"]["exchange_s"] / point["ways"]["none"]["step_s"]


def carried_nbytes(point: dict[str, Any], way: str) -> float:
    """Return the bytes of collectives that a host sent in a step, by its interface's counters.

    Without headers, and without what Horovod sends to coordinate, as seen in steps without an
    exchange.
    """

    def payload(way: str) -> float:
        return ways[way]["sent_nbytes"] - HEADER_NBYTES * ways[way]["sent_packets"]

    ways = point["ways"]
    return payload(way) - payload("alone") * ways[way]["step_s"] / ways["alone"]["step_s"]


def kind_of(point: dict[str, Any]) -> tuple[str, int, int]:
    """Return what stays the same along a curve."""
    return point["model"], point["batch"], point["hosts"]


def series(points: Iterable[dict[str, Any]], *kind: object) -> list[dict[str, Any]]:
    """Return the points of one net, batch and number of hosts, slowest link first."""
    chosen = (p for p in points if kind_of(p) == kind)
    return sorted(chosen, key=lambda point: point["mbit_per_s"])


def pays_up_to(points: list[dict[str, Any]], way: str) -> str:
    """Return up to which link speed ``way`` beats ``none``, interpolated between points."""
    gains = [(p["mbit_per_s"], speed_up(p, way)) for p in points]
    if gains[-1][1] > 1:
        return f"above {gains[-1][0]}"
    for (slow, more), (fast, less) in reversed(list(itertools.pairwise(gains))):
        if more > 1 >= less:
            part = math.log(more) / (math.log(more) - math.log(less))
            return f"{slow * (fast / slow) ** part:.0f}"
    return "nowhere"


def draw(axes: Axes, points: list[dict[str, Any]]) -> None:
    """Draw the speed-up over ``none`` of a few ways against the link speed."""
    speeds = [point["mbit_per_s"] for point in points]
    for (way, label), colour in zip(PLOTTED.items(), COLOURS[1:], strict=True):
        gains = [speed_up(point, way) for point in points]
        axes.plot(speeds, gains, "o-" if way in OURS else "s--", color=colour, label=label)
    axes.axhline(1, color="black", linewidth=1, label="32-bit gradients (none)")
    model, batch, hosts = kind_of(points[0])
    axes.set_title(f"{TITLES[model]}, {hosts} hosts, batch {batch} a host", fontsize=10)
    axes.set(xscale="log", xlabel="link of each host (Mbit/s)", ylabel="speed-up over none")
    axes.set_xticks(speeds, [str(speed) for speed in speeds])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3)


def plot(points: list[dict[str, Any]], folder: Path) -> None:
    """Draw the curve of the README, and one for each net, batch and number of hosts."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    draw(figure.subplots(), series(points, *HEADLINE))
    figure.axes[0].legend(fontsize="small")
    figure.savefig(folder / "headline.png", dpi=120)
    curves = [series(points, *kind) for kind in sorted({kind_of(p) for p in points})]
    curves = [curve for curve in curves if len(curve) > 1]
    n_rows = math.ceil(len(curves) / 2)
    figure = Figure(figsize=(12, 3.6 * n_rows + 0.8), layout="constrained")
    grid = figure.subplots(n_rows, 2, squeeze=False).flat
    for axes, curve in zip(grid, curves, strict=False):
        draw(axes, curve)
    for axes in grid:
        axes.set_axis_off()
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.suptitle("Speed-up of a training step by link speed")
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.savefig(folder / "cluster.png", dpi=110)


def table(point: dict[str, Any]) -> str:
    """Return one point in Markdown."""
    lines = [
        f"{point['model']}, batch {point['batch']}, {point['hosts']} hosts, {point['mbit_per_s']} "
        f"Mbit/s: communication / computation {ratio(point):.1f}, "
        f"{exchange_share(point):.0%} of a dense step is exchange",
        "",
        "| way | step ms (quartiles) | compute | encode (hidden) | exchange | decode | MB by the "
        "interface | carried | claimed | off by | none / way |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, way in point["ways"].items():
        low, high = way["step_s_quartiles"]
        step, compute, encode, hidden, exchange, decode = (
            f"{1e3 * way[key]:.0f}"
            for key in ("step_s", "compute_s", "encode_s", "hidden_s", "exchange_s", "decode_s")
        )
        carried, claims = carried_nbytes(point, name), way["claimed_nbytes"]
        off = f"{carried / claims - 1:+.1%}" if claims else ""
        lines.append(
            f"| {name} | {step} ({1e3 * low:.0f} to {1e3 * high:.0f}) | {compute} "
            f"| {encode} ({hidden}) | {exchange} | {decode} "
            f"| {way['sent_nbytes'] / 1e6:.2f} | {carried / 1e6:.2f} "
            f"| {claims / 1e6:.2f} | {off} | {speed_up(point, name):.2f} |"
        )
    return "\n".join(lines)


def ddp_table(points: list[dict[str, Any]]) -> str:
    """Return steps and bytes under DDP and under Horovod in Markdown."""
    heads = [f"{p['model']}, {p['mbit_per_s']} Mbit/s" for p in points]
    lines = [
        "ms of a step / MB that a host's interface sent in it:",
        "",
        f"| way | {' | '.join(heads)} |",
        f"|---|{len(heads) * '---:|'}",
    ]
    for way in points[0]["ways"]:
        found = [point["ways"][way] for point in points]
        cells = [f"{1e3 * each['step_s']:.0f} / {each['sent_nbytes'] / 1e6:.2f}" for each in found]
        name = way if way.startswith("DDP") else f"Horovod, {way}"
        if way == "alone":
            name = "no exchange"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(points: list[dict[str, Any]]) -> list[str]:
    """Return the speed-ups of all points in Markdown, and up to which link speed each way pays."""
    kinds = sorted({kind_of(p) for p in points})
    columns = [point for kind in kinds for point in series(points, *kind)]
    heads = [f"{p['model']} {p['batch']}, {p['hosts']} x {p['mbit_per_s']}" for p in columns]
    lines = [
        "Time of a step with `none` over that of each way. Columns: net and batch, hosts x Mbit/s.",
        "",
        f"| way | {' | '.join(heads)} |",
        f"|---|{len(heads) * '---:|'}",
    ]
    facts: dict[str, Callable[[dict[str, Any]], str]] = {
        "communication / computation": lambda p: f"{ratio(p):.1f}",
        "exchange in a dense step": lambda p: f"{exchange_share(p):.0%}",
    }
    for title, fact in facts.items():
        lines.append(f"| {title} | {' | '.join(map(fact, columns))} |")
    ways = [way for way in columns[0]["ways"] if way not in ("alone", "none")]
    for way in ways:
        lines.append(f"| {way} | {' | '.join(f'{speed_up(p, way):.2f}' for p in columns)} |")
    curves = [curve for kind in kinds if len(curve := series(points, *kind)) > 1]
    titles = [f"{c[0]['model']} {c[0]['batch']}, {c[0]['hosts']} hosts" for c in curves]
    lines += ["", "It pays up to this link speed, in Mbit/s:", ""]
    lines += [f"| way | {' | '.join(titles)} |", f"|---|{len(titles) * '---:|'}"]
    for way in ways:
        lines.append(f"| {way} | {' | '.join(pays_up_to(curve, way) for curve in curves)} |")
    return lines


def report(content: dict[str, Any]) -> str:
    """Return all tables in Markdown."""
    points = content["points"]
    parts = ["# Steps on several hosts", "`python benchmarks/cluster.py`; see ../README.md."]
    parts.append("\n".join(summary(points)))
    for kind in sorted({kind_of(p) for p in points}):
        parts += [table(point) for point in series(points, *kind)]
    if "every_recipe" in content:
        parts += ["# Every recipe", table(content["every_recipe"])]
    if "exchanges" in content:
        parts += ["# Gathered and sharded", *map(table, content["exchanges"])]
    return "\n\n".join(parts) + "\n"


def measure_ddp() -> None:
    """Measure DDP beside Horovod, and write a file of its own."""
    points: list[dict[str, Any]] = []
    content = {"command": "python benchmarks/cluster.py --ddp", "HOROVOD_CYCLE_TIME": CYCLE_TIME}
    for point in DDP:
        points.append(measured(point, "--ddp"))
        text = json.dumps({**content, "points": points}, indent=1)
        OUT.with_name("cluster_ddp.json").write_text(f"{text}\n", encoding="utf-8")
    print(ddp_table(points))


def main() -> None:
    """Measure what is missing, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=len(POINTS), help="measure so many at most")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--every-recipe", action="store_true", help="one point, all recipes")
    parser.add_argument("--exchanges", action="store_true", help="2, 4 and 8 hosts, both exchanges")
    parser.add_argument("--ddp", action="store_true", help="two hosts, DDP beside Horovod")
    args = parser.parse_args()
    content: dict[str, Any] = {"points": []}
    if OUT.exists():
        content = json.loads(OUT.read_text(encoding="utf-8"))
    content |= {"command": "python benchmarks/cluster.py", "HOROVOD_CYCLE_TIME": CYCLE_TIME}
    if args.every_recipe and not args.report:
        content["every_recipe"] = measured(EVERY, "--every-recipe")
        OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(table(content["every_recipe"]))
        return
    if args.exchanges and not args.report:
        content["exchanges"] = [measured(point, "--exchanges") for point in EXCHANGES]
        OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print("\n\n".join(map(table, content["exchanges"])))
        return
    if args.ddp and not args.report:
        measure_ddp()
        return
    points = content["points"]
    there = [(p["model"], p["hosts"], p["mbit_per_s"], p["batch"]) for p in points]
    missing = [point for point in POINTS if point not in there]
    for point in [] if args.report else missing[: args.points]:
        points.append(measured(point))
        OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(table(points[-1]), flush=True)
    if points:
        plot(points, OUT.parent)
        OUT.with_suffix(".md").write_text(report(content), encoding="utf-8")
    if args.report:
        print(report(content))


if __name__ == "__main__":
    main()
