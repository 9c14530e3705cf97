"""A recipe: a compression method with a name, options, and what is told of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from horovod_fftcomp.schemes import Scheme
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.hard_threshold import HardThreshold
from horovod_fftcomp.schemes.options import checked, kinds_of


@dataclass(frozen=True)
class Recipe:
    """A named compression method; its options are the keywords of ``make``.

    ``get_scheme`` checks options against the annotations of ``make``; ranges are checked where an
    option is used. ``summary``: what is sent, as docs/recipes.md, the help of the factories and
    ``horovod-fftcomp recipes`` show it. ``source``: its publication. ``spares_first``: the first
    convolution of a model is sent dense unless a rule names it.
    """

    make: Callable[..., Scheme]
    summary: str
    source: str
    spares_first: bool = False

    @property
    def options(self) -> dict[str, object]:
        """The options and their defaults."""
        return defaults_of(self.make)

    @property
    def own_options(self) -> dict[str, object]:
        """The same without those that all recipes that gather, or that have a residual, share."""
        own = defaults_of(inspect.unwrap(self.make))
        return {name: value for name, value in own.items() if (name, value) != ("beta", 1.0)}

    @property
    def has_fixed_size(self) -> bool:
        """Whether the bytes sent depend on shapes alone, and not on values, by default options."""
        scheme = self.make()
        if isinstance(scheme, Allgather):
            return scheme.codec.has_fixed_size
        return not isinstance(scheme, HardThreshold)

    def checked(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Return ``options`` as built-in objects; TypeError for a value of the wrong type."""
        kinds, defaults = kinds_of(self.make), self.options
        return {
            name: checked(name, value, kinds[name], defaults[name])
            for name, value in options.items()
        }


def defaults_of(make: Callable[..., Scheme]) -> dict[str, object]:
    """Return the options of a factory and their defaults."""
    return {p.name: p.default for p in inspect.signature(make).parameters.values()}
