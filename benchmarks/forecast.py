"""Compare what ``horovod-fftcomp advise`` forecasts with what the same jobs then take.

    python benchmarks/forecast.py --launcher "horovodrun -H a:1,b:1" --label "1 Gbit/s" train.py

The script is started by ``run --compare`` with each recipe, then by ``advise``, then once more by
``run --compare``: a machine is not as fast in one minute as in the next, so a step takes what it
took in the mean before and after the forecast. The last lines are the two side by side. ``--out``
appends the rows to a list in a JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from horovod_fftcomp.cli import main as command_line
from horovod_fftcomp.tools import environment

NEAR, BEST = 0.20, 0.10  # the error of a forecast, and what the pick may be slower than the best


def main() -> None:
    """Forecast, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launcher", default="horovodrun")
    parser.add_argument("-np", default="2", help="number of ranks (default: 2)")
    parser.add_argument("--label", default="", help="of the model and the link")
    parser.add_argument("--recipes", default="fp16,topk,fft,scalecom")
    parser.add_argument("--steps", default="25")
    parser.add_argument("--out", type=Path, default=Path("out/forecast.json"))
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        common = ["--json", str(path), "--launcher", args.launcher, "--steps", args.steps]
        common += ["-np", args.np]

        def found(*command: str) -> Any:
            command_line([*command, *common, *args.script])
            return json.loads(path.read_text())

        compare = "run", "--repeat", "1", "--compare", f"none,{args.recipes}"
        before = found(*compare)
        forecast = found("advise", "--compression", args.recipes)
        after = found(*compare)
        result = beside(forecast, before, after)
    result = {"label": args.label, "machine": environment.describe(), **result}
    print_table(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.out.read_text()) if args.out.exists() else []
    args.out.write_text(json.dumps([*results, result], indent=1) + "\n")
    print(f"wrote {args.out}")


def beside(forecast: dict, *measured: list[dict]) -> dict:
    """Return forecast and measured seconds of each recipe, and whether the advice was right."""
    rows = []
    for row, *runs in zip(forecast["recipes"], *measured, strict=True):
        runs_s = [run["ranks"][0]["step_s"] for run in runs]
        step_s = statistics.mean(runs_s)
        error = row["total_s"] / step_s - 1
        label = runs[0]["recipe"]
        rows.append({"recipe": label, "forecast_s": row["total_s"], "measured_s": step_s})
        rows[-1] |= {"error": error, "runs_s": runs_s}
    steps = {row["recipe"]: row["measured_s"] for row in rows}
    pick = forecast["advice"]["recipe"] or "none"
    others = [step_s for label, step_s in steps.items() if label != "none"]
    return {
        "rows": rows,
        "compute_s": forecast["compute_s"],
        "network": forecast["network"],
        "pick": pick,
        "pays": min(others) < 0.95 * steps["none"],
        "pick_over_best": steps[pick] / min(steps.values()),
    }


def print_table(result: dict) -> None:
    """Print a recipe a row, then the advice."""
    table = Table(title=result["label"])
    for column in ("recipe", "forecast ms", "measured ms", "before, after", "error %"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        times = [f"{1e3 * row[key]:.1f}" for key in ("forecast_s", "measured_s")]
        runs = ", ".join(f"{1e3 * run_s:.1f}" for run_s in row["runs_s"])
        table.add_row(row["recipe"], *times, runs, f"{100 * row['error']:+.0f}")
    Console().print(table)
    near = sum(abs(row["error"]) <= NEAR for row in result["rows"])
    said = "a gain" if result["pick"] != "none" else "no gain"
    right = (result["pick"] != "none") == result["pays"]
    over = result["pick_over_best"]
    print(
        f"{near} of {len(result['rows'])} within {NEAR:.0%}. {said} was forecast: "
        f"{'right' if right else 'WRONG'}. The pick, {result['pick']}, takes {over:.2f} of the best"
        f"{'' if over <= 1 + BEST else ': TOO MUCH'}."
    )


if __name__ == "__main__":
    main()
