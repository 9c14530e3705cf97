"""Which tensors are exchanged together. Knows names and sizes, no data and no framework."""

from __future__ import annotations

import math
from collections.abc import Iterable

from horovod_fftcomp.schemes import Tensor

# Below this a header and a launch cost more than the bytes that compression would save.
MIN_NUMEL = 1024
# Horovod's fusion buffer is of this order: large enough for bandwidth, small enough to overlap.
BUCKET_NBYTES = 25_000_000


def is_compressed(tensor: Tensor, min_numel: int = MIN_NUMEL) -> bool:
    """Tell whether ``tensor`` is worth compressing: not a vector (bias, norm), not small."""
    return len(tensor.shape) > 1 and math.prod(tensor.shape) >= min_numel


def make_buckets(
    tensors: Iterable[Tensor], capacity_nbytes: int = BUCKET_NBYTES
) -> list[tuple[Tensor, ...]]:
    """Return whole tensors in the given order, in groups of up to ``capacity_nbytes`` dense.

    A tensor larger than that is a bucket of its own.
    """
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        nbytes = 4 * math.prod(tensor.shape)
        if not buckets or nbytes > room:
            buckets.append([])
            room = capacity_nbytes
        buckets[-1].append(tensor)
        room -= nbytes
    return [tuple(bucket) for bucket in buckets]
