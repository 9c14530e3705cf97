"""PowerSGD on a GPU, without host synchronisation."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.kernels.cuda import Device, on_device
from horovod_fftcomp.kernels.ops import Flags
from horovod_fftcomp.schemes import Context, OldState, Outcome, Round, Tensor
from horovod_fftcomp.schemes.device_rows import BucketRows, ExchangeRows, cached, state_of

if TYPE_CHECKING:
    from horovod_fftcomp.schemes.powersgd import PowerSgd

_KERNELS = ("take_whole", "check_factors", "orthonormalize", "subtract_products", "sum_products",
            "keep_factors")  # fmt: skip


class _Bucket(BucketRows):
    """Descriptor table of a bucket.

    ``firsts``, ``seconds``: offsets of the tensors in the first and the second message, with the
    end. ``left``: the orthonormal factors, used only within a step; ``lefts``: their offsets.
    """

    def __init__(self, device: Device, tensors: Sequence[Tensor], scheme: PowerSgd) -> None:
        super().__init__(device, "LOW_RANK", tensors, _KERNELS)
        self.matrices = [scheme.matrix(tensor) for tensor in tensors]
        for field in ("rows", "columns", "rank"):
            self.rows[field] = [getattr(matrix, field) for matrix in self.matrices]
        self.firsts = np.cumsum([0, *(matrix.first_numel for matrix in self.matrices)])
        self.seconds = np.cumsum([0, *(matrix.second_numel for matrix in self.matrices)])
        self.lefts = np.cumsum([0, *(matrix.rows * matrix.rank for matrix in self.matrices)])
        self.left = device.empty(max(1, int(self.lefts[-1])))
        self._scratch = device.empty(max(1, int(self.lefts[-1])), np.float64)
        self.rows["left"] = device.address(self.left) + 4 * self.lefts[:-1]
        self.rows["scratch"] = device.address(self._scratch) + 8 * self.lefts[:-1]

    def on_tensors(self, name: str, table: Any, *arguments: Any) -> None:
        """Launch a kernel with one block for each tensor of a table."""
        shared = self.tables.SQUARES_NBYTES
        self.launch(name, len(self.rows), [table, *arguments], shared)


class _Exchange(ExchangeRows):
    def __init__(
        self,
        scheme: PowerSgd,
        tensors: Sequence[Tensor],
        grads: Sequence[Any],
        state: OldState,
        context: Context,
    ) -> None:
        assert context.device is not None
        self.bucket = cached(_Bucket, context.device, tensors, scheme)
        carried = state.get("residual", {}) if scheme.error_feedback else {}
        super().__init__(self.bucket, tensors, grads, carried, context)
        self._whole = self.new("whole", np.array(self.takes_part) & (self.rows["rank"] > 0))
        self._right = self._started(scheme, state)
        self.state = {"factor": dict[str, Any]()}
        if scheme.error_feedback:
            self.state["residual"] = state_of(tensors, grads, carried, self._whole)

    def _named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        named = zip(self.tensors, arrays, strict=True)
        return {tensor.name: array for tensor, array in named if array is not None}

    def _started(self, scheme: PowerSgd, state: OldState) -> list[Any]:
        """Return Q of each matrix: of the last step, or a random first one."""
        factors, found = state.get("factor", {}), []
        for row, tensor in zip(self.rows, self.tensors, strict=True):
            right = factors.get(tensor.name)
            if row["rank"] and (right is None or isinstance(right, np.ndarray)):
                right = scheme.right(tensor, state).reshape(-1)
            found.append(on_device(right, self.device) if row["rank"] else None)
        self.point("right", found)
        return found

    def project(self) -> Any:
        """Return the message of the first round: M Q, or the dense tensor."""
        bucket, firsts = self.bucket, self.bucket.firsts
        message = self.device.zeros(max(1, int(firsts[-1])))[
            : int(firsts[-1])
        ]  # zeros for frozen tensors
        sent_whole = np.array(self.takes_part) & (self.rows["rank"] == 0)
        self.rows["whole"][sent_whole] = (self.address(message) + 4 * firsts[:-1])[sent_whole]
        bucket.on_tiles("take_whole", bucket.uploads.of("grads", self.rows))
        if self.measures:
            self.square(True, "whole")
            self.square(False, "whole")
        self.rows["whole"][sent_whole] = 0  # it is sent whole and has no residual
        self._multiply(self._right, _split(message, firsts), False)
        return message

    def _multiply(self, factors: Sequence[Any], shares: Sequence[Any], turned: bool) -> None:
        """Write the products of matrices, transposed if ``turned``, and factors."""
        for whole, matrix, factor, share in zip(
            self._whole, self.bucket.matrices, factors, shares, strict=True
        ):
            if whole is not None:
                self.device.multiply(whole, matrix.rows, factor, share, turned)

    def project_back(self, received: Any) -> Any:
        """Return the message of the second round, M^T P; subtract the approximation from M."""
        bucket, seconds = self.bucket, self.bucket.seconds
        self._enter("first", received, bucket.firsts)
        self.not_finite = self.device.zeros(2 * len(self.rows), np.uint32)
        message = self.device.zeros(int(seconds[-1]))
        self._enter("own", message, seconds)
        table = bucket.uploads.of("firsts", self.rows)
        bucket.on_tensors("check_factors", table, np.uint32(0), self.not_finite)
        bucket.on_tensors("orthonormalize", table)
        self._multiply(_split(bucket.left, bucket.lefts), _split(message, seconds), True)
        bucket.on_tiles("subtract_products", table)
        if self.measures:
            self.square(False, "whole")
        return message

    def _enter(self, field: str, array: Any, begins: np.ndarray) -> None:
        """Enter the addresses of the tensors' slices of an array in ``field``."""
        if len(array) != begins[-1]:
            raise PayloadError(f"{len(array)} values arrived, {begins[-1]} were expected")
        self.rows[field] = self.address(array) + 4 * begins[:-1]

    def sum(self, received: Any) -> list[Any]:
        """Return the sums, and put the next step's factors into the state."""
        bucket, n = self.bucket, len(self.rows)
        self._enter("second", received, bucket.seconds)
        sums = self.new("sum", [True] * n)
        factors = [
            self.device.empty(matrix.columns * matrix.rank) if matrix.rank else None
            for matrix in bucket.matrices
        ]
        self.point("factor", factors)
        self.state["factor"] = self._named(factors)
        self._table = bucket.uploads.of("seconds", self.rows)
        bucket.on_tensors("check_factors", self._table, np.uint32(1), self.not_finite)
        bucket.on_tiles("sum_products", self._table, self.not_finite, self.not_finite[n:])
        bucket.on_tensors("keep_factors", self._table, np.uint64(0))  # while ``received`` is there
        return sums


def _split(array: Any, begins: np.ndarray) -> list[Any]:
    return [array[begin:end] for begin, end in itertools.pairwise(begins)]


def powersgd_on_device(
    scheme: PowerSgd,
    tensors: Sequence[Tensor],
    grads: Sequence[Any],
    state: OldState,
    context: Context,
) -> Generator[Round, Any, Outcome]:
    """Exchange factors; see ``PowerSgd.exchange``. NumPy arrays are copied to the device."""
    exchange = _Exchange(scheme, tensors, grads, state, context)
    first = yield Round("allreduce", exchange.project())
    sums = exchange.sum((yield Round("allreduce", exchange.project_back(first))))
    measured = exchange.energies() if exchange.measures else None
    flags = exchange.not_finite  # there are no payloads that could be corrupt
    return Outcome(sums, exchange.state, Flags(True, flags, flags[:0]), measured)
