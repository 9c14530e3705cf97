"""Which tensors are exchanged together. Knows names and sizes, no data and no framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from horovod_fftcomp.engine.policy import Policy, Rule, Scheduled, action_for, policy_of
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Tensor

# Below this a header and a launch cost more than the bytes that compression would save.
MIN_NUMEL = 1024
# Horovod's fusion buffer is of this order: large enough for bandwidth, small enough to overlap.
BUCKET_NBYTES = 25_000_000
# Backward ends with the first layers. Nothing is left then to hide the encoding of their bucket
# behind, so no bucket may be a large share of the model...
_LARGEST_SHARE = 1 / 8
# ... unless it is so small that encoding takes no longer than a collective of its own, about 1 ms.
_SMALL_NBYTES = 1_000_000


class Bucket(NamedTuple):
    """Tensors that are exchanged together, by one scheme; ``ruled``: a rule chose the policy."""

    tensors: tuple[Tensor, ...]
    policy: Policy
    ruled: bool = False


def is_compressed(tensor: Tensor, min_numel: int = MIN_NUMEL) -> bool:
    """Tell whether ``tensor`` is worth compressing: not a vector (bias, norm), not small."""
    return len(tensor.shape) > 1 and math.prod(tensor.shape) >= min_numel


def first_convolution(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the kernel of the first convolution over two or three dimensions, if there is one."""
    return next((tensor for tensor in tensors if len(tensor.shape) in (4, 5)), None)


def make_buckets(
    tensors: Iterable[Tensor],
    policy: Scheduled,
    rules: Sequence[Rule] = (),
    min_numel: int = MIN_NUMEL,
    capacity_nbytes: int = BUCKET_NBYTES,
) -> list[Bucket]:
    """Return the compressed tensors, in the given order, in buckets of one policy each.

    A rule decides for the tensors that it names; of the others, vectors and small tensors stay
    out, and so do the first convolution if the recipe is one to spare it, and everything under a
    policy that is dense for ever. A bucket holds whole
    tensors of up to ``capacity_nbytes`` in float32, and of up to an eighth of all that is
    compressed, but for less than 1 MB; a larger tensor is a bucket of its own. Under a policy whose
    scope is the model one bucket holds all its tensors.
    """
    tensors = list(tensors)
    spared = first_convolution(tensors) if RECIPES[policy.recipe].spares_first else None
    by_policy: dict[tuple[Scheduled, bool], list[Tensor]] = {}
    for tensor in tensors:
        action = action_for(tensor, rules)
        if action is not None:
            chosen = policy_of(action, policy)
        else:
            compressed = is_compressed(tensor, min_numel) and tensor is not spared
            chosen = policy if compressed else None
        if chosen is not None and chosen.recipe != "none":
            by_policy.setdefault((chosen, action is not None), []).append(tensor)
    total_nbytes = sum(_nbytes(tensor) for members in by_policy.values() for tensor in members)
    share_nbytes = max(_SMALL_NBYTES, int(_LARGEST_SHARE * total_nbytes))
    room_nbytes = min(capacity_nbytes, share_nbytes)
    return [
        Bucket(group, chosen, ruled)
        for (chosen, ruled), members in by_policy.items()
        for group in _filled(members, total_nbytes if chosen.scope == "model" else room_nbytes)
    ]


def _nbytes(tensor: Tensor) -> int:
    return 4 * math.prod(tensor.shape)


def _filled(tensors: Iterable[Tensor], capacity_nbytes: int) -> list[tuple[Tensor, ...]]:
    groups: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        nbytes = _nbytes(tensor)
        if not groups or nbytes > room:
            groups.append([])
            room = capacity_nbytes
        groups[-1].append(tensor)
        room -= nbytes
    return [tuple(group) for group in groups]


def may_gather(buckets: Iterable[Bucket]) -> bool:
    """Tell whether exchanges of ``buckets`` have other collectives than sums, at any step."""
    possible = (rounds for bucket in buckets for rounds in bucket.policy.possible_rounds())
    return any(set(rounds) != {"allreduce"} for rounds in possible)
