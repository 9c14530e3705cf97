"""Command line ``horovod-fftcomp``: one module per command, with its arguments and its code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console

from horovod_fftcomp.cli import advise, bench, check, recipes, run
from horovod_fftcomp.cli.console import in_lines
from horovod_fftcomp.tools.run.launcher import launched_rank, tell_torchrun
from horovod_fftcomp.wire.version import __version__

COMMANDS = (recipes, bench, advise, run, check)


class _Parser(argparse.ArgumentParser):
    """Parser that prints usage and help on the first rank of a job alone, and errors on all."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if not launched_rank():
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Print the error, on other ranks than the first one in a line; exit with status 2."""
        if rank := launched_rank():
            print(f"{self.prog} on rank {rank}: error: {message}", file=sys.stderr, flush=True)
        tell_torchrun(self.prog, 2, message)
        console, begin = Console(stderr=True), f"{self.prog}: error: "
        if console.is_terminal:
            message = in_lines(begin + message, console.width).removeprefix(begin)
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``horovod-fftcomp`` with ``arguments`` (default: those of the process)."""
    parser = _Parser(
        prog="horovod-fftcomp", description="Gradient compression for data-parallel training."
    )
    parser.add_argument("--version", action="version", version=f"horovod_fftcomp {__version__}")
    parser.set_defaults(run=lambda _: parser.print_help())
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parsed = parser.parse_args(arguments)
    parsed.arguments = arguments
    try:
        parsed.run(parsed)
    except KeyboardInterrupt:
        if getattr(parsed, "compression", None):
            raise  # as every error of the script
        print("horovod-fftcomp: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
