"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# The first example may compile a kernel.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
