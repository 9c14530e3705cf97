"""How kernels are compiled: without the GIL, and never so that bits depend on the machine.

No fastmath: contraction or reordering would change bytes from one processor to the next.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core import caching

from horovod_fftcomp.errors import UnsupportedError

_HERE = Path(__file__).parent
_SOURCES = (
    *sorted(_HERE.glob("*.py")),
    *(
        _HERE.parents[1] / f"{m}.py"
        for m in ("codec/quantizers", "types", "wire/rans", "wire/radix")
    ),
)


def digest_of(sources: tuple[Path, ...]) -> str:
    """Return some letters that change with the text of any of the files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


_DIGEST = digest_of(_SOURCES)


# A private class of Numba's; without it no kernel is kept on disk, see ``kernel``.
_NumbasFiles: Any = getattr(caching, "IndexDataCacheFile", object)


class _Files(_NumbasFiles):
    """A function's variants on disk, each in a file whose name tells what it was made from.

    Numba numbers them. Ranks that compile different ones at the same time would take the same
    number, and some run the wrong one from then on.
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


def kernel(function: Callable[..., Any]) -> Any:
    """Compile what Python calls, and keep it on disk.

    Numba would keep a function when another that is part of it has changed, in this file or the
    next; so the file's name tells the text of all of them. Where Numba's cache is not as expected,
    nothing is kept, and a RuntimeWarning says so once.
    """
    function.__qualname__ += f".{_DIGEST}"
    try:
        return _kept_on_disk(function)
    except (AttributeError, TypeError) as error:
        _warn_of_no_cache(f"{type(error).__name__}: {error}")
        return njit(cache=False, nogil=True)(function)


def _kept_on_disk(function: Callable[..., Any]) -> Any:
    """Compile a function, and have ``_Files`` keep it in the place of Numba's own class."""
    compiled: Any = njit(cache=True, nogil=True)(function)
    if compiled is function:
        raise UnsupportedError(
            "NUMBA_DISABLE_JIT is set, but the CPU's kernels are right only compiled: unset it"
        )
    cache, kept = compiled._cache, compiled._cache._impl
    stamp = kept.locator.get_source_stamp()
    files = _Files(cache.cache_path, kept.filename_base, stamp)
    if not hasattr(cache, "_cache_file"):  # Numba would not look at what is set here
        raise AttributeError(f"{type(cache).__name__!r} object has no attribute '_cache_file'")
    cache._cache_file = files
    return compiled


@functools.cache  # one warning for all kernels
def _warn_of_no_cache(found: str) -> None:
    warnings.warn(
        f"compiled kernels are not kept on disk, so every process compiles them anew, since the "
        f"cache of Numba {numba.__version__} is not as expected ({found}); install a version of "
        "Numba that setup.py of horovod_fftcomp allows",
        RuntimeWarning,
        stacklevel=4,
    )


# What kernels call; it becomes part of them.
inlined: Any = njit(nogil=True)
