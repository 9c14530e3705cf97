"""Kernels, the arithmetic: ``cpu`` (Numba) and ``cuda``.

The NumPy of the methods (``codec.methods``) and ``tests/reference.py`` define it.
"""

import os

# With colorama installed, Numba resets the terminal's colours at exit, on a launcher's ranks too:
# the escape sequence would begin the next line of another rank. Numba reads it when imported.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
