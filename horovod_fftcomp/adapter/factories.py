"""What ``Compression`` of every adapter is made of: one factory for each recipe."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NoReturn

from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine.policy import KEYWORDS, Scheduled, make_policy
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes.options import check_names

_SETTINGS = [field.name for field in fields(Settings)]


class _NoCompressor:
    """Refuses what Horovod does with a compressor; for what may be given in the place of one."""

    def compress(self, tensor: Any) -> NoReturn:
        """Raise UnsupportedError."""
        self._refuse()

    def decompress(self, tensor: Any, ctx: Any) -> NoReturn:
        """Raise UnsupportedError."""
        self._refuse()

    def reduced(self, grads: Any, variables: Any = None) -> NoReturn:
        """Raise UnsupportedError."""
        self._refuse()

    def __hash__(self) -> int:
        # Horovod's first act with it in TensorFlow, and in Keras 3, which it does not reduce, last.
        if sys._getframe(1).f_globals.get("__name__") == "horovod.tensorflow.util":
            self._refuse()
        return id(self)

    def _refuse(self) -> NoReturn:
        given = "Compression" if isinstance(self, type) else str(self)
        factory = "Compression.fft" if isinstance(self, type) else given
        raise UnsupportedError(
            f"compression={given} is not a compressor, but what makes one: give "
            f"compression={factory}(model), or with TensorFlow compression={factory}()"
        )


class Factory(_NoCompressor):
    """Returns a compressor of one recipe when it is called."""

    def __init__(
        self, recipe: str, make_compressor: Callable[[Any, Scheduled, Settings], Any]
    ) -> None:
        self._make = make_compressor
        self.__name__ = self.__qualname__ = recipe
        self.__doc__ = f"Return a compressor: {RECIPES[recipe].summary}; see ``Compression``."
        self.__signature__ = inspect.signature(self.__call__)

    def __get__(self, instance: Any, owner: Any = None) -> Factory:
        return self  # by which ``help`` knows it for a function

    def __call__(self, model: Any = None, **options: Any) -> Any:
        """Return the compressor of ``model``."""
        check_names(self.__name__, options, RECIPES[self.__name__].options, [*KEYWORDS, *_SETTINGS])
        settings = {name: options.pop(name) for name in list(options) if name in _SETTINGS}
        return self._make(model, make_policy(self.__name__, **options), Settings(**settings))

    def __repr__(self) -> str:
        return f"Compression.{self.__name__}"


class Factories(_NoCompressor, type):
    """Gives a class one factory for each recipe; the class has ``_make``."""

    def __getattr__(cls, recipe: str) -> Factory:
        if recipe not in RECIPES:
            raise AttributeError(f"unknown recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
        return Factory(recipe, cls.__dict__["_make"])

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *RECIPES]
