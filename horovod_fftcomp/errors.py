"""Exceptions and warnings of the package, checks of numbers, and lists as text for messages.

Wrong arguments raise ``ValueError`` or ``TypeError``; exceptions here are for errors at run time.
"""

from __future__ import annotations

import numbers
import sys
import warnings
from collections.abc import Sequence
from typing import TypeGuard


class FFTCompError(Exception):
    """Base class of the package's exceptions."""


class PayloadError(FFTCompError):
    """Raised for payload bytes that are corrupt, truncated or written by another recipe.

    The message names the header field.
    """


class ConfigMismatchError(FFTCompError):
    """Raised if ranks of one job run with different recipes, options, tensors or versions."""


class UnsupportedError(FFTCompError):
    """Raised for a use that is not supported, and if a GPU computes otherwise than the CPU.

    The message names the alternative.
    """


_NOT_THE_USERS = {
    *("horovod_fftcomp", "horovod", "torch", "tensorflow", "keras", "contextlib", "threading"),
    *("accelerate", "lightning", "pytorch_lightning", "transformers"),
}


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning that names the user's line, not one of the package or a framework."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and str(frame.f_globals.get("__name__")).split(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is a real number, NumPy's included, but no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an integer, NumPy's included, but no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_whole(
    name: str, value: object, least: int, most: int | None = None, hint: str = ""
) -> None:
    """Raise ValueError unless ``value`` is a built-in int from ``least`` to ``most``, or up.

    Fingerprints are made of the ``repr`` of options; 8.0, True and NumPy's numbers have others.
    """
    if type(value) is not int or not least <= value <= (value if most is None else most):
        to = "up" if most is None else f"to {most}"
        raise ValueError(f"{name} must be a whole number from {least} {to}, got {value!r}{hint}")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``, which are of one type."""
    if type(value) is not type(choices[0]) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}")


def check_share(name: str, value: object, hint: str = "") -> None:
    """Raise ValueError unless ``value`` is a number above 0 and at most 1."""
    if not is_number(value) or not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must lie in (0, 1], got {value!r}{hint}")


def listed(items: Sequence[object], most: int = 8) -> str:
    """Return items as text, at most ``most`` of them.

    >>> listed([0, 1, 2, 3], most=2)
    '0, 1 and 2 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 0", or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) != 1)} {listed(ranks)}"
