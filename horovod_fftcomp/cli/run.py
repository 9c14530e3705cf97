"""``horovod-fftcomp run``: run an unmodified training script with compression."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from horovod_fftcomp.cli.arguments import (
    RecipeChoice,
    as_setting,
    count,
    output_path,
    setting,
    settings,
)
from horovod_fftcomp.cli.console import in_ms, make_console, make_table
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.tools.run import launcher
from horovod_fftcomp.tools.run.import_hook import Wrapping
from horovod_fftcomp.tools.run.step_report import StepReport

_EXAMPLES = """\
examples:
  horovodrun -np 2 horovod-fftcomp run --compression fft:density=0.15 train.py --epochs 3
  horovod-fftcomp run --compare none,fft,auto --steps 100 -np 2 train.py
  horovod-fftcomp run --compare none,topk:bits=8 --launcher "horovodrun -H a:1,b:1" train.py
  torchrun --nproc-per-node 2 -m horovod_fftcomp run --compression fft train.py

docs/run.md lists what a script may contain.
"""
_NOTHING = (
    "nothing was exchanged through horovod_fftcomp: the script took no step with "
    "hvd.DistributedOptimizer, hvd.DistributedGradientTape or DDP on several ranks"
)
_START = " (start it as horovodrun -np 2 horovod-fftcomp run ...)"
# Errors of a rank that follow from the failure of another one.
_CONSEQUENCES = ("HorovodInternalError", "Horovod has been shut down", "SIGTERM")
_MOST_SHOWN = 500  # characters of an exception; its traceback has the rest
_DIFFER = "PARAMETERS DIFFER"
_TIMES = ("encode", "wait", "decode")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "run",
        help="run an unmodified training script with compression",
        description="Run an unmodified script of Horovod (PyTorch, TensorFlow, Keras) or\n"
        "of PyTorch's DDP with compression, and report time and bytes of a step at the end.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--compression",
        type=setting,
        metavar="RECIPE[:OPTION=VALUE,...]",
        help="recipe for the script's optimizers and tapes",
    )
    which.add_argument(
        "--compare",
        type=settings,
        metavar="RECIPE,RECIPE",
        help="run one job for each recipe, one after another, and print a table",
    )
    add("--steps", type=count, metavar="N", help="end the script after N steps")
    add("--warmup-steps", type=count, metavar="N", help="begin with N dense steps")
    add("--ranks-per-node", type=count, metavar="N", help="compress between nodes of N ranks only")
    add("--record", type=Path, metavar="FOLDER", help="record gradients, for bench and advise")
    add(
        "--record-every",
        type=count,
        default=50,
        metavar="N",
        help="record every N-th step (default: %(default)s)",
    )
    add("--live-view", type=Path, metavar="FILE", help="append JSON lines to FILE, every 50th step")
    _add_jobs(parser)
    add("script", help="the training script")
    add("script_arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run, fail=parser.error)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments on jobs."""
    add = parser.add_argument
    add("-np", type=count, metavar="N", help="ranks of each job of --compare (default: 2)")
    add(
        "--launcher",
        type=shlex.split,
        metavar="COMMAND",
        help="command that starts the jobs of --compare: one that takes -np N, or torchrun "
        "(default: horovodrun)",
    )
    add("--json", type=output_path, metavar="FILE", help="write the results of --compare to FILE")
    add("--report-json", action="store_true", help="report as a line of JSON, on every rank")


def run(parsed: argparse.Namespace) -> None:
    """Run the script in this process, or in jobs with ``--compare``."""
    if not Path(parsed.script).is_file():
        parsed.fail(f"there is no script {parsed.script!r}")
    if not parsed.compare:
        for option in ("np", "launcher", "json"):
            if getattr(parsed, option) is not None:
                parsed.fail(
                    f"-np, --launcher and --json belong to --compare; to run one recipe: "
                    f"horovodrun -np 2 horovod-fftcomp run --compression ... {parsed.script}"
                )
        _run_script(parsed)
    elif launcher.launched_rank() is not None:
        parsed.fail("--compare starts its own jobs: run it without horovodrun and give -np N")
    elif parsed.report_json:
        parsed.fail("--report-json belongs to --compression: with --compare give --json FILE")
    elif parsed.record or parsed.live_view:
        parsed.fail("--record and --live-view belong to --compression: jobs would share files")
    else:
        _compare(parsed)


def _run_script(parsed: argparse.Namespace) -> None:
    """Run the script as Python would, and report at its end, also after an error."""
    choice: RecipeChoice = parsed.compression
    given = {
        "warmup_steps": parsed.warmup_steps,
        "ranks_per_node": parsed.ranks_per_node,
        "record": parsed.record,
        "record_every": parsed.record_every if parsed.record else None,
        "live_view": parsed.live_view,
    }
    options = {name: value for name, value in given.items() if value is not None}
    if parsed.ranks_per_node:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # read when the script calls hvd.init
    final: dict[str, Any] = {}  # found after the last step, if --steps gives one

    def end() -> None:
        final.update(_found(steps))
        steps.timed.end_training(StepsDone)

    steps = StepReport(parsed.steps, end)
    Wrapping(choice.name, {**choice.options, **options}, steps.watch).install()
    sys.argv = [parsed.script, *parsed.script_arguments]
    sys.path[0] = str(Path(parsed.script).resolve().parent)
    failure = ""
    with launcher.last_words(lambda: _report(parsed, steps, final, "SIGTERM")):
        try:
            runpy.run_path(parsed.script, run_name="__main__")
        except BaseException as error:
            failure = _described(error)
            raise
        finally:
            steps.disarm()
            _report(parsed, steps, final, failure)


def _described(error: BaseException) -> str:
    """Return the error that ended the script in one line; an empty string if there was none."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})" if error.code else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_MOST_SHOWN].removesuffix(": ")


class StepsDone(SystemExit):
    """Ends a script with status 0 after the steps that ``--steps`` gives; its clean-up runs."""


def _found(steps: StepReport) -> dict[str, Any]:
    """Return the figures of the steps so far, or the error that kept them from being read."""
    try:
        return steps.values()
    except Exception as error:  # as after an error within a step
        return {"steps": 0, "error": str(error) or repr(error)}


def _report(
    parsed: argparse.Namespace, steps: StepReport, final: Mapping[str, Any], failure: str
) -> None:
    """Print time and bytes of the steps: JSON on every rank, or text on the first one."""
    found = dict(final) if final else _found(steps)
    if failure:
        found["failure"] = failure
    rank = launcher.launched_rank() or 0
    if rank != 0:
        found.pop("tensors", None)  # the same on all ranks, and long
    if parsed.report_json:
        launched = {"rank": rank, "cores": threads.get_own_cores()}
        launcher.report({**launched, "recipe": as_setting(parsed.compression), **found})
    elif rank == 0:
        sys.stdout.flush()
        print(_told(parsed.compression.label, found), file=sys.stderr, flush=True)


def _told(label: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"horovod-fftcomp run: {label}: no report: {found['error']}"
    if not found["steps"] and "failure" in found:
        nothing = _NOTHING.partition(":")[0]
        return f"horovod-fftcomp run: {label}: {nothing}: the script ended in {found['failure']}"
    if not found["steps"]:
        return f"horovod-fftcomp run: {label}: {_NOTHING}{_START}"
    sent, took = found["sent_nbytes"], {what: in_ms(found[f"{what}_s"]) for what in _TIMES}
    return (
        f"horovod-fftcomp run: {label}: {found['steps']} steps on {found['world_size']} ranks, "
        f"{in_ms(found['step_s'])} ms a step (median); {sent / 1e6:.3f} MB sent by a rank in a "
        f"step, {found['dense_nbytes'] / sent:.1f} times less than float32; "
        f"{', '.join(f'{what} {ms}' for what, ms in took.items())} ms"
    )


def _compare(parsed: argparse.Namespace) -> None:
    """Run a job for each recipe; exit with status 1 if one failed or its ranks differ."""
    n_ranks, rows, interrupted = parsed.np or 2, [], False
    try:
        for choice in parsed.compare:
            print(f"horovod-fftcomp run: {choice.label}", file=sys.stderr, flush=True)
            ended = launch(parsed, choice, n_ranks, _pass_on)
            told = {"trouble": trouble(ended, n_ranks), "status": ended.code}
            rows.append({"recipe": choice.label, **told, "ranks": ended.reports})
    except KeyboardInterrupt:
        interrupted = True
    if rows:
        _print_comparison(rows)
    if parsed.json:
        parsed.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if interrupted:
        print(f"{len(rows)} of {len(parsed.compare)} jobs have ended.", file=sys.stderr)
        raise KeyboardInterrupt
    if any(row["trouble"] for row in rows):
        raise SystemExit(1)


def _print_comparison(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table of the jobs, and below it their failures."""
    names = (
        "ms a step", "speed-up", "MB sent", "ratio", "encode ms", "wait ms", "decode ms", "ranks"
    )  # fmt: skip
    table = make_table("recipe", names)
    first_s = None
    for row in rows:
        wrong = row["trouble"]
        ranks = _DIFFER if wrong == _DIFFER else "failed" if wrong else "equal bits"
        if not row["ranks"] or not row["ranks"][0].get("steps"):
            table.add_row(row["recipe"], *["-"] * 7, ranks)
            continue
        found = row["ranks"][0]
        step_s, sent = found["step_s"], found["sent_nbytes"]
        first_s = first_s or step_s
        table.add_row(
            row["recipe"],
            in_ms(step_s),
            f"{first_s / step_s:.2f}" if first_s and step_s else "-",
            f"{sent / 1e6:.3f}",
            f"{found['dense_nbytes'] / sent:.1f}",
            *(in_ms(found[f"{what}_s"]) for what in _TIMES),
            ranks,
        )
    console = make_console()
    console.print(table)
    for row in rows:
        if row["trouble"]:
            console.print(Text(f"{row['recipe']}: {row['trouble']}."))
    console.print(Text("Of the first rank: median step time, means of bytes and other times."))


def _pass_on(line: str) -> None:
    print(line, end="", flush=True)


def launch(
    parsed: argparse.Namespace, choice: RecipeChoice, n_ranks: int, line: Callable[[str], None]
) -> launcher.Ended:
    """Run the script with one recipe in a job of its own; ``line`` gets each line of output."""
    own: Sequence[str] = [sys.executable, "-m", "horovod_fftcomp", "run", "--report-json"]
    given = {
        "--steps": parsed.steps,
        "--warmup-steps": parsed.warmup_steps,
        "--ranks-per-node": parsed.ranks_per_node,
        "--record": parsed.record,
        "--record-every": parsed.record_every,
    }
    options = [part for key, value in given.items() if value for part in (key, str(value))]
    command = [*own, *options, "--compression", as_setting(choice), parsed.script]
    try:
        return launcher.launch(
            parsed.launcher or launcher.default_launcher(),
            n_ranks,
            [*command, *parsed.script_arguments],
            line,
        )
    except FileNotFoundError as error:
        parsed.fail(f"{error.filename!r} was not found; install Horovod, or give --launcher")
        raise


def trouble(ended: launcher.Ended, n_ranks: int) -> str:
    """Return the failures of a job in words; an empty string if there are none."""
    reports = ended.reports
    wrong = _failures(reports)
    if len(reports) < n_ranks:
        wrong.append(f"{n_ranks - len(reports)} of {n_ranks} ranks gave no report")
    elif not wrong and not all(found["steps"] for found in reports):
        wrong += sorted({found.get("error", _NOTHING) for found in reports})
    elif not wrong and len({found["digest"] for found in reports}) > 1:
        wrong.append(_DIFFER)
    if ended.code:
        wrong.append(f"exit status {ended.code}")
    return "; ".join(wrong)


def _failures(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return the errors that ended the script, with their ranks.

    Errors that follow from another rank's failure are left out unless there are no others.
    """
    ranks: dict[str, list[str]] = {}
    for found in reports:
        if "failure" in found:
            ranks.setdefault(found["failure"], []).append(str(found["rank"]))
    causes = [text for text in ranks if not any(mark in text for mark in _CONSEQUENCES)]
    return [
        f"rank{'s' if len(ranks[text]) > 1 else ''} {', '.join(ranks[text])}: {text}"
        for text in causes or ranks
    ]
