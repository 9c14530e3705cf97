"""How kernels are compiled: without the GIL, and never so that bits depend on the machine.

No fastmath: contraction or reordering would change bytes from one processor to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

_HERE = Path(__file__).parent
_SOURCES = (
    *sorted(_HERE.glob("*.py")),
    *(_HERE.parents[1] / f"{m}.py" for m in ("quantizers", "entropy", "words")),
)


def digest_of(sources: tuple[Path, ...]) -> str:
    """Return some letters that change with the text of any of the files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


_DIGEST = digest_of(_SOURCES)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile what Python calls, once, for one combination of types, and keep it on disk.

    Numba numbers a function's variants, and ranks that compile different ones at the same time
    could mix them up. It would also keep a function when another that is part of it has changed,
    in this file or the next; so the file's name tells the text of all of them.
    """
    function.__qualname__ += f".{_DIGEST}"
    return njit(cache=True, nogil=True)(function)


# What kernels call; it becomes part of them.
inlined: Any = njit(nogil=True)
