"""A scheme: per-bucket state and a fixed list of collectives. No scheme calls a network.

``exchange`` is a generator: it yields the input of each collective and is sent its output, so a
scheme reads in the order in which it happens and anybody who owns a network can drive it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.spec import spec_of

# Measurements take a pass or more; so seldom they cost nothing. A prime, so that of ranks that
# take turns in something each is measured in every role.
MEASURE_EVERY = 53

# The kinds of state that are in the units of a gradient, so that a loss scale multiplies them.
GRADIENT_UNITS = ("residual", "levels", "velocity")

Grads = Sequence[Array | None]  # one for each tensor; None of a frozen one

# kind of state ("residual") -> tensor name -> array
State = dict[str, dict[str, Array]]
OldState = Mapping[str, Mapping[str, Array]]  # that of the step before, which nobody changes


def energy_of(values: Array | None) -> float:
    """Return the sum of squares, Inf where it overflows; of None 0."""
    if values is None:
        return 0.0
    flat = values.reshape(-1)
    with np.errstate(over="ignore"):
        return float(np.dot(flat, flat))


class Tensor(NamedTuple):
    """What all ranks know of a tensor before the data."""

    name: str
    shape: tuple[int, ...]


class Round(NamedTuple):
    """One collective: ``allreduce`` sums, ``allgather`` joins along axis 0 in rank order.

    ``broadcast`` gives everybody the data of rank ``root``; all hand in as much. Instead of all
    that an allgather joins, a network may bring what ``merge``, if there is one, makes of it: of
    two ranks' data, then of two results, and so on, in the tree of ``sparcml.merge_all``.

    ``among``: the ranks that take part, this one being one of them, if not all do; ``root`` counts
    among these. Where it is empty this rank has no part in the round, and gets no data. ``inside``:
    all of it stays within a node. ``divided``: of an allgather, that the more ranks there are the
    less each hands in, so that what arrives hardly grows.
    """

    collective: str
    data: Array
    root: int = 0
    merge: Callable[[Array, Array], Array] | None = None
    among: tuple[int, ...] | None = None
    inside: bool = False
    divided: bool = False


class Context(NamedTuple):
    """Where in the job an exchange takes place; ``device``: the GPU that computes it, if any."""

    step: int
    rank: int
    world_size: int
    loss_scale: float = 1.0
    device: Device | None = None


class Energy(NamedTuple):
    """Sums of squares of a tensor's gradient, of gradient plus residual, and of what is left."""

    gradient: float
    wanted: float
    left: float


class Similarity(NamedTuple):
    """Of how many ``chosen`` positions ``common`` ones are those that this rank prefers as well."""

    common: int
    chosen: int


class OnDevice(NamedTuple):
    """What only a GPU knows of an exchange so far; nothing of it waits unless it is called.

    ``not_finite``: words, one of them not 0 if a sum is not finite. ``arrived``: what was found of
    the payloads, see ``Decoder.decode``. ``restore`` takes the verdict on the step and brings the
    new state back to the old one where it is not 0. ``measured``: if anything was, what returns
    the fields of ``Outcome`` that follow.
    """

    not_finite: Any
    arrived: Any
    restore: Callable[[Any], None]
    measured: Callable[[], Mapping[str, Any]] | None


class Outcome(NamedTuple):
    """What an exchange ends in: sums over ranks, flat float32, in the order of the tensors.

    ``state`` replaces the old one if the whole step was finite, on every rank. ``energies`` are
    those of the tensors that this exchange measured, by name. ``missed``: sum of squares of what
    this rank leaves unsent, of a scheme that measures it in every step. ``on_device``: if a GPU
    computes the exchange; ``finite`` is then what the host knows.
    """

    sums: list[Array]
    state: State
    finite: bool
    energies: Mapping[str, Energy] = MappingProxyType({})
    similarity: Similarity | None = None
    missed: float | None = None
    on_device: OnDevice | None = None

    def measured_alone(self) -> Outcome:
        """Return nothing but what was measured, so that no array is kept for it."""
        later = self.on_device
        if later is not None:
            later = OnDevice(None, None, lambda verdict: None, later.measured)
        return self._replace(sums=[], state={}, on_device=later)


Exchange = Generator[Round, Array, Outcome]


class Scheme(Protocol):
    """A frozen dataclass of options with a list of rounds that no value can change.

    Schemes inherit from it what most of them have in common.
    """

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""
        ...

    def possible_rounds(self) -> frozenset[tuple[str, ...]]:
        """Return every list of collectives that an exchange may have, at any step with any state.

        Those of ``at(step)`` for all steps; a graph that is built once needs all of them.
        """
        return frozenset({self.rounds})

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` (flat float32, left unchanged) over all ranks.

        None stands for a frozen tensor: it sends zeros and keeps its state.
        """
        ...

    def runs_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether ``exchange`` takes a GPU's arrays, and ``context.device``, in this step.

        By what all ranks know alike: the host's sums may differ from a GPU's in the last bits.
        """
        del tensors
        return False

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank hands to collectives in each step.

        Those to expect, where the values decide.
        """
        ...

    def spec(self) -> str:
        """Return the scheme and its options in words; see ``spec_of``."""
        return spec_of(self)

    def state_format(self, tensor: Tensor) -> str:
        """Return shape and domain of the state of ``tensor`` in words; equal if states fit."""
        return f"residual of {list(tensor.shape)} by element"

    def state_arrays(self, tensor: Tensor, state: OldState) -> Mapping[str, tuple[np.dtype, int]]:
        """Return (dtype, elements) of each 1-D array that ``state`` may hold of ``tensor``."""
        del state
        if not getattr(self, "error_feedback", False):
            return {}
        return {"residual": (np.dtype(np.float32), math.prod(tensor.shape))}

    def at(self, step: int) -> Scheme:
        """Return what runs at a step, counted from the first compressed one."""
        del step
        return self

    def in_warmup(self) -> Scheme | None:
        """Return what runs in dense steps before compression begins; None: a plain sum."""
        return None

    def accumulation(self) -> float:
        """Return by how much what is to be sent outgrows steady gradients before any selection."""
        return 1.0

    def own_momentum(self) -> float:
        """Return the decay of the momentum that the scheme keeps itself; 0 if it keeps none."""
        return 0.0

    def fits_differences(self) -> bool:
        """Tell whether differences of weights may be sent: no momentum of its own, no signs."""
        return True

    def check_differences(self, who: str) -> None:
        """Raise UnsupportedError, about ``who``, unless differences of weights may be sent."""
        if not self.fits_differences():
            raise UnsupportedError(
                f"{who} holds for gradients alone: it has a momentum of its own or sends signs. "
                "Take another recipe, or sketchsgd or dgc with momentum=0.0"
            )

    def choice_of(self, state: OldState, tensor: Tensor) -> str | None:
        """Return in words what is chosen for a tensor; None of a scheme that does not choose."""
        del state, tensor
        return None

    def residual(self, state: OldState, tensor: Tensor) -> Array:
        """Return what is not sent yet of ``tensor``, float32 in its shape, in a new array."""
        carried = state.get("residual", {}).get(tensor.name)
        if carried is None:
            return np.zeros(tensor.shape, np.float32)
        return self.elements(carried, state, tensor).reshape(tensor.shape).copy()

    def elements(self, residual: Array, state: OldState, tensor: Tensor) -> Array:
        """Return the elements of a tensor's residual, which may lie in another domain."""
        del state, tensor
        return residual
