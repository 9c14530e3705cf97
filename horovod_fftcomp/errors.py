"""Every exception that the package raises on purpose, apart from ValueError and TypeError.

``ValueError`` and ``TypeError`` are for arguments; the classes here are for what happens later.
"""

from __future__ import annotations


class FFTCompError(Exception):
    """Base class of the package's own errors."""


class PayloadError(FFTCompError):
    """Bytes that are corrupt, cut short, or were made by another recipe; names the header field."""


class ConfigMismatchError(FFTCompError):
    """Ranks of one job run with different recipes, options, tensors or versions."""


class UnsupportedError(FFTCompError):
    """A use of Horovod that compression cannot serve; the message names the alternative."""
