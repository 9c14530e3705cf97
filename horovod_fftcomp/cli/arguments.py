"""Types of arguments that several commands take."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
