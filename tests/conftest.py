"""Settings of all tests."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import settings

# The first example may compile a kernel.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# MPI waits busily. Ranks that share two cores keep each other from what they wait for, unless
# Horovod looks for work less often than each millisecond: steps of 3 ms may take 100 otherwise. At
# 8 ms the longest job takes a fifth less of the cores than at 3 ms, and is no slower.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "8")

# How many launches run at a time: each has two or three busy ranks, beside which other tests run.
LANES = 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Let pytest-xdist run launches in ``LANES`` of its workers, begin with them, one by one."""
    lanes = {is_smoke: itertools.cycle(range(LANES)) for is_smoke in (True, False)}
    for item in items:
        if item.get_closest_marker("parallel"):
            lane = next(lanes[item.get_closest_marker("smoke") is not None])
            item.add_marker(pytest.mark.xdist_group(f"launches-{lane}"))
