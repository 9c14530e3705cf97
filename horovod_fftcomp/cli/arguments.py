"""Argument types that several commands share."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import os
from decimal import Decimal
from pathlib import Path

from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.engine.recipe_text import RecipeChoice, parse_recipes

# How they are written, in the help of all commands.
COMPRESSION = "RECIPE[:OPTION=VALUE,...]"
COMPRESSIONS = "COMPRESSION[,COMPRESSION...]"
_PICTURES = (".png", ".svg", ".pdf")
_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9}


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    return _whole(text, 1)


def nodes(text: str) -> int | str:
    """Return "auto", or a whole number of at least 1."""
    return text if text == "auto" else count(text)


def count_from_0(text: str) -> int:
    """Return a whole number of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got {text}")
    return number


def positive(text: str) -> float:
    """Return a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number


def node_range(text: str) -> list[int]:
    """Return numbers of ranks, written ``2..1024``: the first, its doubles, and the last."""
    first, dots, last = text.partition("..")
    if dots and first.isdecimal() and last.isdecimal() and 2 <= int(first) <= int(last) <= 1 << 20:
        doubles = (int(first) << n for n in range(20))
        return [*itertools.takewhile(lambda ranks: ranks < int(last), doubles), int(last)]
    raise argparse.ArgumentTypeError(f"{text!r} is not a range of ranks; write 2..1024")


def numels(text: str) -> list[int]:
    """Return numbers of elements, separated by commas: ``25000000``, ``25M`` or ``1e6``."""
    return [numel(part.strip()) for part in text.split(",")]


def numel(text: str) -> int:
    """Return a number of elements."""
    factor = _FACTORS.get(text[-1:], 1)
    try:
        number = Decimal(text[:-1] if factor > 1 else text) * factor  # exact, so that 2.3M is whole
        if 1 <= number < 2**48 and number == int(number):
            return int(number)
    except ArithmeticError:
        pass
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a number of elements; write 25000000, 25M or 25e6"
    )


def recipe_choices(text: str) -> list[RecipeChoice]:
    """Return compressions, separated by commas; see ``parse_recipes``."""
    try:
        choices = parse_recipes(text)
        for choice in choices:
            make_policy(choice.name, **choice.options)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return choices


def recipe_choice(text: str) -> RecipeChoice:
    """Return one compression."""
    choices = recipe_choices(text)
    if len(choices) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is {len(choices)} compressions, expected one")
    return choices[0]


def output_path(text: str) -> Path:
    """Return the path of a file to write; its folder has to exist."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: cannot write a file there; create the folder")
    return path


def picture_path(text: str) -> Path:
    """Return the path of a picture to write: .png, .svg or .pdf; that needs matplotlib."""
    path = output_path(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install matplotlib")
    return path
