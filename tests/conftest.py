"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# The first example may compile a kernel.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# MPI waits busily. Ranks that share two cores keep each other from what they wait for, unless
# Horovod looks for work less often than each millisecond: steps of 3 ms may take 100 otherwise. At
# 8 ms the longest job takes a fifth less of the cores than at 3 ms, and is no slower.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "8")
