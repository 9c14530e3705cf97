"""What a compressor is told besides its recipe: one table of keywords with their checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_fftcomp.buckets import BUCKET_NBYTES, MIN_NUMEL
from horovod_fftcomp.policy import Rule
from horovod_fftcomp.recovery import Recover


@dataclass(frozen=True)
class Settings:
    """What a compressor is told besides its recipe.

    ``min_numel``: smaller tensors, and vectors, travel dense. ``bucket_nbytes``: dense size of what
    is exchanged together. ``rules``: (names, action) pairs, the first match counts; names are a
    shell pattern or a function of the ``Tensor``; the action is "dense", a density, or a dict
    {"recipe": ..., options}. ``process_set``: the optimizer's; None: all ranks. ``grad_scaler``:
    what scales the loss in mixed precision; the residuals follow its scale. ``replica_check``:
    "warn" or "broadcast" (from the first rank) where ranks' parameters differ, or "off".
    ``recover``: how ``report`` raises the density. ``record``: a new .npz file into which the first
    rank writes its gradients at every ``record_every``-th step. ``live_view``: a file to which the
    first rank appends a line of JSON at every ``live_every``-th step; ``scalars``: a writer that
    gets the same numbers, with ``add_scalar(name, value, step)``, or for TensorFlow one of
    ``tf.summary``. ``timeout_s``: seconds that a rank waits for the others before every rank says
    who is late; then the job ends, or with ``on_timeout="warn"`` goes on waiting.
    """

    min_numel: int = MIN_NUMEL
    bucket_nbytes: int = BUCKET_NBYTES
    rules: Sequence[Rule] = ()
    process_set: Any = None
    grad_scaler: Any = None
    replica_check: str = "warn"
    recover: Recover | None = None
    record: str | os.PathLike[str] | None = None
    record_every: int = 50
    live_view: str | os.PathLike[str] | None = None
    scalars: Any = None
    live_every: int = 50
    timeout_s: float = 600.0
    on_timeout: str = "raise"

    def __post_init__(self) -> None:
        if self.replica_check not in ("warn", "broadcast", "off"):
            raise ValueError(
                f"replica_check must be 'warn', 'broadcast' or 'off', got {self.replica_check!r}"
            )
        if self.on_timeout not in ("raise", "warn"):
            raise ValueError(f"on_timeout must be 'raise' or 'warn', got {self.on_timeout!r}")
        if self.process_set is not None and self.process_set.process_set_id is None:
            raise ValueError(
                "process_set is not registered; make it by hvd.add_process_set, or give it to "
                "hvd.init(process_sets=...)"
            )
        for name in ("record", "live_view"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, str | os.PathLike):
                raise TypeError(f"{name} must be a path, got {path!r}")
        for name in ("record_every", "live_every"):
            steps = getattr(self, name)
            if type(steps) is not int or steps < 1:
                raise ValueError(f"{name} must be a whole number of steps from 1, got {steps!r}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, got {self.timeout_s!r}")
