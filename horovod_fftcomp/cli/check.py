"""``horovod-fftcomp check``: check the installation and, under a launcher, the job."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from rich.text import Text

from horovod_fftcomp.cli.arguments import count
from horovod_fftcomp.cli.console import Table, make_console
from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.advise import cost_model
from horovod_fftcomp.tools.check import Finding, Level, frameworks, kernels, packages, told
from horovod_fftcomp.tools.run.launcher import is_torchrun, launched_rank, tell_torchrun

CHECKS = (packages, kernels, frameworks)  # modules, in the order of the report
_STYLES = {Level.OK: "green", Level.ABSENT: "dim", Level.WARNING: "yellow", Level.FAIL: "bold red"}
_TRY_JOB = (
    "horovodrun -np 2 horovod-fftcomp check, or "
    "torchrun --nproc-per-node 2 -m horovod_fftcomp check"
)
_BUSY = "see what keeps this machine or its file system busy, or raise --timeout"
_GRACE_S = 10  # for the watchdog to print the report


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "check",
        help="check this installation and, under a launcher, its job",
        description=f"Check this installation. To check a job as well: {_TRY_JOB}",
    )
    told = "time limit of each check in seconds (default: %(default)s)"
    parser.add_argument("--timeout", type=count, default=120, metavar="S", help=told)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    """Check, print the report and exit with status 1 if something failed."""
    report = Report(launched_rank())
    watchdog = Watchdog(parsed.timeout, report)
    watchdog.expect("the first check", _BUSY)
    for finding in itertools.chain.from_iterable(each.findings() for each in CHECKS):
        report.add(finding)
        watchdog.expect(f"the check after {finding.topic!r}", _BUSY)
    finish = _check_job(report, watchdog, parsed.timeout)
    report.print()
    if finish is not None:
        watchdog.expect("the end of the other ranks", "look at their output")
        finish()
    watchdog.stop()
    if report.failed:
        raise SystemExit(1)


def _check_job(report: Report, watchdog: Watchdog, timeout_s: int) -> Callable[[], None] | None:
    """Add the findings of all ranks together; return a function that ends the job, if it began.

    Without a launcher there is no job: MPI_Init may then end the process.
    """
    if report.rank is None:
        report.add(Finding("job", Level.ABSENT, "not tried without a launcher", _TRY_JOB))
        return None
    no_horovod = importlib.util.find_spec("horovod") is None
    is_ddp = is_torchrun() or ("SLURM_PROCID" in os.environ and no_horovod)
    if not is_ddp and not report.has_working_horovod:
        found = "this rank cannot take part without horovod.torch"
        report.add(Finding("job", Level.FAIL, found, "fix the failure of horovod.torch first"))
        return None
    try:
        from horovod_fftcomp.adapter.torch_tensors import job_check

        launched = launched_adapter()
        watchdog.expect(launched.CONNECTS, job_check.CONNECT_REMEDY)
        job = launched.connect(timeout_s)
        findings = job_check.findings(
            job, _compared(), watchdog.expect, lambda: bool(report.failed), cost_model.speed
        )
        for topic, level, found, remedy in findings:
            report.add(Finding(topic, Level(level), found, remedy))
        return job.finish
    except Exception as error:
        # The other ranks may wait in a collective that this one will not reach: stop here.
        report.add(Finding("job", Level.FAIL, told(error), "look at all ranks' output"))
        return None


def launched_adapter() -> Any:
    """Return the module ``check`` of the adapter for the library that the launcher's ranks use."""
    is_ddp = is_torchrun() or importlib.util.find_spec("horovod") is None
    adapter = "torch_distributed" if is_ddp else "torch"
    return importlib.import_module(f"horovod_fftcomp.{adapter}.check")


def _compared() -> dict[str, tuple[dict[str, str], str, str]]:
    """Return facts that, if they differ, may make ranks compute different bits."""
    install = "install the same versions on all machines"
    replace = "use machines of one kind, or keep replica_check on: inverse transforms may differ"
    return {
        "versions": (environment.versions(), "FAIL", install),
        "processors": ({"CPU": environment.cpu_model()}, "warning", replace),
    }


class Report:
    """The findings of one rank: all are printed on the first rank, failures on the others."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self._findings: list[Finding] = []

    def add(self, finding: Finding) -> None:
        """Append a line."""
        self._findings.append(finding)

    @property
    def failed(self) -> list[Finding]:
        """Checks that have failed."""
        return [finding for finding in self._findings if finding.level is Level.FAIL]

    @property
    def has_working_horovod(self) -> bool:
        """Whether ``horovod.torch`` could be imported."""
        return Finding("horovod.torch", Level.OK, "")[:2] in {f[:2] for f in self._findings}

    def print(self) -> None:
        """Print the report; torchrun's own then names what has failed."""
        if failed := self.failed:
            topics = ", ".join(finding.topic for finding in failed)
            tell_torchrun("horovod-fftcomp check", 1, f"failed: {topics}; see the table above")
        if self.rank:
            for topic, _, found, remedy in failed:
                print(f"rank {self.rank}: {topic}: {found}. {remedy}", file=sys.stderr)
            return
        table = Table("check", ("", "found"))
        for topic, level, found, remedy in self._findings:
            text = f"{found}\n-> {remedy}" if remedy else found
            table.add_row(topic, Text(level.value, _STYLES[level]), text)
        console = make_console()
        console.print(table)
        n_warnings = sum(finding.level is Level.WARNING for finding in self._findings)
        console.print(f"{len(failed)} failed, {n_warnings} warnings.")


class Watchdog:
    """Time limit of a check; when it expires, the report is printed and the process ends."""

    def __init__(self, limit_s: float, report: Report) -> None:
        self._limit_s = limit_s
        self._report = report
        self.timer: threading.Timer | None = None

    def expect(self, what: str, remedy: str) -> None:
        """Start the time limit of ``what``; ``remedy``: what to do if it is exceeded."""
        self.stop()
        self.timer = threading.Timer(self._limit_s, self.end_process, (what, remedy))
        self.timer.daemon = True
        self.timer.start()
        # A library may hang with the interpreter's lock held, where no Python code runs.
        faulthandler.dump_traceback_later(
            self._limit_s + _GRACE_S, exit=True, file=sys.__stderr__ or 2
        )

    def stop(self) -> None:
        """Stop the time limit."""
        faulthandler.cancel_dump_traceback_later()
        if self.timer is not None:
            self.timer.cancel()

    def end_process(self, what: str, remedy: str) -> None:
        """Report what was waited for too long, and end the process."""
        found = f"waited {self._limit_s} s for {what}"
        self._report.add(Finding("time limit", Level.FAIL, found, remedy))
        self._report.print()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
