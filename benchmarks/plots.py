"""Draw the pictures in results/ anew from the committed results; nothing is measured.

    python benchmarks/plots.py

Those of the language model come from language_model_report.py.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import build_up
import cluster
import convergence
import defaults
import digits_accuracy
import exchange_alone
import ranks

from horovod_fftcomp.cli.plots import write_bench
from horovod_fftcomp.tools.bench import Measurement

RESULTS = Path(__file__).resolve().parent / "results"


def read(name: str) -> Any:
    """Return results/``name``.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def draw_bench(name: str, out: Path) -> None:
    """Draw a bench; one of all recipes in two pictures, recipes and peers."""
    result = read(name)
    [tensor] = result["tensors"]
    machine = result["machine"]
    title = f"{tensor['title']}, threads: {machine['threads']}, {machine['cpu']}"
    own = {field.name for field in fields(Measurement)}
    ours, peers = (
        [Measurement(**{key: row[key] for key in own & row.keys()}) for row in tensor[kind]]
        for kind in ("recipes", "peers")
    )
    if name == "bench_all":
        write_bench(out / "bench_peers.png", peers, f"Written in PyTorch: {title}")
        peers = []
    write_bench(out / f"{name}.png", ours + peers, title)


def main(out: Path = RESULTS) -> None:
    """Draw all of them into the folder ``out``."""
    for name in ("bench", "bench_all"):
        draw_bench(name, out)
    build_up.plot(read("build_up")["rows"], out / "build_up.png")
    cluster.plot(read("cluster")["points"], out)
    defaults.plot(read("defaults")["cells"], out / "defaults.png")
    exchange_alone.plot(read("exchange_alone"), out / "exchange_alone.png")
    ranks.plot(ranks.times_of(read("ranks")["rows"]), out / "ranks.png")
    found = read("digits_accuracy")["recipes"]
    accuracies = {name: recipe["accuracy"] for name, recipe in found.items()}
    none = accuracies.pop("none")
    pairs = {name: digits_accuracy.paired_difference(own, none) for name, own in accuracies.items()}
    digits_accuracy.plot(pairs, out / "digits_accuracy.png")
    store = convergence.Store(RESULTS / "convergence.json", "table")
    convergence.plot(store, out / "convergence.png")
    convergence.plot_residuals(store, out / "convergence-residuals.png")
    convergence.plot_recovery(store, out / "convergence-recovery.png")


if __name__ == "__main__":
    main()
