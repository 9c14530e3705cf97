"""Ops: the arithmetic of schemes on whole buckets, where the arrays lie: on the host or on a GPU.

Schemes call ops and never ask where. Nothing waits for a GPU but ``Ops.get`` and ``Deferred``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from horovod_fftcomp.codec.dense import DenseCodec
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.kernels.index_plan import IndexPlan
from horovod_fftcomp.kernels.plans import BucketPlan, LeftFactors, LowRankPlan
from horovod_fftcomp.types import Array, Arrays, OldState, Tensors
from horovod_fftcomp.wire.header import Header

AnyCodec = Codec | DenseCodec
Codecs = Sequence[AnyCodec]  # one for each tensor

Deferred = Callable[[], Any]  # returns a result that is on its way; waits for it


class Flags(NamedTuple):
    """Whether an exchange is finite.

    ``finite``: as far as the host knows. ``not_finite``: None if the host computed all of it; else
    uint32 words on the device, any of them nonzero if a sum is not finite. ``arrived``: status of
    the payloads, four words each, see ``Decoder.decode``.
    """

    finite: bool = True
    not_finite: Any = None
    arrived: Any = None


class Momentum(NamedTuple):
    """Momentum correction in one step; see ``MomentumCorrection``.

    ``decay``: of velocities. ``largest_norm``: to which each gradient is clipped, or None.
    ``gain``: factor of gradients that are not clipped.
    """

    decay: float
    nesterov: bool
    masking: bool
    largest_norm: float | None
    gain: float = 1.0


class Feedback(NamedTuple):
    """What is sent besides the gradient, and what is kept of it; see ``schemes.allgather``.

    ``keep``: residuals are kept. ``decay`` multiplies the old ones. ``keeps_sent``: sent values
    stay in them. ``sign``: sums become signs. ``momentum``: of the gradients. ``beta``: of the
    residuals' low-pass filter, which coders leave to ``Ops.mix``.
    """

    keep: bool = True
    decay: float = 1.0
    keeps_sent: bool = False
    sign: bool = False
    momentum: Momentum | None = None
    beta: float = 1.0


class EncodedBucket(NamedTuple):
    """Message of a bucket, and the new state of each tensor, None where nothing is kept.

    ``squares``: None, or returns by a tensor's number the sums of squares of the gradient, of
    gradient plus residual, and of the new residual. ``left``: None, or returns the sum of squares
    of all new residuals, where a device computes it in every step.
    """

    message: Any
    residuals: Arrays
    velocities: Arrays
    squares: Callable[[], Mapping[int, tuple[float, float, float]]] | None
    left: Callable[[], float] | None = None


class Into(NamedTuple):
    """Where sums may be written: one float32 array for each tensor.

    A sum that is written there is multiplied by ``factor`` and returned as that same object. Any
    other sum is a new array, without the factor.
    """

    arrays: Sequence[Any]
    factor: float


class Summed(NamedTuple):
    """Sums of payloads, flat float32.

    ``payloads``: returns those of rank 0, then of rank 1, and so on; None on a device.
    """

    sums: list[Any]
    flags: Flags
    payloads: Callable[[], list[tuple[Header, Array]]] | None = None


class Coder(Protocol):
    """Encoder of a bucket's tensors into one message, and decoder of all ranks' messages."""

    def encode(
        self, grads: Arrays, state: OldState, at: tuple[int, int], feedback: Feedback, measure: bool
    ) -> EncodedBucket:
        """Return the message of gradients plus residuals, and the new state.

        ``grads``: flat float32, None for a frozen tensor, which sends zeros and has no new state.
        ``state``: by kind and name; not changed. ``at``: step and rank, which seed random numbers.
        ``measure``: sum the squares.
        """

    def decode_sum(self, gathered: Any, sign: bool, into: Into | None = None) -> Summed:
        """Return the sums of all ranks' messages, uint8, added in rank order; see ``Into``.

        Raises PayloadError for bytes that are not such messages, as far as the host reads them.
        """


class Ops(Protocol):
    """Operations on flat arrays, NumPy's or a device's; new arrays lie with their inputs.

    ``grads`` are float32, one for each tensor, None for a frozen one.
    """

    @property
    def device(self) -> Device | None:
        """The device, or None on the host."""

    def empty(self, n: int, dtype: type = ...) -> Any:
        """Return an uninitialized array of ``n`` elements, float32 by default."""

    def zeros(self, n: int, dtype: type = ...) -> Any:
        """Return an array of ``n`` zeros, float32 by default."""

    def put(self, array: Any) -> Any:
        """Return ``array``, NumPy's or not, where these ops work."""

    def get(self, array: Any) -> Array:
        """Return ``array`` as NumPy's; waits for the device."""

    def checked(self, kind: str, array: Any, numel: int) -> Any:
        """Return an array of the state, or None, where these ops work.

        Raises ValueError, naming ``kind``, if it is NumPy's and not ``numel`` float32 elements.
        """

    def join(self, parts: Arrays, numels: Sequence[int], dtype: type = ...) -> Any:
        """Return ``parts`` of ``dtype``, by default float32, in one new array, zeros for None."""

    def rejoin(self, parts: Arrays, numels: Sequence[int], dtype: type = ...) -> Any:
        """Return the same; parts that follow one another in memory may be returned in place."""

    def sum_rows(self, values: Any, own: Arrays, numels: Sequence[int], place: int) -> Any:
        """Return the sum of equal rows of ``values``, float32, and ``own`` as row ``place``.

        ``own``: arrays of ``numels`` elements, joined as long as a row; None for zeros.
        """

    def squares(self, arrays: Arrays) -> Deferred:
        """Return a function that returns the sum of squares of each array, 0.0 for None."""

    def flags_of(self, values: Any) -> Flags:
        """Return the flags of sums, float32: not finite if any of ``values`` is not."""

    def both(self, a: Flags, b: Flags) -> Flags:
        """Return the flags of two parts of an exchange."""

    def to_half(self, values: Any, largest: int, limit: float) -> Any:
        """Return ``values`` as float16, saturated at ``limit``.

        If the float32 bits of a magnitude exceed ``largest``, all of them become NaN.
        """

    def from_half(self, values: Any) -> Any:
        """Return float16 ``values`` as float32."""

    def coder(self, codecs: Codecs, tensors: Tensors, n_ranks: int) -> Coder:
        """Return the coder of a bucket, one codec for each tensor; made once for a bucket."""

    def compensate(
        self, plan: LowRankPlan, grads: Arrays, residuals: Arrays
    ) -> tuple[list[Any], Any]:
        """Return (gradient plus residual of each tensor, the first message of a low-rank scheme).

        Of a tensor of rank 0 the sum is its part of the message; the parts of the others are not
        written yet. The sum is None for a frozen tensor; on the host for one that is not finite
        too, whose part of the message is NaN.
        """

    def project(self, plan: LowRankPlan, whole: Arrays, right: Arrays, message: Any) -> None:
        """Write the product of each matrix in ``whole`` and its right factor to ``message``."""

    def orthonormalize(self, plan: LowRankPlan, first: Any) -> LeftFactors:
        """Return the matrices of a first message with orthonormal columns."""

    def project_back(self, plan: LowRankPlan, whole: Arrays, left: LeftFactors) -> Any:
        """Return the second message: products of the transposed matrices and the left factors."""

    def subtract_product(
        self, plan: LowRankPlan, whole: Arrays, left: LeftFactors, own: Any
    ) -> list[Any]:
        """Subtract from ``whole``, in place, the products of left factors and a second message.

        Returns these residuals; None for a tensor of rank 0, which is sent completely.
        """

    def product(
        self, plan: LowRankPlan, left: LeftFactors, first: Any, second: Any
    ) -> tuple[list[Any], Flags]:
        """Return the sum of each tensor from those of both messages: NaN if not finite."""

    def nonzero_columns(self, plan: LowRankPlan, second: Any, right: Arrays) -> list[Any]:
        """Return the right factors in ``second``, with columns of ``right`` for those of zeros.

        Each column is multiplied by a power of two, which makes its peak 1 to 4: products with it
        then have the magnitude of the gradient, not of its square.
        """

    def accumulate(
        self,
        plan: BucketPlan,
        grads: Arrays,
        velocities: Arrays,
        residuals: Arrays,
        momentum: Momentum,
    ) -> tuple[Any, list[Any]]:
        """Return (residual plus new velocity of all tensors in one array, the new velocities).

        A frozen tensor has zeros and None. ``velocities``, ``residuals``: old ones, or None.
        """

    def mix(self, old: Arrays, new: Arrays, beta: float) -> list[Any]:
        """Return (1 - beta) * old + beta * new of each tensor, in ``new`` itself on a device.

        The arrays are float32 or complex64. None stands for zeros in ``old``; where ``new`` is
        None, so is the result.
        """

    def cleared(self, array: Any) -> Any:
        """Return the new state for an array that becomes zeros; None if there was none.

        On the host always None, which stands for zeros. A device needs an array, to which the old
        one is copied if the step is dropped.
        """

    # Values at common positions. Messages hold the values of all tensors one after another.

    def common_index(
        self, plan: IndexPlan, grads: Arrays, residuals: Arrays, measures: bool
    ) -> Any:
        """Return a bucket's gradients and old residuals, None for zeros, for the ops below.

        ``measures``: whether ``index_energies`` will be called. ValueError for arrays of another
        size than in the plan.
        """

    def winners(self, bucket: Any, begin: int, end: int, nbytes: int) -> Any:
        """Return the packed offsets of the largest |gradient + residual| in each chunk, uint8.

        Of chunks ``begin`` to ``end`` of the bucket; of equal magnitudes the lower index wins.
        """

    def locate(self, bucket: Any, gathered: Any, step: int) -> Any:
        """Return the positions for the packed offsets of all ranks, one after another.

        On the host PayloadError is raised for an offset beyond its chunk; on a device ``take``
        notes it in ``Flags.arrived``.
        """

    def count_common(self, bucket: Any, positions: Any, begin: int, end: int) -> Deferred:
        """Return a function that returns how many of the positions this rank selects itself.

        Those of chunks ``begin`` to ``end`` do not count.
        """

    def sketch(self, bucket: Any, signs: Array) -> Any:
        """Return the sum of each row of gradient + residual, its elements times ``signs``.

        Only on the host, as ``largest_rows``, after ``low_pass``. Halves of a row are added until
        one element remains. A frozen tensor and one without a whole row have sums of 0; all sums
        are NaN if an element of any tensor is not finite.
        """

    def largest_rows(self, bucket: Any, sums: Any, length: int) -> Any:
        """Return the positions of the rows of the largest |sum|, and of what is in no row.

        Of equal magnitudes the lower index wins. All positions of a tensor that is sent whole.
        """

    def draw(self, plan: IndexPlan, progressions: Sequence[tuple[int, int]]) -> Any:
        """Return the positions (a j + c) mod n for j below k, given (a, c) for each tensor."""

    def low_pass(self, bucket: Any) -> list[Any]:
        """Return residual + beta * gradient of each tensor: the new residuals if nothing is sent.

        None for a frozen tensor, and for all if the plan keeps no residuals.
        """

    def take(self, bucket: Any, positions: Any, halves: tuple[int, float] | None) -> Any:
        """Return the message: gradient + residual at the positions, NaN if not all are finite.

        Corrects the new residuals there by what is sent. ``halves``: as for ``to_half``; None for
        float32.
        """

    def index_energies(self, bucket: Any) -> Callable[[], Mapping[int, tuple]]:
        """Return a function that returns the energies by a tensor's number; call after ``take``.

        They are the sums of squares of its gradient, of gradient + residual, and of what is not
        sent of them; left out for a tensor that is frozen or, on the host, not finite.
        """

    def scatter_sum(
        self, bucket: Any, received: Any, sources: Sequence[Any]
    ) -> tuple[list[Any], Flags]:
        """Return the sums of the received values at their positions, and whether all are finite.

        ``sources``: the positions of each message in ``received``. The sum of a tensor of which
        a value is not finite is NaN everywhere, so that no optimizer uses the rest.
        """
