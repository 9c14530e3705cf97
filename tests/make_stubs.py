"""Stub of the factories, which ``make recipe`` writes. Editors and type checkers read it.

``adapter/signatures.pyi`` has one static method for each recipe, with what ``inspect.signature``
shows at run time, as a class that is generic in the model and in the compressor. By it the files
``compression.pyi`` of the adapters, written by hand, declare their ``Compression``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import horovod_fftcomp
from horovod_fftcomp.adapter.factories import declaration, keywords_of
from horovod_fftcomp.engine.policy import Rule
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schedules import Schedule

PACKAGE = Path(horovod_fftcomp.__file__).parent
PATH = PACKAGE / "adapter" / "signatures.pyi"
HEAD = '''"""Signatures of the factories; ``make recipe`` writes this file."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Generic, Literal, TypeVar

from horovod_fftcomp import Recover
from horovod_fftcomp.schedules import Schedule

_Model = TypeVar("_Model")
_Compressor = TypeVar("_Compressor")

class Compression(Generic[_Model, _Compressor]):
    """Factories of compressors, such as ``Compression.fft(model, density=0.15)``."""
'''
# A list of unlike rules in a variable is one of (object, object) to a type checker.
SHOWN = {"Schedule": Schedule, "tuple[Any, Any]": Rule}


def stub() -> str:
    """Return the stub of the factories, as the table of recipes has them today."""
    lines = [HEAD.rstrip()]
    for name, recipe in RECIPES.items():
        arguments = ["model: _Model = ...", "*", *map(_declared, keywords_of(name))]
        lines += _method(name, arguments, recipe.summary)
    arguments = ["text: str", "model: _Model = ...", "**options: Any"]
    lines += _method("parse", arguments, 'written as ``"fft:density=0.1"``')
    return "\n".join(lines) + "\n"


def _method(name: str, arguments: Iterable[str], what: str) -> list[str]:
    separator = "," if name == "parse" else ":"
    lines = ["", "    @staticmethod", f"    def {name}("]
    lines += [f"        {argument}," for argument in arguments]
    lines += ["    ) -> _Compressor:"]
    return [*lines, f'        """Return a compressor{separator} {what}."""']


def _declared(parameter: inspect.Parameter) -> str:
    text = declaration(parameter)
    for name, alias in SHOWN.items():
        text = text.replace(_written(alias), name)
    return text.replace("'", '"')


def _written(alias: object) -> str:
    parameter = inspect.Parameter("_", inspect.Parameter.KEYWORD_ONLY, annotation=alias)
    return declaration(parameter).removeprefix("_: ")
