"""Argument types that several commands share."""

from __future__ import annotations

import argparse
import ast
import math
import os
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import NamedTuple, get_args

from horovod_fftcomp.recipes import get_recipe, get_scheme
from horovod_fftcomp.schemes.options import kinds_of

_PICTURES = (".png", ".svg", ".pdf")
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_FACTORS = {"k": 10**3, "M": 10**6, "G": 10**9}


class RecipeChoice(NamedTuple):
    """A recipe on the command line: its text, its name and the given options."""

    label: str
    name: str
    options: Mapping[str, object]


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    return _whole(text, 1)


def seed(text: str) -> int:
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


def node_range(text: str) -> range:
    """Return a range of numbers of ranks, written ``2..1024``."""
    first, dots, last = text.partition("..")
    if dots and first.isdecimal() and last.isdecimal() and 2 <= int(first) <= int(last) <= 1 << 20:
        return range(int(first), int(last) + 1)
    raise argparse.ArgumentTypeError(f"{text!r} is not a range of ranks; write 2..1024")


def numels(text: str) -> list[int]:
    """Return numbers of elements, separated by commas: ``25000000``, ``25M`` or ``1e6``."""
    return [_numel(part.strip()) for part in text.split(",")]


def _numel(text: str) -> int:
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
    """Return recipes, separated by commas: ``fft``, ``topk(density=0.01,bits=8)``."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise _not_a_recipe(text) from None
    return [_recipe_choice(part) for part in (tree.elts if isinstance(tree, ast.Tuple) else [tree])]


def _recipe_choice(node: ast.expr) -> RecipeChoice:
    name, keywords = node, []
    if isinstance(node, ast.Call) and not node.args:
        name, keywords = node.func, node.keywords
    if not isinstance(name, ast.Name):
        raise _not_a_recipe(ast.unparse(node))
    options: dict[str, object] = {}
    for keyword in keywords:
        if keyword.arg is None or keyword.arg in options:
            raise _not_a_recipe(ast.unparse(node))
        options[keyword.arg] = _value(keyword.value, node)
    try:
        recipe = get_recipe(name.id)
        kinds = kinds_of(recipe.make)
        options = {o: _converted(value, kinds.get(o)) for o, value in options.items()}
        get_scheme(name.id, **options)
        options = recipe.checked(options)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    written = ", ".join(f"{option}={value}" for option, value in options.items())
    return RecipeChoice(f"{name.id}({written})" if written else name.id, name.id, options)


def _value(node: ast.expr, recipe: ast.expr) -> object:
    """Return the value of an option: a word, as in ``scope=model``, or a Python literal."""
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _not_a_recipe(ast.unparse(recipe)) from None


def _converted(value: object, kind: object) -> object:
    """Return ``value``, converted to a bool or None if the option takes one."""
    if kind is bool and not isinstance(value, float):
        return _BOOLS.get(str(value).lower(), value)
    if isinstance(value, str) and value.lower() == "none" and NoneType in get_args(kind):
        return None
    return value


def setting(text: str) -> RecipeChoice:
    """Return one recipe: ``fft``, ``fft:density=0.15,bits=8`` or ``fft(density=0.15,bits=8)``."""
    choices = settings(text)
    if len(choices) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is {len(choices)} recipes, expected one")
    return choices[0]


def settings(text: str) -> list[RecipeChoice]:
    """Return recipes, written ``none,fft:density=0.15,bits=8,auto`` or with options in brackets.

    A part with "=" and without ":" is a further option of the recipe before it.
    """
    if "(" in text or ":" not in text:
        return recipe_choices(text)
    written: list[str] = []
    for part in text.split(","):
        name, colon, option = part.partition(":")
        if colon and not (name and option):
            raise _not_a_recipe(text)
        if colon:
            written.append(f"{name}({option}")
        elif "=" in part and written:
            written[-1] += f",{part}"
        else:
            written.append(part)
    closed = [one + ")" * one.count("(") for one in written]
    return recipe_choices(",".join(closed))


def as_setting(choice: RecipeChoice) -> str:
    """Return a recipe in the form that ``setting`` reads and a shell needs no quotes for."""
    options = ",".join(f"{option}={value}" for option, value in choice.options.items())
    return f"{choice.name}:{options}" if options else choice.name


def _not_a_recipe(text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(
        f"{text!r} is not a recipe; write its name, with each option once, as in "
        "'topk(density=0.01,bits=8)', in quotation marks; a value is a number, true, false or a "
        "word, as in scope=model"
    )


def output_path(text: str) -> Path:
    """Return the path of a file to write; its folder has to exist."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: cannot write a file there; create the folder")
    return path


def picture_path(text: str) -> Path:
    """Return the path of a picture to write: .png, .svg or .pdf."""
    path = output_path(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PICTURES)}")
    return path
