"""Kernels, the arithmetic that every backend implements.

Each function of ``cpu`` (Numba) has the name and the parameters of one in ``reference``, which is
plain NumPy and the definition.
"""

import os

# With colorama installed, Numba resets the terminal's colours at exit, on a launcher's ranks too:
# the escape sequence would begin the next line of another rank. Numba reads it when imported.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
