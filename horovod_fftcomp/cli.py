"""The command line: thin; the table of recipes drives it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import horovod_fftcomp
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes import Tensor


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``horovod-fftcomp`` with ``arguments`` (default: those of the process)."""
    parser = argparse.ArgumentParser(
        prog="horovod-fftcomp",
        description="Gradient compression for data-parallel training on stock Horovod.",
    )
    parser.add_argument(
        "--version", action="version", version=f"horovod_fftcomp {horovod_fftcomp.__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    recipes = commands.add_parser("recipes", help="list the recipes, their options and ratios")
    recipes.add_argument(
        "-n",
        "--numel",
        type=_count,
        default=1_000_000,
        help="elements of the tensor that the ratio is computed for (default: %(default)s)",
    )
    recipes.set_defaults(run=_print_recipes)
    parsed = parser.parse_args(arguments)
    parsed.run(parsed)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _print_recipes(parsed: argparse.Namespace) -> None:
    table = Table(caption=f"Ratio: float32 bytes / bytes as sent, {parsed.numel:,} elements.")
    for column in ("recipe", "what is sent", "options = default", "collectives", "source"):
        table.add_column(column)
    table.add_column("ratio", justify="right")
    for name, recipe in RECIPES.items():
        scheme = get_scheme(name)
        options = ", ".join(f"{option}={default}" for option, default in recipe.options.items())
        ratio = 4 * parsed.numel / scheme.sent_nbytes(Tensor(name, (parsed.numel,)))
        table.add_row(
            name, recipe.summary, options, ", ".join(scheme.rounds), recipe.source, f"{ratio:.1f}"
        )
    Console().print(table)
