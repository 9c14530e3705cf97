"""Checks of an installation in one process, and their findings; those of a job are in adapters."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Level(enum.Enum):
    """Severity of a finding; the value is its text in the report."""

    OK = "OK"
    ABSENT = "-"  # not there, and not needed
    WARNING = "warning"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """Result of the check of ``topic``; ``remedy``: what to do if something is wrong."""

    topic: str
    level: Level
    found: str
    remedy: str = ""


def told(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
