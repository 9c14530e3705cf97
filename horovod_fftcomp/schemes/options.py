"""Validation of keyword arguments: names and types of recipe options and of settings."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from horovod_fftcomp.errors import is_integer, is_number

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    os.PathLike: "a path",
    Sequence: "a list",
    NoneType: "None",
}


_GONE = {
    "shadow_check": "every new compressor compares a GPU's results with the CPU's once, in its "
    "self-test, and steps are not compared any more. Leave it out"
}


def kinds_of(annotated: Any) -> dict[str, Any]:
    """Return the annotated types of a function's parameters or a class's fields, by name."""
    return get_type_hints(annotated.func if isinstance(annotated, partial) else annotated)


def checked(name: str, value: Any, kind: Any, default: object = None) -> Any:
    """Return ``value`` as an object of the annotated type ``kind``.

    Numbers may be NumPy's, but not bools, and are returned as built-in numbers. Raises TypeError
    for a value of the wrong type, ValueError for a number that is not finite and for a string that
    is not among those of a ``Literal``. ``default`` is the example in messages.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if Any in kinds or (value is None and NoneType in kinds):
        return value
    if float in kinds and is_number(value):
        return _finite(name, value)
    if int in kinds and is_integer(value):
        return int(value)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if choices and isinstance(value, str) and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    types = [get_origin(one) or one for one in kinds if one not in (int, float)]
    if any(_is_a(value, str if one is Literal else one) for one in types):
        return value
    wanted = f"one of {', '.join(choices)}" if choices else _in_words(kinds)
    given = "None" if value is None else f"{value!r} ({type(value).__name__})"
    example = "" if default in (None, ()) else f"; for example {name}={default!r}"
    raise TypeError(f"{name} must be {wanted}, got {given}{example}")


def check_names(
    recipe: str, names: Iterable[str], options: Iterable[str], settings: Iterable[str] = ()
) -> None:
    """Raise TypeError for a name that is neither an option of the recipe nor a setting."""
    options, settings = list(options), list(settings)
    unknown = sorted(set(names).difference(options, settings))
    if not unknown:
        return
    for gone in _GONE.keys() & unknown:
        raise TypeError(f"{gone} was taken out: {_GONE[gone]}")
    close = difflib.get_close_matches(unknown[0], [*options, *settings], 1, 0.7)
    meant = f" (did you mean {close[0]}?)" if close else ""
    others = f"; and the settings {', '.join(settings)}" if settings else ""
    raise TypeError(
        f"recipe {recipe!r} has no option {', '.join(unknown)}{meant}; it has: "
        f"{', '.join(options) or 'none'}{others}"
    )


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and (kind is not Sequence or not isinstance(value, str))


def _in_words(kinds: Iterable[Any]) -> str:
    types = [get_origin(one) or one for one in kinds]
    if os.PathLike in types:
        types.remove(str)
    return " or ".join(_WORDS.get(one) or f"a {one.__name__}" for one in types)
