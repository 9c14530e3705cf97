"""``Compression``: what a user of ``horovod.torch`` passes as ``compression=``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch

from horovod_fftcomp.policy import make_policy
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.torch.compressor import Compressor
from horovod_fftcomp.torch.settings import Settings

_SETTINGS = {field.name for field in fields(Settings)}


class _Factories(type):
    def __getattr__(cls, recipe: str) -> Callable[..., Compressor]:
        if recipe not in RECIPES:
            raise AttributeError(f"unknown recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
        return _factory(recipe)

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *RECIPES]


class Compression(metaclass=_Factories):
    """One factory for each recipe: ``Compression.fft(model, density=0.15)`` and so on.

    Each takes the model (or its ``named_parameters()``, or a list of parameters), the recipe's
    options (``horovod-fftcomp recipes`` lists them), ``warmup_steps`` and ``density_schedule``
    (see ``make_policy``), and the fields of ``Settings``.
    """


def _factory(recipe: str) -> Callable[..., Compressor]:
    def make(model: torch.nn.Module | Iterable[Any], **options: Any) -> Compressor:
        settings = {name: options.pop(name) for name in list(options) if name in _SETTINGS}
        return Compressor(model, make_policy(recipe, **options), Settings(**settings))

    make.__name__ = make.__qualname__ = recipe
    make.__doc__ = f"Return a compressor: {RECIPES[recipe].summary}; see ``Compression``."
    return make
