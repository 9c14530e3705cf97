"""``horovod-fftcomp run``: run an unmodified training script with compression."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from horovod_fftcomp.cli.arguments import (
    COMPRESSION,
    COMPRESSIONS,
    RecipeChoice,
    count,
    count_from_0,
    nodes,
    output_path,
    recipe_choice,
    recipe_choices,
)
from horovod_fftcomp.cli.console import in_ms, write_json
from horovod_fftcomp.cli.run_report import DIFFER, TIMES, print_comparison
from horovod_fftcomp.errors import list_ranks
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.run import children, launcher
from horovod_fftcomp.tools.run.import_hook import install
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
_STARTS = (
    "horovodrun -np 2 horovod-fftcomp run",
    "torchrun --nproc-per-node 2 -m horovod_fftcomp run",
)
# Errors of a rank that follow from the failure of another one.
_CONSEQUENCES = ("HorovodInternalError", "Horovod has been shut down", "SIGTERM")
_MOST_SHOWN = 500  # characters of an exception; its traceback has the rest
_VARIABLE = "HOROVOD_FFTCOMP_COMPRESSION"
_NO_METRIC = "no line of its output matches --metric"
# Of compressors, for all compressions; the same as arguments of the command.
_SETTINGS = ("warmup_steps", "ranks_per_node", "record", "record_every", "live_view")
_OF_JOBS = ("steps", *_SETTINGS[:4])
_OF_COMPARE = ("np", "launcher", "json", "metric", "repeat", "without_none")
_ROUNDS = 3  # the fewest whose differences one can tell from noise
_LAST_LINES = 10  # shown of a job without the metric


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
    which = parser.add_mutually_exclusive_group()
    told = f"compression for the script's optimizers and tapes (default: that of {_VARIABLE})"
    which.add_argument("--compression", type=recipe_choice, metavar=COMPRESSION, help=told)
    told = "run one job for each, in rounds, and print a table"
    which.add_argument("--compare", type=recipe_choices, metavar=COMPRESSIONS, help=told)
    add("--steps", type=count, metavar="N", help="end the script after N steps")
    add("--warmup-steps", type=count_from_0, metavar="N", help="begin with N dense steps")
    add("--ranks-per-node", type=nodes, metavar="N", help="compress between nodes of N, or auto")
    add("--record", type=Path, metavar="FOLDER", help="record gradients, for bench and advise")
    add("--record-every", type=count, metavar="N", help="each N-th step (default: 50)")
    add("--live-view", type=Path, metavar="FILE", help="append JSON lines to FILE, every 50th step")
    _add_jobs(parser)
    add("script", help="the training script")
    add("script_arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=run, fail=parser.error)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments on jobs."""
    add = parser.add_argument
    add("-np", type=count, metavar="N", help="ranks of each job of --compare (default: 2)")
    told = "starts the jobs of --compare: torchrun, or a command that takes -np N"
    add("--launcher", type=shlex.split, metavar="COMMAND", help=f"{told} (default: horovodrun)")
    add("--json", type=output_path, metavar="FILE", help="write the results of --compare to FILE")
    told = r"show the number that REGEX finds last in a job's output, as 'accuracy (\S+)'"
    add("--metric", type=_pattern, metavar="REGEX", help=told)
    add("--repeat", type=count, metavar="N", help="rounds of --compare (default: 3)")
    add("--without-none", action="store_true", help="do not add none to --compare")
    add("--report-json", action="store_true", help="report as a line of JSON, on every rank")


def _pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if pattern.groups != 1:
        raise argparse.ArgumentTypeError(
            rf"{text!r} needs one pair of brackets around the number, as in 'accuracy (\S+)'"
        )
    return pattern


def run(parsed: argparse.Namespace) -> None:
    """Run the script in this process, or in jobs with ``--compare``."""
    if not Path(parsed.script).is_file():
        parsed.fail(f"there is no script {parsed.script!r}")
    if not (parsed.compare or parsed.compression):
        try:
            parsed.compression = recipe_choice(os.environ[_VARIABLE])
        except KeyError:
            parsed.fail(f"give --compression or --compare, or set {_VARIABLE}")
        except argparse.ArgumentTypeError as error:
            parsed.fail(f"{_VARIABLE}: {error}")
    if not parsed.compare:
        if any(getattr(parsed, option) for option in _OF_COMPARE):
            start = _STARTS[launcher.is_torchrun()]
            parsed.fail(
                "-np, --launcher, --json, --metric, --repeat and --without-none belong to "
                f"--compare; to run one compression: {start} --compression ... {parsed.script}"
            )
        _run_script(parsed)
    elif launcher.launched_rank() is not None:
        parsed.fail(
            "--compare starts its own jobs: run it without a launcher and give -np N; on several "
            'nodes --launcher "torchrun --nnodes 2 --node-rank 0 ..." too, see docs/run.md'
        )
    elif parsed.report_json:
        parsed.fail("--report-json belongs to --compression: with --compare give --json FILE")
    elif parsed.record or parsed.live_view:
        parsed.fail("--record and --live-view belong to --compression: jobs would share files")
    else:
        parsed.repeat = parsed.repeat or _ROUNDS
        if parsed.steps and parsed.warmup_steps is None:
            parsed.warmup_steps = 0  # by default so few steps would all be dense
        if not (parsed.without_none or any(choice.name == "none" for choice in parsed.compare)):
            parsed.compare.insert(0, recipe_choice("none"))
            added = "none is added, for differences and speed-ups; not with --without-none"
            print(f"horovod-fftcomp run: {added}", file=sys.stderr, flush=True)
        compare(parsed)


def _run_script(parsed: argparse.Namespace) -> None:
    """Run the script as Python would, and report at its end, also after an error."""
    choice: RecipeChoice = parsed.compression
    given = {name: getattr(parsed, name) for name in _SETTINGS}
    options = {name: value for name, value in given.items() if value is not None}
    options |= choice.options
    if options.get("ranks_per_node", 1) != 1:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # read when the script calls hvd.init
    reports = parsed.steps, parsed.report_json, children.new_path()
    settings = children.RunSettings(choice.label, choice.text, choice.name, options, *reports)
    sys.argv = [parsed.script, *parsed.script_arguments]
    sys.path[0] = str(Path(parsed.script).resolve().parent)
    report = ScriptReport(settings, is_script=True)
    install(choice.name, options, report.steps.watch)
    children.follow(settings)
    with launcher.last_words(lambda: report.write("SIGTERM")), report:
        runpy.run_path(parsed.script, run_name="__main__")


class ScriptReport:
    """Report on the steps of this process when the context ends: see ``StepReport``.

    ``is_script``: also if there were none, unless processes that the script has started have
    reported theirs.
    """

    def __init__(self, settings: children.RunSettings, is_script: bool = False) -> None:
        self._settings, self._is_script = settings, is_script
        self._final: dict[str, Any] = {}  # found after the last step, if --steps gives one
        self.steps = StepReport(settings.n_steps, self._end)

    def _end(self) -> None:
        self._final = self._found()
        self.steps.timed.end_training(StepsDone)

    def __enter__(self) -> ScriptReport:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.steps.disarm()
        found, reported = self._found(_described(error)), self._settings.reported
        is_wrong = not {"failure", "error"}.isdisjoint(found)
        if found["steps"] or (self._is_script and (is_wrong or not reported.exists())):
            self._print(found)
        if self._is_script:
            reported.unlink(missing_ok=True)
        elif found["steps"]:
            reported.touch()

    def write(self, failure: str) -> None:
        """Report what there is while the script ends by ``failure``."""
        self._print(self._found(failure))

    def _found(self, failure: str = "") -> dict[str, Any]:
        """Return the figures of the steps so far, or the error that kept them from being read."""
        try:
            found = {**(self._final or self.steps.values())}
        except Exception as error:  # as after an error within a step
            found = {"steps": 0, "error": str(error) or repr(error)}
        return found | ({"failure": failure} if failure else {})

    def _print(self, found: dict[str, Any]) -> None:
        """Print time and bytes of the steps: JSON on every rank, or text on the first one."""
        settings, rank = self._settings, launcher.launched_rank()
        rank = found.get("rank", 0) if rank is None else rank
        if rank != 0:
            for one in [found, *found.get("earlier", ())]:
                one.pop("tensors", None)  # the same on all ranks, and long
        if settings.as_json:
            launched = {"rank": rank, "cores": environment.n_cores() / threads.get_local_size()}
            launcher.report({**found, **launched, "recipe": settings.text})
        elif rank == 0:
            sys.stdout.flush()
            print(told_of(settings.label, found), file=sys.stderr, flush=True)


def _described(error: BaseException | None) -> str:
    """Return the error that ended the script in one line; an empty string if there was none."""
    if error is None or isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})" if error and error.code else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_MOST_SHOWN].removesuffix(": ")


class StepsDone(SystemExit):
    """Ends a script with status 0 after the steps that ``--steps`` gives; its clean-up runs."""


def told_of(label: str, found: dict[str, Any]) -> str:
    """Return what a job's report tells, as lines for the terminal."""
    begin = f"horovod-fftcomp run: {label}: "
    if "error" in found:
        return f"{begin}no report: {found['error']}"
    if not found["steps"] and "failure" in found:
        return f"{begin}{_NOTHING.partition(':')[0]}: the script ended in {found['failure']}"
    if not found["steps"]:
        return f"{begin}{_NOTHING} (start it as {_STARTS[launcher.is_torchrun()]} ...)"
    if "earlier" in found:
        return "\n".join(told_of(label, one) for one in [*found.pop("earlier"), found])
    sent, took = found["sent_nbytes"], {what: in_ms(found[f"{what}_s"]) for what in TIMES}
    size = f"{sent / 1e6:.3f} MB sent by a rank in a step"
    less = f"{found['dense_nbytes'] / max(1, sent):.1f} times less than float32"
    ranks = f"{found['world_size']} ranks"
    if found["steps"] <= found["warmup_steps"]:
        less = "all of them dense: --warmup-steps 0 compresses from the first step on"
    if found["world_size"] == 1:
        size, less, ranks = "nothing was sent", "to no other rank", "one rank"
    return (
        f"{begin}{found['steps']} steps on {ranks}, "
        f"{in_ms(found['step_s'])} ms a step (median); {size}, {less}; "
        f"{', '.join(f'{what} {ms}' for what, ms in took.items())} ms"
    )


def compare(parsed: argparse.Namespace) -> None:
    """Run rounds of a job of each compression; exit with status 1 if one fails or ranks differ.

    A machine is not as fast in one minute as in the next, which a round's jobs have in common.
    """
    rounds = range(parsed.repeat)
    jobs = [(place, choice, n) for n in rounds for place, choice in enumerate(parsed.compare)]
    rows: list[dict[str, Any]] = []
    interrupted, began = False, time.monotonic()
    try:
        for done, (place, choice, number) in enumerate(jobs):
            left_s = (time.monotonic() - began) / max(1, done) * (len(jobs) - done)
            left = f", about {left_s:.0f} s left" if done else ""
            told = f"horovod-fftcomp run: {choice.label} (job {done + 1} of {len(jobs)}{left})"
            print(told, file=sys.stderr, flush=True)
            rows.append(row_of(parsed, choice, number) | {"place": place})
            if _NO_METRIC in rows[-1]["trouble"]:
                break  # the other jobs would train in vain
    except KeyboardInterrupt:
        interrupted = True
    if parsed.json:
        write_json(parsed.json, rows)
    if rows:
        print_comparison(rows)
    if interrupted:
        print(f"{len(rows)} of {len(jobs)} jobs have ended.", file=sys.stderr)
        raise KeyboardInterrupt
    if any(row["trouble"] for row in rows):
        raise SystemExit(1)


def row_of(parsed: argparse.Namespace, choice: RecipeChoice, number: int) -> dict[str, Any]:
    """Run a job, passing on its output; return what is known of it as JSON values."""
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    found: list[str] = []

    def take(line: str) -> None:
        print(line, end="", flush=True)
        lines.append(line)
        if parsed.metric:
            found.extend(parsed.metric.findall(line))

    n_ranks = parsed.np or 2
    began_s, busy_s = time.monotonic(), environment.other_busy_s()
    ended = launch(parsed, choice, n_ranks, take, number)
    load = (environment.other_busy_s() - busy_s) / (time.monotonic() - began_s)
    row = {"recipe": choice.label, "repeat": number, "trouble": trouble(ended, n_ranks)}
    row |= {"load": max(0.0, load), "status": ended.code, "ranks": ended.reports}
    # Under torchrun each node has a command of its own, and the first rank prints on one of them.
    if parsed.metric and (found or not (ended.reports and ended.reports[0]["rank"])):
        try:
            row["metric"] = float(found[-1].rstrip("%,;.)"))
        except IndexError:
            early = f" before its {parsed.steps} --steps ended" * bool(parsed.steps)
            why = f"{_NO_METRIC} {parsed.metric.pattern!r}{early}; its last lines:"
            row["trouble"] = row["trouble"] or f"{why}\n{''.join(lines)}".rstrip()
        except ValueError:
            row["trouble"] = row["trouble"] or f"its metric {found[-1]!r} is not a number"
    return row


def launch(
    parsed: argparse.Namespace,
    choice: RecipeChoice,
    n_ranks: int,
    line: Callable[[str], None],
    number: int = 0,
) -> launcher.Ended:
    """Run the script with one compression in a job of its own; ``line`` gets each line of output.

    ``{repeat}`` in the script's arguments is replaced by ``number``.
    """
    command = [sys.executable, "-m", "horovod_fftcomp", "run", "--report-json"]
    for name in _OF_JOBS:
        if (value := getattr(parsed, name)) is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--compression", choice.text, parsed.script]
    arguments = [part.replace("{repeat}", str(number)) for part in parsed.script_arguments]
    try:
        return launcher.launch(
            parsed.launcher or launcher.default_launcher(), n_ranks, [*command, *arguments], line
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
    elif not wrong and len({str(_digests(found)) for found in reports}) > 1:
        wrong.append(DIFFER)
    if ended.code:
        wrong.append(f"exit status {ended.code}")
    return "; ".join(wrong)


def _digests(found: dict[str, Any]) -> list[str]:
    return [one["digest"] for one in [*found.get("earlier", ()), found]]


def _failures(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return the errors that ended the script, with their ranks.

    Errors that follow from another rank's failure are left out unless there are no others.
    """
    ranks: dict[str, list[int]] = {}
    for found in reports:
        if "failure" in found:
            ranks.setdefault(found["failure"], []).append(found["rank"])
    causes = [text for text in ranks if not any(mark in text for mark in _CONSEQUENCES)]
    return [f"{list_ranks(ranks[text])}: {text}" for text in causes or ranks]
