"""Scheme base class: a method as a fixed list of collectives with per-bucket state.

``Scheme.exchange`` is a generator and calls no network: it yields the input of each collective and
receives its output by ``send``. So its code reads in the order in which things happen, and any
caller that has a network (Horovod, MPI, a simulation) can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from horovod_fftcomp.codec.backend import cpu_kernels
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.kernels.ops import Flags, Into, Ops
from horovod_fftcomp.schemes.state_array import StateArray, StateArrays
from horovod_fftcomp.types import Array, Arrays, Choice, OldState, Tensor, Tensors
from horovod_fftcomp.wire.spec import spec_of

# A measurement takes an extra pass or more over the data, which is negligible at this interval. A
# prime, so that where ranks rotate in a role each rank is measured in every role.
MEASURE_EVERY = 53

# Scheme ``auto`` tries its candidates in so many steps of each series, as one gradient is too few:
# the best candidate of it may have a quarter more error on later ones; benchmarks/auto_choice.py.
# No other scheme has rounds that depend on the step.
TRIAL_STEPS = 4

# The kinds of state in the units of a gradient, which change with the loss scale.
GRADIENT_UNITS = ("residual", "levels", "velocity", "shard_residual")

Grads = Arrays  # one for each tensor; None for a frozen one

# kind of state ("residual") -> tensor name -> array
State = dict[str, dict[str, Array]]


class Round(NamedTuple):
    """Collective: allreduce (sum), allgather (concatenation in rank order), broadcast or alltoall.

    ``data``: this rank's input. ``root``: the rank whose data a ``broadcast`` sends; the data of
    all ranks have the same size. ``splits``: for an ``alltoall``, how many elements of ``data``
    each participant gets; the output is what this rank gets of all, in rank order.
    ``merge``: for an allgather, a function of two ranks' data; a network may return the data of all
    ranks merged pairwise, in the tree of ``sparcml.merge_all``, instead of their concatenation.

    ``among``: the participating ranks, this one included, in whose numbering ``root`` is given;
    None if all take part, empty if this rank does not take part and receives nothing. ``inside``:
    whether all participants are within one node. ``divided``: for an allgather, whether each rank's
    data shrink with the number of ranks, so that the received size hardly grows. ``in_place``:
    whether a network may write the output of an allreduce over ``data``. ``receives``: for an
    allgather or an alltoall, how many elements of the output come from each participant, where all
    know that of each other; else empty.
    """

    collective: str
    data: Array
    root: int = 0
    merge: Callable[[Array, Array], Array] | None = None
    among: tuple[int, ...] | None = None
    inside: bool = False
    divided: bool = False
    splits: tuple[int, ...] = ()
    in_place: bool = False
    receives: tuple[int, ...] = ()

    def own_nbytes(self, rank: int) -> int:
        """Return how many bytes of the output are those that ``rank`` has sent itself."""
        if self.among == ():
            return 0
        place = rank if self.among is None else self.among.index(rank)
        if self.collective == "alltoall":
            return self.splits[place] * self.data.dtype.itemsize
        returns = self.collective == "broadcast" and place == self.root
        return self.data.nbytes if returns or self.collective == "allgather" else 0


def ops_of(device: Device | None) -> Ops:
    """Return the ops of the host, or those of a device."""
    if device is None:
        from horovod_fftcomp.kernels.host.ops import HOST  # loads Numba

        return HOST
    if "ops" not in device.cache:
        from horovod_fftcomp.kernels.cuda.ops import CudaOps  # imported only where there is a GPU

        device.cache["ops"] = CudaOps(device)
    return device.cache["ops"]


class Second(NamedTuple):
    """Options of the second round of a sharded exchange; None for the defaults."""

    density: float | None = None
    bits: int | None = None


class Context(NamedTuple):
    """Step, rank, world size and loss scale of an exchange; ``device``: the GPU for it, if any.

    ``second``: options of a sharded exchange of payloads; None for one by allgather. ``arriving``:
    tensors whose payloads an allgather returns, by the codec of those that are sent; None: of the
    same tensors. ``into``: where sums may be written once the gradients have been encoded.
    """

    step: int
    rank: int
    world_size: int
    loss_scale: float = 1.0
    device: Device | None = None
    second: Second | None = None
    arriving: Tensors | None = None
    into: Into | None = None

    @property
    def ops(self) -> Ops:
        """The ops with which to compute: of the device, or of the host."""
        return ops_of(self.device)

    @property
    def measures(self) -> bool:
        """Whether energies are measured in this step."""
        return self.step % MEASURE_EVERY == 0


class Energy(NamedTuple):
    """Sums of squares of a tensor: gradient, ``wanted`` (plus old residual), ``left`` (unsent)."""

    gradient: float
    wanted: float
    left: float


class Similarity(NamedTuple):
    """How many of the ``chosen`` positions this rank's own selection has in ``common``."""

    common: int
    chosen: int


class Measured(NamedTuple):
    """Measurements of an exchange.

    ``energies``: by name, for the tensors that were measured. ``missed``: sum of squares of the
    unsent values of this rank, where a scheme measures it in every step.
    """

    energies: Mapping[str, Energy] = MappingProxyType({})
    similarity: Similarity | None = None
    missed: float | None = None


class Outcome(NamedTuple):
    """Result of an exchange: sums over ranks, flat float32, in the order of the tensors.

    A sum that is an array of ``Context.into`` has been multiplied by its factor, no other.
    ``state``: the new state, which replaces the old one if the whole step was finite on every rank.
    ``first``: what a first state replaces, where that is not zeros.
    ``flags`` say whether this exchange was. ``measured``: None, or a function that returns the
    measurements, for which it waits if they are on a GPU; it keeps no array alive that could be
    freed.
    """

    sums: list[Array]
    state: State
    flags: Flags = Flags()
    measured: Callable[[], Measured] | None = None
    first: OldState = MappingProxyType({})


Exchange = Generator[Round, Array, Outcome]


def received(collective: str, nbytes: float, world_size: int) -> float:
    """Return the bytes that a rank receives from others if each hands in ``nbytes``."""
    share = 2 / world_size if collective == "allreduce" else 1  # of a sum's ring
    return (world_size - 1) * share * nbytes


class Traits(NamedTuple):
    """What a scheme's sums are, for optimizers and adapters.

    ``compresses``: they are others than this step's, rounded to a dtype or without bias.
    ``is_noisy``: rounding without bias adds so much noise that the loss under Adam rises by more
    than 2 %. ``momentum``: decay of the scheme's own; 0 if it has none. ``accumulation``: factor by
    which steady gradients grow before selection. ``sends_moments``: sums are first moments, which
    Adam of this package takes. ``sends_signs``: sums become signs, so that an
    optimizer takes steps of one size. ``fits_differences``: differences of weights may be sent.
    """

    compresses: bool = True
    is_noisy: bool = False
    momentum: float = 0.0
    accumulation: float = 1.0
    sends_moments: bool = False
    sends_signs: bool = False
    fits_differences: bool = True


def moments_error(who: str, momentum: float) -> UnsupportedError:
    """Return the error for first moments that ``who`` sends where they are not understood."""
    return UnsupportedError(
        f"{who} sends first moments, as momentum and dense_every together say, which only Adam and "
        f"AdamW of horovod_fftcomp take, with a first beta of {momentum}. Use one of these, or "
        "give dense_every=0"
    )


class Tuner(NamedTuple):
    """Choice of how the tensors of all buckets of one scheme are compressed.

    ``scheme``: equal for all of these buckets and steps. ``is_due``: whether ``choose`` is to be
    called after this step, with tensors and committed state (NumPy arrays) of each of the buckets;
    it returns their new states. ``choice``: returns what a state has chosen for a tensor; None if
    this rank does not choose.
    """

    scheme: Scheme
    is_due: bool
    choose: Callable[[Sequence[tuple[Tensors, OldState]]], Sequence[OldState]]
    choice: Callable[[OldState, Tensor], Choice | None]


class Scheme(Protocol):
    """Compression method: a frozen dataclass of options and a list of rounds.

    The list of rounds never depends on the values of gradients. The methods here are defaults that
    subclasses inherit.
    """

    @property
    def rounds(self) -> tuple[str, ...]:
        """The collectives of every exchange, in order."""

    def possible_rounds(self) -> frozenset[tuple[str, ...]]:
        """Return every list of collectives that an exchange may have, at any step with any state.

        A graph that is built once needs all of them. To be overridden if the rounds depend on the
        step in another way than those of ``auto``.
        """
        return frozenset(self.at(step).rounds for step in (0, TRIAL_STEPS))

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` (flat float32, left unchanged unless ``context.into`` has them) over ranks.

        None stands for a frozen tensor: it sends zeros and keeps its state.
        """

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether ``exchange`` accepts device arrays and ``context.device`` in this step.

        The answer is the same on all ranks, since sums of the host and of a GPU may differ in the
        last bits.
        """
        return False

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` that a rank sends to collectives in each step.

        An estimate where the size depends on the values.
        """

    def share_nbytes(self, tensor: Tensor, state: OldState, world_size: int) -> float:
        """Return the mean over ranks of the bytes that one sends of ``tensor`` in this step.

        As ``sent_nbytes``, but with the choices in ``state``, and with later rounds.
        """
        return self.sent_nbytes(tensor)

    def received_nbytes(self, tensor: Tensor, world_size: int) -> float:
        """Return the bytes of ``tensor`` that a rank receives from others in each step.

        Sums are taken to be those of a ring. An estimate where the size depends on the values.
        """
        return received(self.rounds[-1], self.sent_nbytes(tensor), world_size)

    def spec(self) -> str:
        """Return the scheme and its options as a string; see ``spec_of``."""
        return spec_of(self)

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return by kind the arrays that ``state`` may hold of ``tensor``.

        They may depend on what has been chosen for it in ``state``, but their words may not.
        """
        words = f"residual of {list(tensor.shape)} by element"
        is_kept = getattr(self, "error_feedback", True)
        return {"residual": StateArray(tensor.numel, words, is_kept=is_kept)}

    def state_format(self, tensor: Tensor) -> str:
        """Return shape and domain of the state of ``tensor`` in words.

        A saved state can be loaded if its string is equal.
        """
        arrays = self.state_arrays(tensor, {}).values()
        return " and ".join(array.words for array in arrays if array.words) or "none"

    def at(self, step: int) -> Scheme:
        """Return the scheme to run at a step, counted from the first compressed one."""
        return self

    def unsent(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> dict[str, dict[str, Array]]:
        """Return the state after a step whose ``grads`` another scheme exchanges: the same."""
        return {kind: dict(arrays) for kind, arrays in state.items()}

    @property
    def is_sharded(self) -> bool:
        """Whether ranks own shards, of which they keep second residuals."""
        return "alltoall" in self.rounds

    def is_smaller(self, tensors: Tensors, world_size: int) -> bool:
        """Return whether it exchanges shards, and a rank receives fewer bytes than by a gather."""
        return False

    def owned(self, tensors: Tensors, state: OldState, rank: int, world_size: int) -> OldState:
        """Return a loaded state, NumPy arrays, of which this rank keeps what it owns."""
        return state

    def in_warmup(self) -> Scheme | None:
        """Return the scheme of dense warm-up steps; None: a plain sum."""
        return None

    @property
    def traits(self) -> Traits:
        """What optimizers and adapters need to know."""
        return Traits()

    def check_differences(self, who: str) -> None:
        """Raise UnsupportedError, about ``who``, unless differences of weights may be sent."""
        if not self.traits.fits_differences:
            raise UnsupportedError(
                f"{who} cannot send differences of weights: it has a momentum of its own or sends "
                "signs, so it works for gradients only. Leave momentum out, use another recipe, or "
                "sketchsgd or dgc with momentum=0.0"
            )

    def check_optimizer(self, who: str) -> None:
        """Raise UnsupportedError, about ``who``, if Adam of this package has to take the sums."""
        if self.traits.sends_moments:
            raise moments_error(who, self.traits.momentum)

    @property
    def tuner(self) -> Tuner | None:
        """Chooses how tensors are compressed, from measurements; None: nothing is chosen."""
        return None

    def residual(self, state: OldState, tensor: Tensor) -> Array:
        """Return the residual of ``tensor``, float32 in its shape, in a new array."""
        carried = state.get("residual", {}).get(tensor.name)
        if carried is None:
            return np.zeros(tensor.shape, np.float32)
        transform = self.state_arrays(tensor, state)["residual"].transform
        elements = transform.inverse(carried, tensor.numel, cpu_kernels())
        return elements.reshape(tensor.shape).copy()
