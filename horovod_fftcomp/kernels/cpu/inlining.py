"""Compilation of functions into the kernels that call them.

Numba optimizes every function by itself and makes machine code of it, also where only other
compiled functions call it, which then optimize a copy once more: a third of the time that kernels
take to compile. Here such a function gets no machine code of its own, and most are not optimized by
themselves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core import codegen, compiler
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.typed_passes import NopythonTypeInference

# Private methods of a class of Numba's; without them functions are compiled as Numba does it.
_REPLACED = "_optimize_functions", "_optimize_final_module", "_finalize_final_module"
_CALLED = ("_finalize_dynamic_globals",)
IS_AS_EXPECTED = all(hasattr(codegen.JITCodeLibrary, name) for name in (*_REPLACED, *_CALLED))
_RAISES_TYPE_ERROR = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class _WithoutMachineCode(codegen.JITCodeLibrary):
    """LLVM code of a function to be linked into kernels, optimized before that."""

    def _finalize_final_module(self) -> None:
        """Complete the module for ``_get_module_for_linking``."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int | None:
        """Return the address of what a call from Python runs: it raises a TypeError."""
        del name
        return _RAISES_TYPE_ERROR

    @property
    def codegen(self) -> _WithoutMachineCode:
        """The object that Numba calls ``set_env`` of, which machine code alone needs."""
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing."""


class _NotOptimized(_WithoutMachineCode):
    """LLVM code of a function to be linked into kernels, optimized there alone."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Leave the module as it is."""


@register_pass(mutates_CFG=False, analysis_only=True)
class _ChooseLibrary(FunctionPass):
    """Pass after which code is generated into a library of the compiler's ``kind``."""

    _name = "choose_library"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        """Create the library."""
        state.library = state.pipeline.kind(state.targetctx.codegen(), state.func_id.func_qualname)
        return False


class _Compiler(compiler.CompilerBase):
    """Compiler of functions that kernels call."""

    kind: type[_WithoutMachineCode] = _NotOptimized

    def define_pipelines(self) -> list[Any]:
        """Return Numba's passes, and ``_ChooseLibrary``."""
        passes = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_ChooseLibrary, NopythonTypeInference)
        passes.finalize()
        return [passes]


class _OptimizingCompiler(_Compiler):
    """Compiler of functions that are optimized before kernels contain them."""

    kind = _WithoutMachineCode


def allocating(
    function: Callable[..., Any], by: type[_Compiler] = _Compiler, counts: bool = True
) -> Any:
    """Compile as ``inlined``, with references to arrays counted.

    For functions that make arrays, return them, or get them from such functions: what ``inlined``
    ones got would never be freed (``tests/test_kernel_memory.py``).
    """
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    own = {**options, "pipeline_class": by, "_nrt": counts} if IS_AS_EXPECTED else {}
    return njit(nogil=True, **own)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function into the kernels that call it; called from Python it raises TypeError.

    References to arrays are not counted in it: two atomic operations for each argument and each
    part of an array. The caller holds what it uses, and Numba refuses one that makes an array.
    """
    return allocating(function, counts=False)


def optimized(function: Callable[..., Any]) -> Any:
    """Compile a function as ``allocating`` does, but optimize it before kernels contain it.

    For loops that LLVM vectorizes only by themselves: signs took 2.5 times as long without.
    """
    return allocating(function, _OptimizingCompiler)
