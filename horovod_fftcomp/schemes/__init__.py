"""A scheme: per-bucket state and a fixed list of collectives. No scheme calls a network.

``exchange`` is a generator: it yields the input of each collective and is sent its output, so a
scheme reads in the order in which it happens and anybody who owns a network can drive it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol

from horovod_fftcomp.backends import Array

# kind of state ("residual") -> tensor name -> array
State = dict[str, dict[str, Array]]


class Tensor(NamedTuple):
    """What all ranks know of a tensor before the data."""

    name: str
    shape: tuple[int, ...]


class Round(NamedTuple):
    """One collective: ``allreduce`` sums, ``allgather`` joins along axis 0 in rank order."""

    collective: str
    data: Array


class Context(NamedTuple):
    """Where in the job an exchange takes place."""

    step: int
    rank: int
    world_size: int


class Outcome(NamedTuple):
    """What an exchange ends in: sums over ranks, flat float32, in the order of the tensors.

    ``state`` replaces the old one if the whole step was finite, on every rank. ``energy`` is
    (of what was to be sent, of what was left over), where this exchange measured it.
    """

    sums: list[Array]
    state: State
    finite: bool
    energy: tuple[float, float] | None = None


Exchange = Generator[Round, Array, Outcome]


class Scheme(Protocol):
    """A frozen dataclass of options with a list of rounds that no value can change."""

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        ...

    def exchange(
        self,
        tensors: Sequence[Tensor],
        grads: Sequence[Array],
        state: Mapping[str, Mapping[str, Array]],
        context: Context,
    ) -> Exchange:
        """Sum ``grads`` (flat float32, left unchanged) over all ranks."""
        ...

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes that a rank hands to collectives for ``tensor`` in each step."""
        ...

    def residual(self, state: Mapping[str, Mapping[str, Array]], tensor: Tensor) -> Array:
        """Return what is not sent yet of ``tensor``, float32 in its shape."""
        ...
