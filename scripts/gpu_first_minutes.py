"""The first minutes on a GPU: what runs, whether its bytes are the CPU's, how fast it is.

    bash scripts/gpu_first_minutes.sh                       # all steps, at most 540 s
    bash scripts/gpu_first_minutes.sh --budget 270          # the most valuable ones
    bash scripts/gpu_first_minutes.sh --train --budget 200  # trainings by several recipes
    bash scripts/gpu_first_minutes.sh --emulated            # without a GPU: few and small cases

Prints a line of JSON for each step as soon as it ends. Details go to the folder $OUT (or --out):
steps.jsonl, log.txt, and up to three more files. Every case runs in another process: one that
crashes or hangs is told, and the next case gets a new process. Needs PyTorch, CuPy, Numba and
pytest; no Horovod, no network, no installation of this package.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import gpu_processes as processes  # sets sys.path
import gpu_steps as steps

GOING_ON = ("machine", "compile")  # run always: the others need them


class Step(NamedTuple):
    """A step, how many seconds it gets at most, and with how many left it is not begun."""

    run: Callable[[processes.Minutes, float], processes.Found]
    most_s: float
    least_s: float = 12

    @property
    def name(self) -> str:
        """Name on the command line and in the output."""
        return self.run.__name__


# Groups run one after the other; the steps of a group at the same time.
PLAN = (
    (Step(steps.machine, 60),),
    (Step(steps.compile, 120),),
    (Step(steps.selftest, 90),),
    (
        Step(steps.contracts, 90),
        Step(steps.memcheck, 90, 30),
        Step(steps.racecheck, 90, 30),
        Step(steps.large, 90),
    ),
    (Step(steps.speed, 80),),
    (Step(steps.waits, 40), Step(steps.ddp, 80)),
    (Step(steps.pytest, 200, 100),),
    (Step(steps.ncu, 75, 40),),
)
TRAININGS = ((Step(steps.machine, 60),), (Step(steps.train, 600),))


def run_plan(
    plan: Sequence[Sequence[Step]], minutes: processes.Minutes, only: Sequence[str], budget_s: float
) -> None:
    """Run the steps of a plan, each as long as it may and the time lasts."""
    deadline = minutes.report.began + budget_s
    for group in plan:
        threads = []
        for step in group:
            if only and step.name not in (*only, *GOING_ON):
                continue
            left = deadline - time.monotonic()
            if step.name != "machine" and not minutes.has_device:
                minutes.report.step(step.name, None, skipped="no device")
            elif left < step.least_s:
                minutes.report.step(step.name, None, skipped=f"{left:.0f} s are left")
            else:
                until = time.monotonic() + min(step.most_s, left - 4)
                threads.append(threading.Thread(target=run_step, args=(step, minutes, until)))
                threads[-1].start()
        for thread in threads:
            thread.join()


def run_step(step: Step, minutes: processes.Minutes, until: float) -> None:
    """Run a step; an error of its own is a failure of it alone."""
    began = time.monotonic()
    try:
        ok, found = step.run(minutes, until)
    except BaseException as error:
        text = repr(error)[:300]
        trace = {"error": text, "trace": traceback.format_exc()}
        minutes.report.failure(step.name, "the step itself", trace)
        ok, found = False, {"error": text}
    minutes.report.step(step.name, ok, s=round(time.monotonic() - began, 1), **found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the plan; return 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=None, help="folder of the files (default: a temporary one)")
    add("--budget", type=float, help="seconds for all steps (default: 540, with --train 200)")
    add("--only", default="", help="names of steps, with commas; machine and compile always run")
    add("--train", action="store_true", help="trainings by several recipes, in place of the steps")
    add("--emulated", action="store_true", help="no GPU: the tests' emulator, few and small cases")
    add("--whole", action="store_true", help="with --emulated: all cases")
    args = parser.parse_args(argv)
    report = processes.Report(args.out or Path(tempfile.mkdtemp(prefix="gpu-first-minutes-")))
    minutes = processes.Minutes(
        report, processes.Pool(report, args.emulated), args.emulated, args.whole
    )
    plan, budget_s = (TRAININGS, 200) if args.train else (PLAN, 540)
    only = [name for name in args.only.split(",") if name]
    if unknown := {*only} - {step.name for group in plan for step in group}:
        parser.error(f"there is no step {', '.join(sorted(unknown))}")
    try:
        run_plan(plan, minutes, only, args.budget or budget_s)
        verdicts = dict(report.verdicts)
        ran = [ok for ok in verdicts.values() if ok is not None]
        seconds = round(time.monotonic() - report.began)
        report.step("all", all(ran) if ran else None, seconds=seconds, steps=verdicts)
    finally:
        minutes.close()
    return 0 if all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
