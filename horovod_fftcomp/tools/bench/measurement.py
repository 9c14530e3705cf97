"""What was measured of one compressor, and the figures that follow from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

# "memcpy", "encode", "feedback" or "decode" -> seconds, in the order in which they were taken
Samples = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one compressor did with one tensor, or with several added up.

    Times are medians in seconds. ``energy``, ``decoded_energy`` and ``error_energy`` are sums of
    squares of the gradient, of what the others receive, and of the difference, over all measured
    steps. The ``feedback_`` ones are those of gradient plus residual. ``entropy_bits`` is what
    the positions of ``k`` coefficients of ``n_bins`` take at least. ``samples_s`` are the times
    whose medians these are, with those of the memcpy beside; sums have none.
    """

    label: str
    numel: int
    sent_nbytes: int
    memcpy_s: float
    encode_s: float
    feedback_s: float | None
    decode_s: float
    energy: float
    decoded_energy: float
    error_energy: float
    feedback_energy: float | None
    feedback_error_energy: float | None
    k: int = 0
    positions_nbytes: int = 0
    entropy_bits: float = 0.0
    samples_s: Samples = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Float32 bytes over bytes as sent."""
        return 4 * self.numel / self.sent_nbytes

    @property
    def relative_error(self) -> float:
        """Norm of what is lost over the norm of the gradient."""
        return _relative(self.error_energy, self.energy)

    @property
    def feedback_relative_error(self) -> float | None:
        """The same of gradient plus residual: what a training loses for the time being."""
        if self.feedback_error_energy is None or self.feedback_energy is None:
            return None
        return _relative(self.feedback_error_energy, self.feedback_energy)

    @property
    def kept_energy(self) -> float:
        """Share of the gradient's sum of squares that arrives."""
        return self.decoded_energy / self.energy if self.energy else 1.0

    @property
    def bits_per_position(self) -> float | None:
        """Bits that each position takes as sent; None where none is sent."""
        return 8 * self.positions_nbytes / self.k if self.positions_nbytes else None

    @property
    def entropy_per_position(self) -> float | None:
        """Bits that each position would take at its entropy."""
        return self.entropy_bits / self.k if self.positions_nbytes else None

    def as_row(self) -> dict[str, object]:
        """Return everything as JSON values."""
        derived = (
            "ratio",
            "relative_error",
            "feedback_relative_error",
            "kept_energy",
            "bits_per_position",
            "entropy_per_position",
        )
        times = {"encode": self.encode_s, "feedback": self.feedback_s, "decode": self.decode_s}
        per_memcpy = {
            f"{name}_memcpys": None if seconds is None else seconds / self.memcpy_s
            for name, seconds in times.items()
        }
        return (
            dataclasses.asdict(self)
            | per_memcpy
            | {"encode_bytes_per_s": 4 * self.numel / (self.feedback_s or self.encode_s)}
            | {name: getattr(self, name) for name in derived}
        )


def _relative(error_energy: float, energy: float) -> float:
    return math.sqrt(error_energy / energy) if energy else 0.0


def added(measurements: Sequence[Measurement]) -> Measurement:
    """Return the sums over several tensors of one compressor."""
    columns = {}
    for field in dataclasses.fields(Measurement):
        values = [getattr(one, field.name) for one in measurements]
        if field.name == "label":
            columns[field.name] = values[0]
        elif field.name != "samples_s":
            columns[field.name] = None if None in values else sum(values)
    return Measurement(**columns)


def entropy_bits(n: int, k: int) -> float:
    """Return the bits that tell which ``k`` of ``n`` places are meant: n H(k/n)."""
    if not 0 < k < n:
        return 0.0
    return -k * math.log2(k / n) - (n - k) * math.log2((n - k) / n)
