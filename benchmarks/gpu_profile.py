"""What a profiler counts of each kernel of a GPU: its time, and the bytes that it moves.

    python benchmarks/gpu_profile.py   # a minute or two; as gpu.py, and Nsight Compute's ncu

Writes results/gpu_profile.json and results/gpu_profile.png; README.md tells how to read them.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu import (
    CODECS,
    RANKS,
    RESULTS,
    TRAFFIC,
    calls_of,
    described_machine,
    random_grads,
    seconds_of_copy,
)
from matplotlib.figure import Figure

from horovod_fftcomp.kernels.cuda.torch_device import TorchDevice

# By these names ncu knows what it counts; the first two in bytes, the last in nanoseconds.
READ, WRITTEN, TAKEN = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
MARK = "spin_kernel"  # of torch.cuda._sleep, which no codec launches: between two calls
NCU = ("--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none")
PHASES = ("encode", "decode_sum")


def run_calls(numel: int, out: Path) -> None:
    """Encode and decode by each codec where ncu looks; write what it cannot know to ``out``."""
    device = TorchDevice(torch.device("cuda", 0))
    grads = random_grads([numel], "cuda")
    nbytes = {}
    for name in CODECS:
        encode, decode, nbytes[name] = calls_of(device, name, grads)
        for call in (encode, decode, encode, decode):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for call in (encode, decode):
            torch.cuda._sleep(1000)
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        torch.cuda.empty_cache()
    found = described_machine() | {"payload_nbytes": nbytes}
    out.write_text(json.dumps(found), encoding="utf-8")


def profiled(numel: int) -> tuple[dict[str, Any], str]:
    """Return what ``run_calls`` wrote, and ncu's table of the same run."""
    with tempfile.TemporaryDirectory() as folder:
        facts, report = Path(folder, "facts.json"), Path(folder, "report")
        ours = [sys.executable, __file__, "--numel", str(numel), "--facts", str(facts)]
        wanted = ["--metrics", ",".join((READ, WRITTEN, TAKEN))]
        ran = subprocess.run(["ncu", *NCU, *wanted, "-f", "-o", report, *ours], check=False)
        if ran.returncode or not Path(f"{report}.ncu-rep").exists():
            raise SystemExit("ncu made no report, see above; may this user read GPU counters?")
        table = ["ncu", "--import", f"{report}.ncu-rep", "--csv", "--page", "raw"]
        table += ["--print-units", "base"]
        told = subprocess.run(table, check=True, capture_output=True, text=True).stdout
        # Not beside ncu, which makes launches slow.
        copied = seconds_of_copy(random_grads([numel], "cuda"), 21)
        return json.loads(facts.read_text(encoding="utf-8")) | {"copied": copied}, told


def short_name(kernel: str) -> str:
    """Return a kernel's name with its template arguments, without types and parameters."""
    without = kernel.replace("(anonymous namespace)", "<unnamed>")
    without = re.sub(r"\([\w ]+\)(?=-?\d|true|false)", "", without)  # (unsigned int)1
    return without.partition("(")[0].removeprefix("void ")


def launches_of(table: str) -> Iterator[dict[str, Any]]:
    """Yield the launches that ncu's table of raw values tells of, in their order."""
    lines = table.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    for row in csv.DictReader(lines[first:]):
        if not row["ID"]:
            continue  # the units
        try:
            values = {key: float(row[key].replace(",", "")) for key in (READ, WRITTEN, TAKEN)}
        except (KeyError, ValueError) as error:
            raise SystemExit(f"ncu has no such counter on this GPU: {error}") from error
        yield {
            "kernel": short_name(row["Kernel Name"]),
            "read_nbytes": round(values[READ]),
            "written_nbytes": round(values[WRITTEN]),
            "seconds": values[TAKEN] / 1e9,
        }


def calls_in(launches: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the launches of each call, whose first is preceded by a mark."""
    calls: list[list[dict[str, Any]]] = []
    for launch in launches:
        if MARK in launch["kernel"]:
            calls.append([])
        else:
            calls[-1].append(launch)
    return calls


def rows_of(facts: dict[str, Any], table: str, numel: int) -> list[dict[str, Any]]:
    """Return a row for each kernel of each call, and one for all of them together."""
    bandwidth = 8 * numel / facts["copied"]
    calls = calls_in(launches_of(table))
    names = [(codec, phase) for codec in CODECS for phase in PHASES]
    rows = []
    for (codec, phase), launches in zip(names, calls, strict=True):
        needed = TRAFFIC[codec] * numel
        if phase == "decode_sum":
            needed = 4 * numel + RANKS * facts["payload_nbytes"][codec]
        for kernel in [*dict.fromkeys(launch["kernel"] for launch in launches), "all"]:
            of_it = [launch for launch in launches if kernel in ("all", launch["kernel"])]
            keys = ("seconds", "read_nbytes", "written_nbytes")
            sums = {key: sum(launch[key] for launch in of_it) for key in keys}
            moved = sums["read_nbytes"] + sums["written_nbytes"]
            row = {"codec": codec, "phase": phase, "kernel": kernel, "launches": len(of_it)}
            row |= sums | {"share_of_copy": moved / sums["seconds"] / bandwidth}
            if kernel == "all":
                row["needed_nbytes"] = needed
            rows.append(row)
    return rows


def report(rows: Sequence[dict[str, Any]], numel: int) -> None:
    """Print the table."""
    for row in rows:
        moved = (row["read_nbytes"] + row["written_nbytes"]) / numel
        needed = row["needed_nbytes"] / numel if "needed_nbytes" in row else None
        print(
            f"{row['codec']:9} {row['phase']:10} {row['kernel']:24} {row['launches']:3} launches "
            f"{1e6 * row['seconds']:8.1f} us {moved:6.2f} bytes/element, "
            f"{row['share_of_copy']:4.2f} of the copy's bandwidth"
            + (f"; {needed:.2f} needed" if needed is not None else "")
        )


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot how long each kernel takes, codec by codec."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(1, 1)
    labels = []
    for codec in CODECS:
        for phase in PHASES:
            labels.append(f"{codec}, {phase}")
            begin = 0.0
            for row in rows:
                if (row["codec"], row["phase"]) == (codec, phase) and row["kernel"] != "all":
                    taken = 1e6 * row["seconds"]
                    axes.barh(len(labels) - 1, taken, left=begin, edgecolor="white")
                    text = f"{row['kernel']}\n{row['share_of_copy']:.2f}"
                    axes.text(begin + taken / 2, len(labels) - 1, text, size=5, ha="center")
                    begin += taken
    axes.set_yticks(range(len(labels)), labels)
    axes.set(xlabel="microseconds; below a kernel's name its share of a copy's bandwidth")
    axes.invert_yaxis()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Profile all codecs, then write JSON, a plot and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--numel", type=int, default=25_000_000, help="elements of the gradient")
    add("--out", type=Path, default=RESULTS, help="folder of the results (default: results)")
    add("--facts", type=Path, help=argparse.SUPPRESS)  # the process that ncu looks at
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no GPU is available to PyTorch: nothing to measure")
    if args.facts:
        run_calls(args.numel, args.facts)
        return
    if not shutil.which("ncu"):
        parser.error("ncu is not on the PATH: install NVIDIA Nsight Compute")
    facts, table = profiled(args.numel)
    rows = rows_of(facts, table, args.numel)
    args.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/gpu_profile.py", *sys.argv[1:]])
    found = facts | {"command": command, "numel": args.numel, "rows": rows}
    (args.out / "gpu_profile.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(rows, args.out / "gpu_profile.png")
    report(rows, args.numel)


if __name__ == "__main__":
    main()
