"""Write the tables of both README.md, docs/training.md and results/*.md from the committed results.

    python benchmarks/tables.py

A table stands between two marks with its name, such as <!-- ranks --> and <!-- /ranks -->. Nothing
is measured, and what is outside of the marks stays as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cluster
import exchange_alone

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NAMES = ("bench", "defaults", "forecast", "ranks", "steps")
PAGES = [
    HERE.parent / "README.md",
    HERE / "README.md",
    HERE.parent / "docs" / "training.md",
    *(RESULTS / f"{name}.md" for name in NAMES),
]
SHORT = ("fp16", "topk", "fft", "dct", "qsgd", "onebit", "powersgd")  # of all recipes
PEERS = {  # recipe: what its peer's label begins with
    "topk": "torch.topk",
    "qsgd": "torch QSGD 7 levels",
    "terngrad": "torch TernGrad",
    "onebit": "torch 1-bit",
    "efsignsgd": "torch EF-Sign",
    "dgc": "torch DGC",
    "random_k": "torch random-k",
    "powersgd": "torch PowerSGD",
}
POINTS = [  # of results/cluster.json: net, batch, hosts, Mbit/s
    *(("alexnet", 16, 4, mbit) for mbit in (100, 300, 1000)),
    ("alexnet", 64, 4, 100),
    *(("resnet", 8, 4, mbit) for mbit in (100, 300, 1000)),
]
CONVERGED = (  # of results/convergence.md: what README.md shows
    *("none", "dither(ratio=30)", "fft", "dct", "topk", "topk(density=0.01)", "auto(ratio=100)"),
    "dct(density=0.0125, bits=3) with momentum first of falling density",
    *("scalecom(density=0.008)", "random_block(density=0.01)", "arctopk"),
    *("powersgd(rank=4)", "onebit"),
)
NEAR_100 = re.compile(  # of the language model: what docs/training.md shows
    r"(topk\(density=0\.01\)|auto\(ratio=100\)"
    r"|.* (with momentum first|of falling density|with Adam's second beta 0\.99))"
)

Rows = Iterable[Sequence[str]]


def read(name: str) -> Any:
    """Return the content of a file in results/."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(rows: Rows) -> str:
    """Return a table whose first row is its head; columns of words begin at the left."""
    head, *others = rows
    columns = zip(*others, strict=True)
    are_words = (all(re.match("[`a-zA-Z]", cell) for cell in column) for column in columns)
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *others)]
    lines.insert(1, f"|{'|'.join('---' if words else '---:' for words in are_words)}|\n")
    return "".join(lines)


def number(value: float | None, form: str) -> str:
    """Return ``value`` as ``form`` has it; nothing where there is none."""
    return "" if value is None else format(value, form)


def costs(rows: Iterable[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield what ``horovod-fftcomp bench`` found."""
    yield ["compressor", "encode", "with EF", "decode 2", "ratio", "rel. error"]
    for row in rows:
        label = row["label"] if row["label"].startswith("torch") else f"`{row['label']}`"
        times = (number(row[f"{what}_memcpys"], ".1f") for what in ("encode", "feedback", "decode"))
        yield [label, *times, f"{row['ratio']:.1f}", f"{row['relative_error']:.2g}"]


def over_peers() -> Iterator[list[str]]:
    """Yield how much faster and smaller recipes are than the same operators in PyTorch."""
    [tensor] = read("bench_all")["tensors"]
    recipes = {row["label"]: row for row in tensor["recipes"]}
    yield ["recipe", "operator in PyTorch", "encodes", "decodes", "ratio"]
    for recipe, label in PEERS.items():
        [peer] = [row for row in tensor["peers"] if row["label"].startswith(label)]
        own = recipes[recipe]
        encode = "feedback_s" if peer["feedback_s"] and own["feedback_s"] else "encode_s"
        faster = (f"{peer[what] / own[what]:.1f} x" for what in (encode, "decode_s"))
        yield [f"`{recipe}`", peer["label"], *faster, f"{own['ratio'] / peer['ratio']:.1f} x"]


def bench() -> Rows:
    """Yield the costs of a few recipes, and how much faster than PyTorch's operator they are."""
    [tensor] = read("bench_all")["tensors"]
    faster = {recipe: cells[1:3] for recipe, *cells in over_peers()}
    head, *rows = costs(row for row in tensor["recipes"] if row["label"] in SHORT)
    yield [*head, "encodes faster by", "decodes faster by"]
    for row in rows:
        yield row + faster.get(row[0], ["", ""])


def bench_options() -> Rows:
    """Return the costs of recipes with several options, and of their peers."""
    [tensor] = read("bench")["tensors"]
    return costs(tensor["recipes"] + tensor["peers"])


def bench_all() -> Rows:
    """Return the costs of every recipe and of their peers."""
    [tensor] = read("bench_all")["tensors"]
    return costs(tensor["recipes"] + tensor["peers"])


def digits_accuracy() -> Rows:
    """Yield the accuracies, and their differences from those of ``none``."""
    yield ["recipe", "test accuracy", "ratio", "mean difference", "95 % interval", "above -1?"]
    for name, row in read("digits_accuracy")["recipes"].items():
        accuracy = 100 * sum(row["accuracy"]) / len(row["accuracy"])
        cells = [f"`{name}`", f"{accuracy:.2f} %", f"{row['ratio']:.1f}"]
        if found := row.get("difference_points"):
            cells += [f"{found['mean']:+.2f}", f"{found['low']:+.2f} to {found['high']:+.2f}"]
            cells += ["yes" if found["is_within_tolerance"] else "no"]
        yield cells + [""] * (6 - len(cells))


def defaults() -> Rows:
    """Yield the least error at the bytes of the papers' settings, and theirs."""
    result = read("defaults")
    yield ["recipe", "bits for each element", "papers' settings", "best", "at", "at 4 bits"]
    for recipe, papers in result["papers"].items():
        cells = [c for c in result["cells"] if (c["recipe"], c["budget"]) == (recipe, "paper")]
        options = {key: papers[key] for key in ("bits", "block") if key in papers}
        [given] = [c for c in cells if {**c, **options} == c]
        best = min(cells, key=lambda cell: cell["error"])
        four = min((c for c in cells if c["bits"] == 4), key=lambda cell: cell["error"])
        bits = given["bits_per_element"].values()
        at = f"{best['bits']} bits" + (f", blocks of {best['block']}" if "block" in best else "")
        errors = (f"{cell['error']:.3f}" for cell in (given, best))
        yield [f"`{recipe}`", f"{sum(bits) / len(bits):.2f}", *errors, at, f"{four['error']:.3f}"]


def defaults_bits() -> Rows:
    """Yield the error at each number of bits and each budget, with the best block."""
    errors: dict[tuple[str, int], dict[float | str, float]] = {}
    for cell in read("defaults")["cells"]:
        row = errors.setdefault((cell["recipe"], cell["bits"]), {})
        row[cell["budget"]] = min(cell["error"], row.get(cell["budget"], math.inf))
    budgets = [*next(iter(errors.values()))]
    yield ["recipe", "bits of a value", *(f"{budget}" for budget in budgets)]
    for (recipe, bits), row in errors.items():
        yield [f"`{recipe}`", str(bits), *(f"{row[budget]:.3f}" for budget in budgets)]


def rotation() -> Rows:
    """Yield the errors of ``qsgd`` without and with a rotation."""
    yield ["levels", "bucket", "bits for each element", "error", "rotated"]
    for levels, bucket, *found in read("rotation")["rows"]:
        yield [str(levels), str(bucket), *(f"{each:.2f}" for each in found)]


def convergence() -> Rows:
    """Yield what a few recipes change in quality, as results/convergence.md has it."""
    _, *tasks = (RESULTS / "convergence.md").read_text(encoding="utf-8").split("\n## ")
    found = {}
    for task in tasks[:3]:
        rows = re.findall(r"^\| `(.*?)`.*? \| (.*?) \| (.*?) \| (.*?) \|", task, re.M)
        found[task.split()[0]] = {recipe: cells for recipe, *cells in rows}
    yield ["recipe", *found, *(f"ratio, {task}" for task in found)]
    for recipe in CONVERGED:
        rows = [task.get(recipe, ("", "", "")) for task in found.values()]
        column = 0 if recipe == "none" else 1
        yield [f"`{recipe}`", *(row[column] for row in rows), *(row[2] for row in rows)]


def near_100() -> Rows:
    """Yield what a language model loses at ratios near 100, as results/convergence.md has it."""
    page = (RESULTS / "convergence.md").read_text(encoding="utf-8")
    task = page.split("\n## ")[2]
    yield ["recipe", "change of the loss", "ratio of what is compressed"]
    row = r"^\| (`(.*?)`.*?) \| .*? \| (.*?) \| .*? \| (.*?) \|"
    for label, recipe, *cells in re.findall(row, task, re.M):
        if NEAR_100.fullmatch(recipe):
            yield [label, *cells]


def threads() -> Rows:
    """Yield the times with one thread, and the speed-ups by a second one."""
    parts = ("memcpy", "encode", "decode")
    yield ["recipe", *(f"{part} (gain)" for part in parts)]
    for recipe, times in read("threads")["times"].items():
        found = [(times[part]["1_thread_ms"], times[part]["gain"]) for part in parts]
        yield [f"`{recipe}`", *(f"{time_ms:.1f} ms ({gain:.2f})" for time_ms, gain in found)]


def overlap() -> Rows:
    """Yield steps with encoding in the hooks and in a worker thread."""
    yield ["rows", "recipe", "step of `none`", "step, in hooks", "step, in a worker",
           "encoding, in hooks", "in a worker", "share hidden"]  # fmt: skip
    for rows, times in read("overlap")["times"].items():
        for recipe in ("topk", "fft"):
            hooks, worker = times[f"{recipe}, in hooks"], times[recipe]
            ms = [one["step_ms"] for one in (times["none"], hooks, worker)]
            ms += [one["encode_ms"] for one in (hooks, worker)]
            cells = (f"{each:.0f} ms" for each in ms)
            yield [rows.split()[0], f"`{recipe}`", *cells, f"{worker['share_hidden']:.2f}"]


def steps() -> Rows:
    """Yield the steps through both adapters; see torch_step.py and tensorflow_step.py."""
    models = {"TensorFlow, 20 layers": read("tensorflow_step")}
    for name, model in read("torch_step")["models"].items():
        models[f"PyTorch, {name.split(' of ')[0]}"] = model
    sizes = (f"{name}, {model['parameters'] / 1e6:.1f} M" for name, model in models.items())
    yield ["compression", *sizes]
    for way in next(reversed(models.values()))["times"]:
        name, again, _ = way.partition(", again")
        cells = [f"`{name}`{again}" if name.startswith("hvd") else f"`Compression.{name}`"]
        for model in models.values():
            found = model["times"].get(way)
            cells.append(
                f"{found['step_ms']:.1f} ms ({found['over_horovods_none']:.2f})" if found else ""
            )
        yield cells


def ddp_step() -> Rows:
    """Yield the steps under DDP."""
    models = read("ddp_step")["models"]
    yield ["way", *(f"{name}, {model['parameters'] / 1e6:.1f} M" for name, model in models.items())]
    for way in next(iter(models.values()))["times"]:
        times = (model["times"][way] for model in models.values())
        name = way if way.startswith("DDP") or way.endswith("hook") else f"`{way}`"
        yield [name, *(f"{time['step_ms']:.1f} ms ({time['over_ddp']:.2f})" for time in times)]


def forecast() -> Rows:
    """Yield forecasts beside what the same jobs took."""
    yield ["job", "recipe", "forecast", "measured (before, after)", "error"]
    for job in read("forecast"):
        for row in job["rows"]:
            runs = ", ".join(f"{1e3 * run_s:.1f}" for run_s in row["runs_s"])
            times = [f"{1e3 * row[key]:.1f} ms" for key in ("forecast_s", "measured_s")]
            error = f"{100 * row['error']:+.0f} %"
            yield [job["label"], f"`{row['recipe']}`", times[0], f"{times[1]} ({runs})", error]


def cluster_gain() -> Rows:
    """Yield the speed-ups over ``none`` on four hosts."""
    points = read("cluster")["points"]
    found = {(*cluster.kind_of(point), point["mbit_per_s"]): point for point in points}
    columns = [found[key] for key in POINTS]
    kinds = [*dict.fromkeys(cluster.kind_of(p) for p in columns)]
    curves = [cluster.series(points, *kind) for kind in kinds if kind[1] != 64]
    pays = [f"{curve[0]['model']} {curve[0]['batch']} gains up to" for curve in curves]
    yield ["way", *(f"{p['model']} {p['batch']}, {p['mbit_per_s']}" for p in columns), *pays]
    shares = (f"{cluster.exchange_share(p):.0%}" for p in columns)
    yield ["exchange in a dense step", *shares, *[""] * len(curves)]
    for way in columns[0]["ways"]:
        if way not in ("alone", "none"):
            gains = (f"{cluster.speed_up(point, way):.2f}" for point in columns)
            yield [way, *gains, *(cluster.pays_up_to(curve, way) for curve in curves)]


def cluster_ddp() -> str:
    """Return DDP beside Horovod, once that has been measured."""
    if not (RESULTS / "cluster_ddp.json").exists():
        return "No results of `--ddp` yet.\n"
    return cluster.ddp_table(read("cluster_ddp")["points"]) + "\n"


def adam() -> Rows:
    """Yield losses of GPTs under Adam, each at its best learning rate, the lowest first."""
    import language_model_report as report  # loads PyTorch

    texts = (path.read_text(encoding="utf-8") for path in (RESULTS / "language_model").iterdir())
    found = {each.size: each for each in report.sections(map(json.loads, texts))}
    sizes = ("0.4M", "3M")
    yield ["compression", "optimizer", "ratio", *(f"loss of {size}" for size in sizes)]
    rows = {size: {(r.recipe, r.optimizer): r for r in found[size].rows} for size in sizes}
    optimizers = {"adamw": "`torch.optim.AdamW`", "adamw-ours": "`AdamW` of this package"}
    for row in sorted(rows["0.4M"].values(), key=lambda row: row.loss(row.best)):
        if row.optimizer not in optimizers or "coded" in row.recipe:  # a recipe that has gone
            continue
        cells = []
        for size in sizes:
            own = rows[size].get((row.recipe, row.optimizer))
            cell = own and f"{report.cell(own, own.best).strip('*')} at {own.best:g}"
            cells.append(cell or "")
        ratio = f"{row.mean('ratio'):.1f}"
        yield [f"`{row.recipe}`", optimizers[row.optimizer], ratio, *cells]


LINKS = {  # what README.md shows of results/cluster_ddp.json: label, way under DDP, under Horovod
    "Gradients in 16 bits (DDP's `bf16_compress_hook`, Horovod's fp16)": (
        "DDP, bf16_compress_hook",
        "fp16",
    ),
    "DDP's `powerSGD_hook`, rank 4": ("DDP, powerSGD_hook", None),
    "`fft`": ("DDP, fft", "fft"),
    "`dither`": ("DDP, dither", "dither"),
    "`topk`": ("DDP, topk", "topk"),
}


def links() -> Rows:
    """Yield how many times as fast a step is as without compression, by launcher and link."""
    points = [p for p in read("cluster_ddp")["points"] if p["model"] == "alexnet"]
    speeds = [f"{point['mbit_per_s'] / 1000:g} Gbit/s" for point in points]
    yield ["compression", *(f"{how}, {speed}" for how in ("DDP", "Horovod") for speed in speeds)]
    for label, ways in LINKS.items():
        cells = []
        for way, dense in zip(ways, ("DDP", "none"), strict=True):
            for point in points:
                steps = {name: found["step_s"] for name, found in point["ways"].items()}
                cells.append(f"{steps[dense] / steps[way]:.2f}" if way in steps else "")
        yield [label, *cells]


def alone() -> str:
    """Return the table of exchange_alone.py."""
    return exchange_alone.table(read("exchange_alone")) + "\n"


def ranks() -> Rows:
    """Yield milliseconds that a rank computes, by the number of ranks."""
    rows = read("ranks")["rows"]
    columns = [(how, n) for how in ("gather", "sharded") for n in next(iter(rows.values()))[how]]
    yield ["recipe", *(f"{'gathered' if how == 'gather' else how}, {n}" for how, n in columns)]
    for recipe, exchanges in rows.items():
        times = (exchanges[how][n] for how, n in columns)
        ms = (time["encode"] + time["own"] + time["decode"] for time in times)
        yield [f"`{recipe}`", *(f"{each:.0f}" for each in ms)]


MADE: tuple[Callable[[], Rows | str], ...] = (
    *(bench, bench_options, bench_all, over_peers, threads, digits_accuracy),
    *(defaults, defaults_bits, rotation, convergence, near_100, overlap, steps, ddp_step, forecast),
    *(cluster_gain, cluster_ddp, links, adam, alone, ranks),
)
TABLES = {make.__name__: make for make in MADE}
MARKED = re.compile(rf"(<!-- ({'|'.join(TABLES)}) -->\n).*?(<!-- /\2 -->)", re.S)


def filled(page: str) -> str:
    """Return a page with fresh tables."""

    def fresh(found: re.Match[str]) -> str:
        made = TABLES[found[2]]()
        return found[1] + (made if isinstance(made, str) else markdown(made)) + found[3]

    return MARKED.sub(fresh, page)


def main() -> None:
    """Write all pages."""
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
