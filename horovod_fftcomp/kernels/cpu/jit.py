"""How kernels are compiled: without the GIL, and never so that bits depend on the machine.

No fastmath: contraction or reordering would change bytes from one processor to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import IndexDataCacheFile

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


class _Files(IndexDataCacheFile):
    """A function's variants on disk, each in a file whose name tells what it was made from.

    Numba numbers them. Ranks that compile different ones at the same time would take the same
    number, and some run the wrong one from then on.
    """

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
    next; so the file's name tells the text of all of them.
    """
    function.__qualname__ += f".{_DIGEST}"
    compiled: Any = njit(cache=True, nogil=True)(function)
    if compiled is function:
        raise UnsupportedError(
            "NUMBA_DISABLE_JIT is set, but the CPU's kernels are right only compiled: unset it"
        )
    cache, kept = compiled._cache, compiled._cache._impl
    stamp = kept.locator.get_source_stamp()
    cache._cache_file = _Files(cache.cache_path, kept.filename_base, stamp)
    return compiled


# What kernels call; it becomes part of them.
inlined: Any = njit(nogil=True)
