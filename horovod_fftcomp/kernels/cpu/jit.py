"""Compilation of CPU kernels by Numba: without the GIL, cached on disk, without fastmath.

Fastmath would allow contraction and reordering, and bytes would depend on the processor.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core import caching, event

from horovod_fftcomp.errors import UnsupportedError

_HERE = Path(__file__).parent
_WIRE = ("coded_levels", "header", "positions", "radix", "rans")
_OTHERS = ("codec/quantizers", "types", *(f"wire/{module}" for module in _WIRE))
_SOURCES = (*sorted(_HERE.glob("*.py")), *(_HERE.parents[1] / f"{m}.py" for m in _OTHERS))


def digest_of(sources: tuple[Path, ...]) -> str:
    """Return a hash of the contents of all files, 16 hexadecimal digits."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


_DIGEST = digest_of(_SOURCES)
PATIENCE_S = 2.0  # of compiling, after which a message tells what takes so long
_LOCAL_RANK = (
    "LOCAL_RANK",
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


# A private class of Numba's; without it no kernel is cached on disk, see ``kernel``.
_NumbasFiles: Any = getattr(caching, "IndexDataCacheFile", object)


class _Files(_NumbasFiles):
    """Cache of a function's compiled variants on disk, in files named by a hash of their source.

    Numba names them by consecutive numbers. Ranks that compile different variants at the same time
    would use the same number, and some would run the wrong variant from then on.
    """

    def __init__(self, *arguments: Any) -> None:
        """Raise AttributeError or TypeError if the class lacks what the methods below call."""
        super().__init__(*arguments)
        for name in ("_version", "_source_stamp", "_save_data", "_load_data", "_data_name"):
            getattr(self, name)

    def save(self, key: Any, data: Any) -> None:
        self._save_data(self._file_of(key), data)

    def load(self, key: Any) -> Any:
        try:
            return self._load_data(self._file_of(key))
        except FileNotFoundError:
            return None

    def _file_of(self, key: Any) -> str:
        made_from = repr((self._version, self._source_stamp, key)).encode()
        return self._data_name(int(hashlib.sha256(made_from).hexdigest()[:16], 16))


class _Notice(event.Listener):
    """Logger of one message once kernels have been compiling for ``PATIENCE_S``, in all."""

    folder = ""  # where compiled kernels are kept

    def __init__(self) -> None:
        self._depth, self._total_s, self._begin = 0, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self._ranks = [os.environ[name] for name in _LOCAL_RANK if name in os.environ]

    def on_start(self, event: Any) -> None:
        """Begin to wait with a kernel; others may be compiled for it meanwhile."""
        module = getattr(event.data["dispatcher"].py_func, "__module__", None)  # of others: None
        is_ours = str(module).startswith("horovod_fftcomp.")
        if not self._depth and is_ours and self._total_s < PATIENCE_S:
            self._begin = time.monotonic()
            self._timer = threading.Timer(PATIENCE_S - self._total_s, self._tell)
            self._timer.daemon = True
            self._timer.start()
        self._depth += bool(self._depth or is_ours)

    def on_end(self, event: Any) -> None:
        """Stop waiting when the kernel is compiled."""
        self._depth = max(0, self._depth - 1)
        if not self._depth and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._total_s += time.monotonic() - self._begin

    def _tell(self) -> None:
        if set(self._ranks) <= {"0"}:  # ranks of a machine compile the same at the same time
            logging.getLogger("horovod_fftcomp").warning(
                "horovod_fftcomp: compiling CPU kernels, which takes up to half a minute%s",
                f", once (cached in {self.folder})" if self.folder else "",
            )


_NOTICE = _Notice()
event.register("numba:compile", _NOTICE)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, and cache it on disk.

    Numba does not notice changes of functions that are inlined into this one. So the name of the
    cached file depends on the source of all kernels. Where Numba's cache is not as expected,
    nothing is cached, and a RuntimeWarning says so once.
    """
    function.__qualname__ += f".{_DIGEST}"
    try:
        return _kept_on_disk(function)
    except (AttributeError, TypeError) as error:
        warn_of_no_cache(f"{type(error).__name__}: {error}")
        return njit(cache=False, nogil=True)(function)


def kernel_of(function: Any) -> Any:
    """Return a function that is compiled into kernels as a kernel, which Python can call."""
    return kernel(getattr(function, "py_func", function))  # itself, if compiling is disabled


def _kept_on_disk(function: Callable[..., Any]) -> Any:
    """Compile a function, and have ``_Files`` keep it in the place of Numba's own class."""
    compiled: Any = njit(cache=True, nogil=True)(function)
    if compiled is function:
        raise UnsupportedError(
            "NUMBA_DISABLE_JIT is set, but the CPU kernels need compilation: unset it"
        )
    cache, kept = compiled._cache, compiled._cache._impl
    files = _Files(cache.cache_path, kept.filename_base, kept.locator.get_source_stamp())
    if not hasattr(cache, "_cache_file"):  # Numba would not look at what is set here
        raise AttributeError(f"{type(cache).__name__!r} object has no attribute '_cache_file'")
    cache._cache_file = files
    _NOTICE.folder = cache.cache_path
    return compiled


@functools.cache  # one warning for all kernels
def warn_of_no_cache(found: str) -> None:
    """Warn that compiled kernels are not kept on disk."""
    warnings.warn(
        f"compiled kernels are not kept on disk, so every process compiles them anew, since the "
        f"cache of Numba {numba.__version__} is not as expected ({found}); install a version of "
        "Numba that setup.py of horovod_fftcomp allows",
        RuntimeWarning,
        stacklevel=4,
    )
