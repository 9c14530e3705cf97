"""What ``Compression`` of every adapter is made of: one factory for each recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from horovod_fftcomp.options import check_names
from horovod_fftcomp.policy import KEYWORDS, Scheduled, make_policy
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.settings import Settings

_SETTINGS = [field.name for field in fields(Settings)]


class Factories(type):
    """Gives a class one static method for each recipe; the class has ``_make``."""

    def __getattr__(cls, recipe: str) -> Callable[..., Any]:
        if recipe not in RECIPES:
            raise AttributeError(f"unknown recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
        return _factory(recipe, cls.__dict__["_make"])

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *RECIPES]


def _factory(
    recipe: str, make_compressor: Callable[[Any, Scheduled, Settings], Any]
) -> Callable[..., Any]:
    def make(model: Any = None, **options: Any) -> Any:
        check_names(recipe, options, RECIPES[recipe].options, [*KEYWORDS, *_SETTINGS])
        settings = {name: options.pop(name) for name in list(options) if name in _SETTINGS}
        return make_compressor(model, make_policy(recipe, **options), Settings(**settings))

    make.__name__ = make.__qualname__ = recipe
    make.__doc__ = f"Return a compressor: {RECIPES[recipe].summary}; see ``Compression``."
    return make
