"""``horovod-fftcomp recipes``: list the recipes with options and ratios, or describe one."""

from __future__ import annotations

import argparse
import math

from horovod_fftcomp.adapter.factories import documentation, keywords_of
from horovod_fftcomp.cli.arguments import count
from horovod_fftcomp.cli.console import Table, make_console
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes import Tensor

_RANKS = (8, 64)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser("recipes", help="list the recipes, their options and ratios")
    parser.add_argument("name", nargs="?", choices=RECIPES, metavar="NAME", help="describe one")
    told = "elements of the tensor whose ratios are listed (default: %(default)s)"
    parser.add_argument("-n", "--numel", type=count, default=1_000_000, help=told)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> None:
    """Print the table, or the help of one recipe's factory."""
    if parsed.name:
        print(documentation(parsed.name, keywords_of(parsed.name)))
        return
    received = (f"MB at {ranks}" for ranks in _RANKS)
    table = Table("recipe", ("ratio", *received, "what is sent, options, collectives; source"))
    for name, recipe in RECIPES.items():
        rounds = ", ".join(get_scheme(name).rounds)
        options = ", ".join(f"{option}={default}" for option, default in recipe.own_options.items())
        lines = filter(None, (recipe.summary, options, f"{rounds}; {recipe.source}"))
        megabytes = (1e-6 * received_nbytes(name, parsed.numel, n) for n in _RANKS)
        received = (f"{float(f'{number:.3g}'):,g}" for number in megabytes)
        table.add_row(name, f"{ratio(name, parsed.numel):.1f}", *received, "\n".join(lines))
    console = make_console()
    console.print(table)
    *others, last = (name for name, recipe in RECIPES.items() if not recipe.has_fixed_size)
    shape = " x ".join(f"{length:,}" for length in near_square(parsed.numel))
    console.print(
        f"Options with their defaults; `horovod-fftcomp recipes NAME` describes them. Ratio: "
        f"float32 bytes / sent bytes for {parsed.numel:,} elements in a tensor of {shape}, the "
        "matrix of that size that is nearest to a square. MB at 8, at 64: megabytes of it that "
        f"a rank receives in a step on so many ranks. Estimates for {', '.join(others)} and "
        f"{last}, whose sizes depend on the values."
    )


def ratio(name: str, numel: int) -> float:
    """Return the compression ratio of a recipe with default options, for a matrix."""
    return 4 * numel / get_scheme(name).sent_nbytes(Tensor(name, near_square(numel)))


def received_nbytes(name: str, numel: int, ranks: int) -> float:
    """Return the bytes of a matrix that a rank receives from others, with default options."""
    tensor = Tensor(name, near_square(numel))
    return make_policy(name).decided([tensor], ranks).after_warmup.received_nbytes(tensor, ranks)


def near_square(numel: int) -> tuple[int, ...]:
    """Return the matrix shape of ``numel`` elements nearest to a square; a vector's if prime."""
    rows = next((rows for rows in range(math.isqrt(numel), 1, -1) if numel % rows == 0), 1)
    return (rows, numel // rows) if rows > 1 else (numel,)
