"""Parts of tensors: the shares of a bucket that the ranks of a node own, and their state.

A part is a tensor of its own, ``weight[0:512]`` for one, under whose name its state is kept. A
state may have arrays of whole tensors and of parts that belong to other numbers of ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.kernels.plans import BucketPlan
from horovod_fftcomp.schemes import Scheme, State
from horovod_fftcomp.schemes.shard_plan import cut
from horovod_fftcomp.types import OldState, Tensor, Tensors

_LEAST_NUMEL = 1024  # of a part: compression gains nothing with smaller tensors (MIN_NUMEL)
_NAME = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


class Part(NamedTuple):
    """Elements ``begin`` to ``end`` of the tensor ``whole``; ``tensor``: they as a tensor."""

    whole: Tensor
    begin: int
    end: int

    @property
    def tensor(self) -> Tensor:
        """The part as a tensor of its own, of whole rows if it consists of them."""
        whole, begin, end = self
        numel, n = whole.numel, end - begin
        if n == numel:
            return whole
        length = numel // whole.shape[0]
        shape: tuple[int, ...] = (n, 1, 1) if len(whole.shape) > 2 else (n,)
        if len(whole.shape) > 1 and begin % length == end % length == 0:
            shape = (n // length, *whole.shape[1:])
        return Tensor(f"{whole.name}[{begin}:{end}]", shape)


class Share(BucketPlan):
    """What one rank of a node owns of a bucket: parts, in ``tensors`` as tensors of their own.

    ``numbers``: those of the tensors in the bucket.
    """

    def __init__(self, parts: list[tuple[int, Part]]) -> None:
        self.numbers = [number for number, _ in parts]
        self.parts = [part for _, part in parts]
        self.tensors = tuple(part.tensor for part in self.parts)
        super().__init__([part.end - part.begin for part in self.parts])


class NodePlan(BucketPlan):
    """A bucket and the ``shares`` of a node's ranks; ``splits``: elements of each share.

    ``parts``: those of all shares, in their order, as tensors.
    """

    def __init__(self, tensors: Tensors, n_ranks: int) -> None:
        super().__init__([tensor.numel for tensor in tensors])
        grains = [_grain(tensor, self.offsets[-1] // n_ranks) for tensor in tensors]
        self.shares = [
            Share([(n, Part(tensors[n], begin, end)) for n, begin, end in pieces])
            for pieces in cut(self.numels, grains, n_ranks)
        ]
        self.splits = tuple(share.offsets[-1] for share in self.shares)
        self.parts = tuple(tensor for share in self.shares for tensor in share.tensors)


@functools.lru_cache(maxsize=1024)  # more than a training has buckets
def node_plan(tensors: tuple[Tensor, ...], n_ranks: int) -> NodePlan:
    """Return the plan of a bucket, always the same object."""
    return NodePlan(tensors, n_ranks)


def _grain(tensor: Tensor, share_numel: int) -> int:
    """Return the number of elements of which a part is a multiple: whole rows if they are short.

    So the part of a matrix is a matrix.
    """
    if len(tensor.shape) > 1 and tensor.shape[0]:
        length = math.prod(tensor.shape[1:])
        rows = length * -(-_LEAST_NUMEL // max(1, length))
        if 0 < rows <= share_numel // 2:
            return rows
    return _LEAST_NUMEL


def parts_in(state: OldState, tensors: Tensors) -> Iterator[Part]:
    """Yield the parts of ``tensors`` of which ``state`` has arrays, whole tensors included."""
    known = {tensor.name: tensor for tensor in tensors}
    for name in dict.fromkeys(itertools.chain.from_iterable(state.values())):
        if name in known:
            yield Part(known[name], 0, known[name].numel)
        elif (match := _NAME.fullmatch(name)) and match[1] in known:
            part = Part(known[match[1]], int(match[2]), int(match[3]))
            if part.begin < part.end <= part.whole.numel and part.tensor.name == name:
                yield part


def of_names(state: OldState, names: set[str]) -> State:
    """Return the arrays of a state that have these names."""
    return {
        kind: {name: array for name, array in arrays.items() if name in names}
        for kind, arrays in state.items()
    }


def rejoined(scheme: Scheme, tensors: Tensors, state: OldState) -> OldState:
    """Return a state of ``scheme`` for whole tensors: residuals of parts go into theirs.

    What else is known of parts is left out. ``state``: NumPy arrays; not changed.
    """
    parts = list(parts_in(state, tensors))
    cut_up = {part.whole: part for part in parts if part.tensor is not part.whole}
    if not cut_up:
        return state
    new = of_names(state, {tensor.name for tensor in tensors})
    for whole in cut_up:
        array = scheme.state_arrays(whole, new).get("residual")
        if array is None or not array.is_kept:
            continue
        elements = np.zeros(whole.numel, np.float32)
        add_residuals(scheme, [part for part in parts if part.whole is whole], state, elements)
        forward = array.transform.forward(elements, None, 0, cpu_kernels())
        for kind, arrays in new.items():
            if kind.startswith("shard_"):
                arrays.pop(whole.name, None)
        new.setdefault("residual", {})[whole.name] = forward.array
    return new


def add_residuals(scheme: Scheme, parts: list[Part], state: OldState, elements: np.ndarray) -> None:
    """Add the residuals of parts of one tensor, NumPy arrays in ``state``, to its elements."""
    for part in parts:
        elements[part.begin : part.end] += scheme.residual(state, part.tensor).reshape(-1)
