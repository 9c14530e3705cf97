"""What a compressor is told besides its recipe: one table of keywords with their checks."""

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


@dataclass(frozen=True)
class Settings:
    """Keyword arguments of a compressor besides those of its recipe.

    Parameters
    ----------
    min_numel
        Smallest number of elements of a tensor that is compressed; vectors never are.
    bucket_nbytes
        Most bytes of tensors that are exchanged together, counted in float32.
    rules
        Pairs (names, action); the first match counts. Names: a shell pattern or a function of the
        ``Tensor``. Action: "dense", a density or a dict {"recipe": ..., options}.
    process_set
        The optimizer's ``hvd.ProcessSet``; None: all ranks.
    grad_scaler
        Scaler of the loss in mixed precision, whose scale the residuals follow.
    replica_check
        Reaction to ranks whose parameters differ: "warn", "broadcast" (the first's) or "off".
    shadow_check
        Steps of a GPU from one to the next of which the CPU computes a tensor too; 0: no check.
    recover
        How ``report`` raises the density when a metric gets worse; None: not at all.
    record
        New .npz file into which the first rank writes its gradients.
    record_every
        Steps from one recorded step to the next.
    live_view
        File to which the first rank appends a line of JSON with figures of the step.
    scalars
        Writer of the same figures: ``add_scalar(name, value, step)``, or one of ``tf.summary``.
    live_every
        Steps from one line to the next.
    timeout_s
        Seconds that ranks wait for another one before the late rank is reported.
    on_timeout
        Reaction to a late rank: "raise" ends the job, "warn" goes on waiting.
    """

    min_numel: int = MIN_NUMEL
    bucket_nbytes: int = BUCKET_NBYTES
    rules: Sequence[Rule] = ()
    process_set: Any = None
    grad_scaler: Any = None
    replica_check: Literal["warn", "broadcast", "off"] = "warn"
    shadow_check: int = 1000
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
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be a whole number of {counted} from 1 up, "
                    f"got {getattr(self, name)}"
                )
        if not 0 < self.timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(
                f"timeout_s must be a number of seconds above 0 and at most "
                f"{threading.TIMEOUT_MAX:.0f}, got {self.timeout_s!r}"
            )
        if self.shadow_check < 0:
            raise ValueError(
                f"shadow_check must be a whole number of steps from 1 up, or 0 for no check, "
                f"got {self.shadow_check}"
            )
        _check_process_set(self.process_set)


def _check_process_set(process_set: Any) -> None:
    if process_set is None:
        return
    if not hasattr(process_set, "process_set_id"):
        raise TypeError(
            "process_set must be a hvd.ProcessSet or None, got "
            f"{process_set!r} ({type(process_set).__name__}); make one by hvd.add_process_set"
        )
    if process_set.process_set_id is None:
        raise ValueError(
            "process_set is not registered; make it by hvd.add_process_set, or give it to "
            "hvd.init(process_sets=...)"
        )
