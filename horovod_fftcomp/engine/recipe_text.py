"""Recipes with options as text: ``fft:density=0.1,bits=8`` or ``fft(density=0.1, bits=8)``."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple, get_args

from horovod_fftcomp.recipes import get_recipe, get_scheme
from horovod_fftcomp.schemes.options import check_names, kinds_of

# Of a training, which may stand among a recipe's options; ``make_policy`` describes them.
SETTINGS = ("warmup_steps", "ranks_per_node", "dense_every", "dense_by")
_VALUE = r"[\w.+'\"-]+(?:\([^()]+\))?"  # that of dense_by may have options
_OPTION = rf"\s*[A-Za-z]\w*\s*=\s*{_VALUE}\s*"
_OPTIONS = rf"{_OPTION}(?:,{_OPTION})*"
_CHOICE = re.compile(rf"\s*([A-Za-z]\w*)\s*(?:\(\s*({_OPTIONS})?\)\s*|:({_OPTIONS}))?")
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class RecipeChoice(NamedTuple):
    """A recipe with options and ``SETTINGS``: its text as a call, its name and what was given."""

    label: str
    name: str
    options: Mapping[str, Any]

    @property
    def text(self) -> str:
        """The form that a shell needs no quotes for, but in ``dense_by``: ``fft:density=0.1``."""
        options = ",".join(f"{option}={value}" for option, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name


def parse_recipes(text: str) -> list[RecipeChoice]:
    """Return recipes with options, separated by commas: ``none,fft:density=0.1,bits=8,auto``.

    Options follow a colon or stand in brackets, ``SETTINGS`` among them. Raises ValueError for what
    is no recipe or out of range, TypeError for an unknown option or a value of the wrong type;
    values of ``SETTINGS`` are for ``make_policy`` to check.
    """
    if not isinstance(text, str):
        raise TypeError(f"a compression is a str such as 'fft:density=0.1', got {text!r}")
    choices, end = [], -1
    while end < len(text):
        found = _CHOICE.match(text, end + 1)
        if found is None or text[found.end() : found.end() + 1] not in ("", ","):
            raise _not_a_compression(text)
        choices.append(_choice(found[1], found[2] or found[3] or "", text))
        end = found.end()
    return choices


def parse_recipe(text: str) -> RecipeChoice:
    """Return one recipe with options; errors as of ``parse_recipes``."""
    choices = parse_recipes(text)
    if len(choices) != 1:
        raise ValueError(f"{text!r} is {len(choices)} compressions, expected one")
    return choices[0]


def _choice(name: str, written: str, text: str) -> RecipeChoice:
    recipe = get_recipe(name)
    kinds = kinds_of(recipe.make)
    options: dict[str, object] = {}
    for option, value in re.findall(rf"(\w+)\s*=\s*({_VALUE})", written):
        if option in options:
            raise _not_a_compression(text)
        options[option] = _value(value, kinds.get(option))
    check_names(name, options, recipe.options, SETTINGS)
    own = {option: value for option, value in options.items() if option not in SETTINGS}
    get_scheme(name, **own)
    options |= recipe.checked(own)
    shown = ", ".join(f"{option}={value}" for option, value in options.items())
    return RecipeChoice(f"{name}({shown})" if shown else name, name, options)


def _value(text: str, kind: object) -> object:
    """Return a number, a bool or None if the option takes one, or else a word."""
    if kind is bool and text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    if text.lower() == "none" and NoneType in get_args(kind):
        return None
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _not_a_compression(text: str) -> ValueError:
    return ValueError(
        f"{text!r} is not a compression; write a recipe's name, with each option once, as in "
        "topk:density=0.01,bits=8 or 'topk(density=0.01,bits=8)', in quotation marks; a value is a "
        "number, true, false or a word, as in scope=model"
    )
