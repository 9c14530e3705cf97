"""Buckets: assignment of tensors to groups that are exchanged together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from horovod_fftcomp.engine.policy import Rule, Scheduled, action_for, policy_of
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.types import OldState, Tensor

# Below this a header and a launch cost more than the bytes that compression would save.
MIN_NUMEL = 1024
# Horovod's fusion buffer is of this order: large enough for bandwidth, small enough to overlap.
BUCKET_NBYTES = 25_000_000
# The backward pass ends with the first layers, whose encoding then overlaps with nothing. So no
# bucket may be a large part of the model...
_LARGEST_SHARE = 1 / 8
# ... unless it is so small that the last one's encoding, 1 to 3 ms, takes no longer than what more
# buckets cost: each takes a collective, and calls between threads.
_SMALL_NBYTES = 3_000_000


class Bucket(NamedTuple):
    """Tensors that are exchanged together by one policy; ``ruled``: whether a rule selected it.

    ``given``: the policy before exchange "auto" was decided for the bucket; None if unknown.
    """

    tensors: tuple[Tensor, ...]
    policy: Scheduled
    ruled: bool = False
    given: Scheduled | None = None


def is_compressed(tensor: Tensor, min_numel: int = MIN_NUMEL) -> bool:
    """Return whether ``tensor`` is compressed by default: no vector (bias, norm), not small."""
    return len(tensor.shape) > 1 and tensor.numel >= min_numel


def first_convolution(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the first tensor of 4 or 5 dimensions, a convolution kernel; None without one."""
    return next((tensor for tensor in tensors if len(tensor.shape) in (4, 5)), None)


def make_buckets(
    tensors: Iterable[Tensor],
    policy: Scheduled,
    rules: Sequence[Rule] = (),
    min_numel: int = MIN_NUMEL,
    capacity_nbytes: int = BUCKET_NBYTES,
    world_size: int = 1,
) -> list[Bucket]:
    """Return the tensors to compress, in the given order, in buckets of one policy each.

    Rules decide about the tensors that they name. Of the others, vectors and tensors of fewer than
    ``min_numel`` elements are left out unless signs are sent, as is the first convolution if the
    recipe spares it (``Recipe.spares_first``); recipe "none" has no buckets. A bucket holds whole
    tensors of at most ``capacity_nbytes`` in float32, and at most an eighth of all compressed bytes
    or 3 MB, whichever is larger; a larger tensor has a bucket to itself. By its size and
    ``world_size`` exchange "auto" is decided. Under a policy with scope "model" one bucket holds
    all tensors.
    """
    tensors = list(tensors)
    spared = first_convolution(tensors) if RECIPES[policy.recipe].spares_first else None
    scheme = policy.after_warmup
    signs = scheme.traits.sends_signs  # a mean would be no step of that size
    by_policy: dict[tuple[Scheduled, bool, bool], list[Tensor]] = {}
    for tensor in tensors:
        action = action_for(tensor, rules)
        if action is not None:
            chosen = policy_of(action, policy)
        else:
            compressed = signs or (is_compressed(tensor, min_numel) and tensor is not spared)
            chosen = policy if compressed else None
        if chosen is not None and chosen.recipe != "none":
            # A tensor so small that only the host can exchange it takes no others there.
            is_tiny = signs and chosen is policy and not scheme.runs_on_device((tensor,))
            by_policy.setdefault((chosen, action is not None, is_tiny), []).append(tensor)
    total_nbytes = sum(4 * tensor.numel for members in by_policy.values() for tensor in members)
    limit_nbytes = max(_SMALL_NBYTES, int(_LARGEST_SHARE * total_nbytes))
    limit_nbytes = min(capacity_nbytes, limit_nbytes)
    return [
        Bucket(group, chosen.decided(group, world_size), ruled, chosen)
        for (chosen, ruled, _), members in by_policy.items()
        for group in _filled(members, total_nbytes if chosen.scope == "model" else limit_nbytes)
    ]


def _filled(tensors: Iterable[Tensor], capacity_nbytes: int) -> list[tuple[Tensor, ...]]:
    groups: list[list[Tensor]] = []
    free_nbytes = 0
    for tensor in tensors:
        nbytes = 4 * tensor.numel
        if not groups or nbytes > free_nbytes:
            groups.append([])
            free_nbytes = capacity_nbytes
        groups[-1].append(tensor)
        free_nbytes -= nbytes
    return [tuple(group) for group in groups]


def may_gather(buckets: Iterable[Bucket]) -> bool:
    """Return whether exchanges of ``buckets`` use other collectives than sums at any step."""
    possible = (rounds for bucket in buckets for rounds in bucket.policy.possible_rounds())
    return any(set(rounds) != {"allreduce"} for rounds in possible)


def decided_anew(buckets: Iterable[Bucket], world_size: int) -> list[Bucket]:
    """Return ``buckets`` with exchange "auto" decided for another number of ranks."""
    return [
        bucket
        if bucket.given is None
        else bucket._replace(policy=bucket.given.decided(bucket.tensors, world_size))
        for bucket in buckets
    ]


def with_policy(buckets: Iterable[Bucket], policy: Scheduled) -> list[Bucket]:
    """Return ``buckets`` with ``policy`` in all but those whose policy comes from a rule."""
    return [
        bucket if bucket.ruled else bucket._replace(policy=policy.as_decided(bucket.policy))
        for bucket in buckets
    ]


def decided_states(
    buckets: Sequence[Bucket], step: int, state_of: Callable[[int], OldState]
) -> dict[int, OldState]:
    """Return the new states, by number of bucket, of recipes that decide after ``step``.

    ``state_of``: the committed state of a bucket, NumPy arrays. All buckets of a recipe take part,
    those as well whose own trials are at other steps, so that together they keep to its bytes.
    """
    tuners = [bucket.policy.at(step).tuner for bucket in buckets]
    found: dict[int, OldState] = {}
    for due in {tuner.scheme: tuner for tuner in tuners if tuner and tuner.is_due}.values():
        numbers = [n for n, tuner in enumerate(tuners) if tuner and tuner.scheme == due.scheme]
        parts = [(buckets[number].tensors, state_of(number)) for number in numbers]
        found |= zip(numbers, due.choose(parts), strict=True)
    return found
