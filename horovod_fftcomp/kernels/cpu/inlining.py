"""Compilation of functions into the kernels that call them.

Numba optimizes every function by itself and makes machine code of it, also where only other
compiled functions call it, which then optimize a copy once more: a third of the time that kernels
take to compile. Here such a function gets neither.
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
_IS_AS_EXPECTED = all(hasattr(codegen.JITCodeLibrary, name) for name in (*_REPLACED, *_CALLED))
_RAISES_TYPE_ERROR = ctypes.cast(ctypes.pythonapi.PyErr_BadArgument, ctypes.c_void_p).value


class _Part(codegen.JITCodeLibrary):
    """Code of a function, which is optimized as a part of kernels alone."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Leave the module as it is."""

    def _finalize_final_module(self) -> None:
        """Complete the module for ``_get_module_for_linking``, without machine code."""
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int | None:
        """Return the address of what a call from Python runs: it raises a TypeError."""
        del name
        return _RAISES_TYPE_ERROR

    @property
    def codegen(self) -> _Part:
        """What Numba tells the environment of machine code to: nothing here needs it."""
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Do nothing."""


@register_pass(mutates_CFG=False, analysis_only=True)
class _BeginPart(FunctionPass):
    """Pass after which code is generated into a ``_Part``."""

    _name = "begin_part"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        """Create the library that the next passes write to."""
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        return False


class _PartCompiler(compiler.CompilerBase):
    """Compiler of functions that kernels call."""

    def define_pipelines(self) -> list[Any]:
        """Return Numba's passes, and ``_BeginPart``."""
        passes = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_BeginPart, NopythonTypeInference)
        passes.finalize()
        return [passes]


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function into the kernels that call it; called from Python it raises TypeError."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    own = {**options, "pipeline_class": _PartCompiler} if _IS_AS_EXPECTED else {}
    return njit(nogil=True, **own)(function)
