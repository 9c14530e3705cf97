"""Ops: the arithmetic of schemes on whole buckets, where the arrays lie: on the host or on a GPU.

Schemes call ops and never ask where. Nothing waits for a GPU but ``Ops.get`` and ``Deferred``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.types import Array

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


class Ops(Protocol):
    """Operations on flat arrays, NumPy's or a device's; new arrays lie with their inputs.

    ``grads`` are float32, one for each tensor, None for a frozen one.
    """

    @property
    def device(self) -> Device | None:
        """The device, or None on the host."""
        ...

    def empty(self, n: int, dtype: type = ...) -> Any:
        """Return an uninitialized array of ``n`` elements, float32 by default."""
        ...

    def zeros(self, n: int, dtype: type = ...) -> Any:
        """Return an array of ``n`` zeros, float32 by default."""
        ...

    def put(self, array: Any) -> Any:
        """Return ``array``, NumPy's or not, where these ops work."""
        ...

    def get(self, array: Any) -> Array:
        """Return ``array`` as NumPy's; waits for the device."""
        ...

    def join(self, parts: Sequence[Any], numels: Sequence[int]) -> Any:
        """Return float32 ``parts`` concatenated in a new array, with zeros for None."""
        ...

    def squares(self, arrays: Sequence[Any]) -> Deferred:
        """Return a function that returns the sum of squares of each array, 0.0 for None."""
        ...

    def flags_of(self, values: Any) -> Flags:
        """Return the flags of sums, float32: not finite if any of ``values`` is not."""
        ...

    def both(self, a: Flags, b: Flags) -> Flags:
        """Return the flags of two parts of an exchange; ``arrived`` is that of ``a``."""
        ...

    def to_half(self, values: Any, largest: int, limit: float) -> Any:
        """Return ``values`` as float16, saturated at ``limit``.

        If the float32 bits of a magnitude exceed ``largest``, all of them become NaN.
        """
        ...

    def from_half(self, values: Any) -> Any:
        """Return float16 ``values`` as float32."""
        ...
