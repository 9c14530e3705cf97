"""Communication hook of DDP.

DDP reads its annotations at run time, so this file has no ``from __future__ import annotations``.
"""

from typing import Any

import torch
import torch.distributed as dist


def exchange_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return the future of a bucket's averages over all ranks; ``state``: a ``DDPCompressor``."""
    return state.exchange(bucket)
