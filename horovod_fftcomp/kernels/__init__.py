"""Kernels, the arithmetic that every backend implements.

Each function of ``cpu`` (Numba) has the name and the parameters of one in ``reference``, which is
plain NumPy and the definition.
"""
