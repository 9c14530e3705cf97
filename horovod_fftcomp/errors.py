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
