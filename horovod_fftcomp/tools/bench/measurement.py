"""Measurement of one compressor, and the figures derived from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

# "memcpy", "encode", "feedback" or "decode" -> seconds, in the order in which they were taken
Samples = dict[str, list[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurement of a compressor on one tensor, or the sum over several tensors.

    Times are medians in seconds. ``energy``, ``decoded_energy`` and ``error_energy``: sums of
    squares of the gradient, of the decoded gradient and of their difference, over all measured
    steps; with the prefix ``feedback_`` those of gradient plus residual. ``entropy_bits``: the
    least size of the positions of ``k`` of ``n_bins`` coefficients. ``samples_s``: all times, those
    of the memcpy included; empty for a sum over tensors.
    """

    label: str
    numel: int
    sent_nbytes: int
    memcpy_s: float
    encode_s: float
    feedback_s: float | None = None
    decode_s: float
    energy: float
    decoded_energy: float
    error_energy: float
    feedback_energy: float | None = None
    feedback_error_energy: float | None = None
    k: int = 0
    positions_nbytes: int = 0
    entropy_bits: float = 0.0
    samples_s: Samples = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Compression ratio: float32 bytes over sent bytes."""
        return 4 * self.numel / self.sent_nbytes

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the gradient."""
        return _relative(self.error_energy, self.energy)

    @property
    def feedback_relative_error(self) -> float | None:
        """Norm of the new residual over the norm of gradient plus old residual."""
        if self.feedback_error_energy is None or self.feedback_energy is None:
            return None
        return _relative(self.feedback_error_energy, self.feedback_energy)

    @property
    def kept_energy(self) -> float:
        """Sum of squares of the decoded gradient over that of the gradient."""
        return self.decoded_energy / self.energy if self.energy else 1.0

    @property
    def bits_per_position(self) -> float | None:
        """Sent bits for each position; None if no positions are sent."""
        return 8 * self.positions_nbytes / self.k if self.positions_nbytes else None

    @property
    def entropy_per_position(self) -> float | None:
        """Entropy of a position in bits; None if no positions are sent."""
        return self.entropy_bits / self.k if self.positions_nbytes else None

    def as_row(self) -> dict[str, object]:
        """Return all fields and derived figures as JSON values."""
        derived = [name for name, one in vars(Measurement).items() if isinstance(one, property)]
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
    """Return the sum of the measurements of one compressor on several tensors."""
    columns = {}
    for field in dataclasses.fields(Measurement):
        values = [getattr(one, field.name) for one in measurements]
        if field.name == "label":
            columns[field.name] = values[0]
        elif field.name != "samples_s":
            columns[field.name] = None if None in values else sum(values)
    return Measurement(**columns)


def entropy_bits(n: int, k: int) -> float:
    """Return the entropy in bits of a choice of ``k`` of ``n`` positions: n H(k/n)."""
    if not 0 < k < n:
        return 0.0
    return -k * math.log2(k / n) - (n - k) * math.log2((n - k) / n)
