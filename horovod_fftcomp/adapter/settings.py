"""Settings of a compressor besides its recipe: keyword arguments, their defaults and checks."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from horovod_fftcomp.engine.buckets import BUCKET_NBYTES, MIN_NUMEL
from horovod_fftcomp.engine.policy import Rule
from horovod_fftcomp.monitor.density_recovery import Recover
from horovod_fftcomp.schemes.options import checked, kinds_of

_COUNTS = {
    "min_numel": "elements",
    "bucket_nbytes": "bytes",
    "record_every": "steps",
    "live_every": "steps",
}


def is_elastic() -> bool:
    """Return whether Horovod's job is elastic, by HOROVOD_ELASTIC, as Horovod itself decides it."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))


@dataclass(frozen=True)
class Settings:
    """Keyword arguments of a compressor besides those of its recipe.

    Parameters
    ----------
    min_numel
        Size in elements from which a tensor is compressed; smaller ones and vectors stay dense,
        except with recipes that send signs, which compress all tensors.
    bucket_nbytes
        Maximum size of a bucket (tensors that are exchanged together), in bytes of float32.
    rules
        Pairs (names, action) for single tensors; the first match applies. Names: a shell pattern,
        or a function that takes a ``Tensor`` and returns a bool. Action: "dense", a density, or a
        dict {"recipe": ..., options}.
    process_set
        ``hvd.ProcessSet`` of the optimizer; None: all ranks.
    grad_scaler
        Loss scaler of mixed precision training, or with TensorFlow a function that returns the loss
        scale; residuals are rescaled when the scale changes.
    replica_check
        What to do if the ranks' parameters differ: "warn", "broadcast" (warn and copy the first
        rank's parameters to all) or "off" (do not compare them).
    recover
        ``Recover`` object: how ``report`` raises the density when a metric gets worse; None: never.
    record
        Path of a new folder in which the first rank records its gradients, a .npz file per step;
        None: no recording.
    record_every
        Interval in steps at which gradients are recorded.
    live_view
        Path of a file to which the first rank appends a line of JSON with a step's statistics.
    scalars
        TensorBoard writer for the same statistics: an object with ``add_scalar(name, value,
        step)``, or with TensorFlow a writer of ``tf.summary``.
    live_every
        Interval in steps at which ``live_view`` and ``scalars`` are written.
    timeout_s
        Time in seconds that ranks wait for another rank before it is reported as late.
    on_timeout
        What to do about a late rank: "raise" ends the job, "warn" reports it and keeps waiting.
    """

    min_numel: int = MIN_NUMEL
    bucket_nbytes: int = BUCKET_NBYTES
    rules: Sequence[Rule] = ()
    process_set: Any = None
    grad_scaler: Any = None
    replica_check: Literal["warn", "broadcast", "off"] = "warn"
    recover: Recover | None = None
    record: str | os.PathLike[str] | None = None
    record_every: int = 50
    live_view: str | os.PathLike[str] | None = None
    scalars: Any = None
    live_every: int = 50
    timeout_s: float = 600.0
    on_timeout: Literal["raise", "warn"] = "raise"

    def __post_init__(self) -> None:
        kinds = kinds_of(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            given = checked(field.name, value, kinds[field.name], field.default)
            object.__setattr__(self, field.name, given)
        for name, counted in _COUNTS.items():
            if (given := getattr(self, name)) < 1:
                raise ValueError(
                    f"{name} must be a whole number of {counted} from 1 up, got {given}"
                )
        if not 0 < self.timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(
                f"timeout_s must be a number of seconds above 0 and at most "
                f"{threading.TIMEOUT_MAX:.0f}, got {self.timeout_s!r}"
            )
        _check_process_set(self.process_set)


def _check_process_set(process_set: Any) -> None:
    if process_set is None:
        return
    if not hasattr(process_set, "process_set_id"):
        raise TypeError(
            "process_set must be a hvd.ProcessSet or None, got "
            f"{process_set!r} ({type(process_set).__name__}); make one with hvd.add_process_set"
        )
    if process_set.process_set_id is None:
        raise ValueError(
            "process_set is not registered with Horovod; make it with hvd.add_process_set, or pass "
            "it to hvd.init(process_sets=...)"
        )
