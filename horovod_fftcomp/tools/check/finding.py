"""One line of a report of health."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Level(enum.Enum):
    """How bad a finding is; the value is what the report shows."""

    OK = "OK"
    ABSENT = "-"  # and not missed
    WARNING = "warning"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """What was found on ``topic``; ``remedy`` says what to do where something is to be done."""

    topic: str
    level: Level
    found: str
    remedy: str = ""


def told(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
