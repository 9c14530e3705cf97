"""Stub of the factories, which ``make recipe`` writes. Editors and type checkers read it.

``adapter/signatures.pyi`` has one static method for each recipe, with what ``inspect.signature``
shows at run time, as a class that is generic in the model and in the compressor. By it the files
``compression.pyi`` of the adapters, written by hand, declare their ``Compression``. ``Compress``
has the same as overloads of a function that takes the name of a recipe, such as
``torch_distributed.compress``.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable
from pathlib import Path

import horovod_fftcomp
from horovod_fftcomp.adapter.factories import declaration, keywords_of, meaning
from horovod_fftcomp.engine.policy import NodeSize, Rule
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schedules import Schedule

PACKAGE = Path(horovod_fftcomp.__file__).parent
PATH = PACKAGE / "adapter" / "signatures.pyi"
HEAD = '''"""Signatures of the factories; ``make recipe`` writes this file."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Generic, Literal, Protocol, TypeVar, overload

from horovod_fftcomp import Recover
from horovod_fftcomp.schedules import Schedule

_Model = TypeVar("_Model")
_Compressor = TypeVar("_Compressor")
_Model_contra = TypeVar("_Model_contra", contravariant=True)
_Compressor_co = TypeVar("_Compressor_co", covariant=True)

class Compression(Generic[_Model, _Compressor]):
    """Factories of compressors, such as ``Compression.fft(model, density=0.15)``."""
'''
# A list of unlike rules in a variable is one of (object, object) to a type checker.
COMPRESS = '''class Compress(Protocol[_Model_contra, _Compressor_co]):
    """Function such as ``compress(model, "fft", density=0.15)``, by the name of a recipe.

    The last signature is for a name in a variable and for options in text, "fft:density=0.15": give
    all options of the recipe there, or as ``**options``, a dict.
    """
'''
DEFAULT = "dither"  # that of ``torch_distributed.compress``
SHOWN = {"Schedule": Schedule, "tuple[Any, Any]": Rule, 'int | Literal["auto"]': NodeSize}


def stub() -> str:
    """Return the stub of the factories, as the table of recipes has them today."""
    lines = [HEAD.rstrip()]
    for name in RECIPES:
        arguments = ["model: _Model = ...", "*", *map(_declared, keywords_of(name))]
        lines += _method("@staticmethod", name, arguments, "_Compressor", _described(name))
    arguments = ["text: str", "model: _Model = ...", "**options: Any"]
    what = ['Return a compressor, written as ``"fft:density=0.1"``.']
    lines += _method("@staticmethod", "parse", arguments, "_Compressor", what)
    lines += ["", *COMPRESS.rstrip().splitlines()]
    for name, recipe in RECIPES.items():
        default = f' = "{name}"' if name == DEFAULT else ""
        lines += _overload(f'Literal["{name}"]{default}', keywords_of(name), recipe.summary)
    settings = keywords_of("none")  # which has no options
    lines += _overload("str", settings, "``recipe`` is a name, or text with options")
    return "\n".join(lines) + "\n"


def _described(recipe: str) -> list[str]:
    """Return the docstring of a factory: its options; ``help`` also shows the settings."""
    row = RECIPES[recipe]
    lines = [f"Return a compressor: {row.summary}.", "", f"Source: {row.source}."]
    if row.options:
        lines += ["", "Parameters", "----------"]
    for name in row.options:
        text = " ".join(meaning(recipe, name).split())
        lines += [name, *textwrap.wrap(text, 88, initial_indent="    ", subsequent_indent="    ")]
    return lines


def _overload(recipe: str, keywords: Iterable[inspect.Parameter], what: str) -> list[str]:
    options = [_declared(each) for each in keywords if each.name != "process_set"]
    arguments = ["self", "model: _Model_contra", f"recipe: {recipe}", "*", "replicate: Any = None"]
    arguments += options
    return _method("@overload", "__call__", arguments, "_Compressor_co", [f"Compress: {what}."])


def _method(
    kind: str, name: str, arguments: Iterable[str], returned: str, docstring: list[str]
) -> list[str]:
    lines = ["", f"    {kind}", f"    def {name}(", *(f"        {each}," for each in arguments)]
    first, *more = docstring
    shown = [f'"""{first}', *more, '"""'] if more else [f'"""{first}"""']
    return [*lines, f"    ) -> {returned}:", *(f"        {line}".rstrip() for line in shown)]


def _declared(parameter: inspect.Parameter) -> str:
    text = declaration(parameter)
    for name, alias in SHOWN.items():
        text = text.replace(_written(alias), name)
    return text.replace("'", '"')


def _written(alias: object) -> str:
    parameter = inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY, annotation=alias)
    return declaration(parameter).removeprefix("_: ")
