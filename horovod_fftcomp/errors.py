"""Exceptions of the package.

Wrong arguments raise ``ValueError`` or ``TypeError``; these classes are for errors at run time.
"""

from __future__ import annotations


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
