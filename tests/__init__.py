"""Tests, and the scripts that they run in processes of their own.

All of them compress from the first step on, unless they ask for a warm-up.
"""

from horovod_fftcomp.engine import policy

policy.WARMUP_STEPS = 0
