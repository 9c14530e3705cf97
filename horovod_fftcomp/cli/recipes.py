"""``horovod-fftcomp recipes``: the table of recipes, their options and ratios."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from horovod_fftcomp.cli.arguments import count
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes import Tensor


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser("recipes", help="list the recipes, their options and ratios")
    parser.add_argument(
        "-n",
        "--numel",
        type=count,
        default=1_000_000,
        help="elements of the tensor that the ratio is computed for (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(
        caption=f"Ratio: float32 bytes / bytes as sent, {parsed.numel:,} elements; forecasts for "
        "hard_threshold, strom, adacomp and wangni, where the values decide."
    )
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
