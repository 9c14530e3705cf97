"""How kernels are compiled: without the GIL, and never so that bits depend on the machine.

No fastmath: contraction or reordering would change bytes from one processor to the next.
"""

from __future__ import annotations

from typing import Any

from numba import njit

# What Python calls. Compiled once, for one combination of types, and kept on disk: Numba numbers a
# function's variants, and ranks that compile different ones at the same time could mix them up.
kernel: Any = njit(cache=True, nogil=True)

# What kernels call; it becomes part of them.
inlined: Any = njit(nogil=True)
