"""Step log: a JSON line and scalars about compression at every n-th step of a training.

Framework-independent: an adapter supplies the function that writes a scalar.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from horovod_fftcomp.errors import warn

# Function of (name, value, step), like ``SummaryWriter.add_scalar``.
AddScalar = Callable[[str, float, int], Any]

_NO_SCALARS = ("step", "steps", "residual_tensor")


def figures(
    before: Mapping[str, Any], now: Mapping[str, Any], residual_ratios: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of the steps between two ``Compressor.stats``, rounded to six decimals.

    Values that are not finite are None. ``before``, ``now``: results of ``Compressor.stats``; an
    empty ``before`` stands for the start. Bytes, milliseconds and ``collectives`` are means over
    ``steps``; ``relative_error``, ``kept_energy`` (1 - relative_error^2) and the largest of
    ``residual_ratios`` are of the last measured step, ``density`` is the present one.
    """

    def passed(key: str) -> float:
        return now[key] - before.get(key, 0)

    def mean(key: str, factor: float = 1.0) -> float:
        return factor * passed(key) / steps if steps else math.nan

    steps, sent_nbytes = passed("steps"), passed("sent_nbytes")
    relative_error = float(now["relative_error"])
    worst = max(residual_ratios, key=residual_ratios.__getitem__, default=None)
    found = {
        "steps": steps,
        "skipped_steps": passed("skipped_steps"),
        "ratio": passed("dense_nbytes") / sent_nbytes if sent_nbytes else math.nan,
        "sent_nbytes": mean("sent_nbytes"),
        "received_nbytes": mean("received_nbytes"),
        "collectives": mean("collectives"),
        "encode_ms": mean("encode_s", 1e3),
        "wait_ms": mean("wait_s", 1e3),
        "decode_ms": mean("decode_s", 1e3),
        "relative_error": relative_error,
        "kept_energy": 1 - relative_error**2,
        "residual_ratio": None if worst is None else float(residual_ratios[worst]),
        "residual_tensor": worst,
        "density": now["density"],
    }
    return {name: _rounded(v) if isinstance(v, float) else v for name, v in found.items()}


def _rounded(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def check_folder_of(path: Path, option: str) -> None:
    """Raise FileNotFoundError unless the folder is there in which ``option`` makes ``path``."""
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{option}: the folder {str(path.parent)!r} does not exist; make it first"
        )


class LiveView:
    """Writer of JSON lines to the file at ``path`` and of scalars by ``add_scalar``.

    Either may be None. If writing fails, a RuntimeWarning is given and that output is no longer
    written; training continues.
    """

    def __init__(self, path: str | os.PathLike[str] | None, add_scalar: AddScalar | None) -> None:
        self._path = None if path is None else Path(path)
        self._before: Mapping[str, Any] = {}
        self._writers: dict[str, Callable[[Mapping[str, Any]], None]] = {}
        if self._path is not None:
            self._writers[f"live_view: {str(path)!r}"] = functools.partial(_append, self._path)
        if add_scalar is not None:
            self._writers["scalars"] = functools.partial(_add_scalars, add_scalar)

    def check(self) -> None:
        """Create the file if it does not exist; OSError if it cannot be created or written."""
        if self._path is not None:
            check_folder_of(self._path, "live_view")
            self._path.open("ab").close()

    def show(
        self, step: int, stats: Mapping[str, Any], residual_ratios: Mapping[str, float]
    ) -> None:
        """Write the ``figures`` of the steps since the last call.

        ``step``: number of steps so far, those before a loaded checkpoint included.
        """
        line = {"step": step, **figures(self._before, stats, residual_ratios)}
        self._before = stats
        for name, write in list(self._writers.items()):
            try:
                write(line)
            except Exception as error:  # the writer of scalars is not ours: it may raise anything
                del self._writers[name]
                warn(
                    f"{name} cannot be written any more ({type(error).__name__}: {error}); "
                    "training continues without it"
                )


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line to a file in one write; on an error leave the file as it was."""
    data = (json.dumps(line, allow_nan=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        begin = file.tell()
        if file.write(data) < len(data):
            file.truncate(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _add_scalars(add_scalar: AddScalar, line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        if name not in _NO_SCALARS and value is not None:
            add_scalar(f"fftcomp/{name}", value, line["step"])
