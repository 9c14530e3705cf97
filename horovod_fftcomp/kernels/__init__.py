"""Kernels, the arithmetic of codecs and schemes.

A kernel has the same name and arguments in ``reference`` (plain NumPy, the definition) and in
``cpu`` (Numba), which lists all kernels in its ``__all__``.
"""
