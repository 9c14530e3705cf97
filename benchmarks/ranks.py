"""What a rank computes in a step as a function of the number of ranks: gathered and sharded.

    python benchmarks/ranks.py             # a minute
    python benchmarks/ranks.py --numel 1000000 --recipes topk fft

Prints milliseconds of one thread for a tensor of 16 M elements with error feedback, of the first
encoding, of the owner's sum and second encoding, and of decoding, and their sum over the time of a
memcpy of the tensor. Every rank sends the same payloads. Writes results/ranks.json and ranks.png.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.progress import track

from horovod_fftcomp import get_scheme, set_num_threads
from horovod_fftcomp.schemes import Context, Round, Tensor
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.bench import memcpy, settle_malloc

RANKS = {"sharded": (2, 4, 8, 16, 32, 64), "gather": (2, 4, 8, 16)}
STEPS = 4  # the first one is not counted
OUT = Path(__file__).parent / "results" / "ranks.json"


class Times(NamedTuple):
    """Milliseconds; ``own``: of the owner's sum and second encoding, 0 in a gather."""

    encode: float
    own: float
    decode: float
    memcpy: float

    @property
    def in_memcpys(self) -> float:
        """All of it, in times of a memcpy of the tensor."""
        return (self.encode + self.own + self.decode) / self.memcpy


def output_of(round_: Round, ranks: int) -> np.ndarray:
    """Return what a rank receives if all send the same."""
    sent = round_.data[: round_.splits[0]] if round_.collective == "alltoall" else round_.data
    return np.tile(sent, ranks)


def measure(recipe: str, exchange: str, ranks: int, grad: np.ndarray) -> Times:
    """Return the least times of the first rank, over some steps."""
    scheme, tensor, state = get_scheme(recipe, exchange=exchange), Tensor("w", grad.shape), {}
    found, copied = [], np.empty_like(grad)
    for step in range(1, STEPS + 1):
        begin = time.perf_counter()
        memcpy(copied, grad)
        times = [time.perf_counter() - begin]
        running, output = scheme.exchange([tensor], [grad], state, Context(step, 0, ranks)), None
        while True:
            begin = time.perf_counter()
            try:
                round_ = running.send(output)
            except StopIteration as stop:
                times.append(time.perf_counter() - begin)
                state = stop.value.state
                break
            times.append(time.perf_counter() - begin)
            output = output_of(round_, ranks)
        found.append(times)
    copy, encode, *own, decode = (1e3 * np.array(found[1:]).min(0)).tolist()
    return Times(encode, sum(own), decode, copy)


def times_of(rows: dict[str, Any]) -> dict[str, dict[str, dict[int, Times]]]:
    """Return the times that stand in the file of results."""
    return {
        recipe: {
            exchange: {int(ranks): Times(**times) for ranks, times in found.items()}
            for exchange, found in exchanges.items()
        }
        for recipe, exchanges in rows.items()
    }


def plot(rows: dict[str, dict[str, dict[int, Times]]], path: Path) -> None:
    """Plot the whole time against the ranks."""
    axes = (figure := Figure(figsize=(8, 4.5), layout="constrained")).subplots()
    for number, (recipe, exchanges) in enumerate(rows.items()):
        for exchange, found in exchanges.items():
            whole = [times.in_memcpys for times in found.values()]
            style = "o-" if exchange == "sharded" else "x--"
            axes.plot([*found], whole, style, color=f"C{number}", label=f"{recipe}, {exchange}")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="memcpys of the tensor")
    for axis, ticks in ((axes.xaxis, RANKS["sharded"]), (axes.yaxis, (5, 10, 20, 40))):
        axis.set_ticks(ticks, map(str, ticks))
        axis.set_minor_locator(NullLocator())
    axes.set_title("Computing of a rank in one exchange")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 24, help="elements of the tensor")
    parser.add_argument("--recipes", nargs="+", default=["topk", "fft", "qsgd", "onebit"])
    args = parser.parse_args()
    set_num_threads(1)
    settle_malloc()
    numel = max(1, args.numel // 4096) * 4096  # so that all shards are alike
    grad = np.random.default_rng(0).standard_normal(numel, np.float32)
    rows: dict[str, dict[str, dict[int, Times]]] = {}
    jobs = [(r, e, p) for r in args.recipes for e, ranks in RANKS.items() for p in ranks]
    for recipe, exchange, ranks in track(jobs, "measuring"):
        times = measure(recipe, exchange, ranks, grad)
        rows.setdefault(recipe, {}).setdefault(exchange, {})[ranks] = times
    print("| recipe | exchange | ranks | encode (ms) | own | decode | in memcpys |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for recipe, exchange, ranks in jobs:
        times = rows[recipe][exchange][ranks]
        cells = " | ".join(f"{time_ms:.0f}" for time_ms in times[:3])
        print(f"| {recipe} | {exchange} | {ranks} | {cells} | {times.in_memcpys:.1f} |")
    result = {
        "command": f"python benchmarks/ranks.py --numel {args.numel}",
        "machine": environment.describe(),
        "rows": {
            recipe: {
                exchange: {ranks: times._asdict() for ranks, times in found.items()}
                for exchange, found in exchanges.items()
            }
            for recipe, exchanges in rows.items()
        },
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot(rows, OUT.with_suffix(".png"))


if __name__ == "__main__":
    main()
