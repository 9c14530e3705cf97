"""Factory functions of ``Compression``, one per recipe, that make compressors.

``signatures.pyi`` has the same signatures, for editors and type checkers, and those of a function
that takes the name of a recipe. ``make recipe`` writes it.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, TypeVar

from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine.policy import KEYWORDS, Scheduled, make_policy
from horovod_fftcomp.engine.recipe_text import parse_recipe
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.recipes import RECIPES, get_recipe, get_scheme, unknown_recipe
from horovod_fftcomp.schemes.options import check_names

if TYPE_CHECKING:
    from horovod_fftcomp.adapter.signatures import Compress  # is a stub only

_Model = TypeVar("_Model")
_Compressor = TypeVar("_Compressor")
_SETTINGS = list(inspect.signature(Settings).parameters)


def keywords_of(recipe: str) -> list[inspect.Parameter]:
    """Return the keyword-only parameters of a recipe's factory: its options, then the settings."""
    found = {
        each.name: each.replace(kind=each.KEYWORD_ONLY)
        for source in (RECIPES[recipe].make, make_policy, Settings)
        for each in inspect.signature(source, eval_str=True).parameters.values()
    }
    return [found[name] for name in (*RECIPES[recipe].options, *KEYWORDS, *_SETTINGS)]


def configured(
    recipe: str, options: dict[str, Any], without: Collection[str] = ()
) -> tuple[Scheduled, Settings]:
    """Return policy and settings of a recipe with keyword ``options``; TypeError for unknown ones.

    ``without``: settings that the adapter does not have.
    """
    known = [name for name in _SETTINGS if name not in without]
    check_names(recipe, options, get_recipe(recipe).options, [*KEYWORDS, *known])
    settings = {name: value for name, value in options.items() if name in known}
    rest = {name: value for name, value in options.items() if name not in known}
    return make_policy(recipe, **rest), Settings(**settings)


def documentation(recipe: str, parameters: Iterable[inspect.Parameter], *others: object) -> str:
    """Return the docstring of a recipe's factory: type, default and description of each parameter.

    The descriptions come from the docstrings of ``get_scheme``, ``make_policy``, ``Settings`` and
    ``others``.
    """
    first = f"Return a compressor: {RECIPES[recipe].summary}. Source: {RECIPES[recipe].source}."
    lines = [first, "", "Parameters", "----------"]
    for each in parameters:
        lines += [declaration(each), meaning(recipe, each.name, *others)]
    return "\n".join(lines)


def meaning(recipe: str, name: str, *others: object) -> str:
    """Return the description of a recipe's option or setting, indented; "" if there is none."""
    known = _meanings(*others)
    return (known.get(f"{recipe}.{name}") or known.get(name, "")).rstrip()


@functools.cache
def _meanings(*others: object) -> dict[str, str]:
    """Return the descriptions of all options and settings, by name."""
    pages = [inspect.getdoc(each) or "" for each in (get_scheme, make_policy, Settings, *others)]
    return dict(re.findall(r"^([\w.]+)\n((?:    .+\n?)+)", "\n".join(pages), re.M))


def with_options(
    function: Callable[Concatenate[_Model, ...], _Compressor],
) -> Compress[_Model, _Compressor]:
    """Return ``function`` of a model, a recipe's name and options, with these in its docstring.

    To type checkers it has one signature for each recipe.
    """
    lines = [inspect.getdoc(function) or "", "", "Recipes", "-------"]
    for name, recipe in RECIPES.items():
        own = [declaration(each) for each in keywords_of(name)[: len(recipe.options)]]
        # No line ends within an option.
        call = f"{name}({', '.join(own)})".replace(" ", "\0").replace(",\0", ", ")
        wrapped = textwrap.wrap(call, 92, subsequent_indent="        ")
        lines += [*(line.replace("\0", " ") for line in wrapped), f"    {recipe.summary}"]
    described = (inspect.getdoc(get_scheme) or "").partition("----\n")[2]
    lines += ["", "Options of recipes", "------------------", described, "", "Settings", "--------"]
    settings = [each for each in keywords_of("none") if each.name != "process_set"]
    for each in settings:
        lines += [declaration(each), meaning("none", each.name)]
    function.__doc__ = "\n".join(lines)
    made: Any = function
    return made


def declaration(parameter: inspect.Parameter) -> str:
    """Return name, type and default of a parameter as source code, types without their modules."""
    return re.sub(r"\b[A-Za-z_][\w.]*\.(?=\w)", "", str(parameter))


class _NoCompressor:
    """Base of objects that are passed to Horovod by mistake instead of a compressor.

    Every method that Horovod calls raises UnsupportedError, which says how to make a compressor.
    """

    def compress(self, *given: Any) -> NoReturn:
        """Raise UnsupportedError."""
        name = "Compression" if isinstance(self, type) else str(self)
        factory = "Compression.fft" if isinstance(self, type) else name
        raise UnsupportedError(
            f"compression={name} is a factory, not a compressor; call it: give "
            f"compression={factory}(model), or with TensorFlow compression={factory}()"
        )

    decompress = reduced = compress

    def __hash__(self) -> int:
        # In TensorFlow Horovod hashes it first; with Keras 3, whose gradients it does not reduce,
        # that is its only call.
        if sys._getframe(1).f_globals.get("__name__") == "horovod.tensorflow.util":
            self.compress()
        return id(self)


class Factory(_NoCompressor):
    """Callable that makes a compressor of one recipe, with a signature and docstring of its own.

    ``make``: function of the model and the keywords ``policy`` and ``settings``.
    """

    def __init__(self, recipe: str, make: Callable[..., Any]) -> None:
        self._make = make
        self.__name__ = self.__qualname__ = recipe
        model = inspect.signature(make, eval_str=True).parameters["model"]
        parameters = [model, *keywords_of(recipe)]
        self.__signature__ = inspect.Signature(parameters, return_annotation=make)
        self.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": make}
        self.__doc__ = documentation(recipe, parameters, make)

    def __get__(self, instance: Any, owner: Any = None) -> Factory:
        return self  # ``help`` shows descriptors with ``__get__`` as functions

    def __call__(self, model: Any = None, **options: Any) -> Any:
        """Return a compressor for the gradients of ``model``."""
        policy, settings = configured(self.__name__, options)
        return self._make(model, policy=policy, settings=settings)

    def __repr__(self) -> str:
        return f"Compression.{self.__name__}"


class Factories(_NoCompressor, type):
    """Metaclass that adds a ``Factory`` per recipe; its classes define ``_make``."""

    def __getattr__(cls, recipe: str) -> Factory:
        if recipe not in RECIPES:
            raise AttributeError(unknown_recipe(recipe))
        return Factory(recipe, cls.__dict__["_make"])

    def parse(cls, text: str, model: Any = None, **options: Any) -> Any:
        """Return a compressor, written as for the commands: ``parse("fft:density=0.1", model)``.

        ``options``: further options and settings; they win over those of ``text``.
        """
        choice = parse_recipe(text)
        return getattr(cls, choice.name)(model, **{**choice.options, **options})

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *RECIPES]
