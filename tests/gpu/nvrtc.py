"""Compiles CUDA sources by NVRTC, which needs no GPU; reads what ptxas says of each kernel."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from horovod_fftcomp.kernels.cuda import OPTIONS

# The last that knows sm_70, and the present one: their wheels lie side by side.
LIBRARIES = {"12": "cuda_nvrtc/lib/libnvrtc.so.12", "13": "cu13/lib/libnvrtc.so.13"}
_OLD = "Architectures prior to"  # with which CUDA 12 announces that CUDA 13 drops sm_70
# As the package compiles, and with the flags that CuPy adds to that.
FLAGS = (*OPTIONS, "-ftz=true", "--device-as-default-execution-space", "--ptxas-options=-v")


class Resources(NamedTuple):
    """What one kernel takes: registers of a thread, bytes that spill from them."""

    name: str
    registers: int
    spilled_nbytes: int


class Compiled(NamedTuple):
    """The PTX of all kernels, what each takes, and warnings.

    ``lowered``: the names in PTX, by name expression.
    """

    ptx: str
    lowered: dict[str, str]
    resources: list[Resources]
    warnings: list[str]


@functools.cache
def library(version: str) -> ctypes.CDLL | None:
    """Return an installed NVRTC; None if it is missing."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        path = Path(folder) / LIBRARIES[version]
        if path.exists():
            for needed in path.parent.glob(f"libnvrtc-builtins.so.{version}*"):
                ctypes.CDLL(str(needed))  # NVRTC 13.0 does not look for it beside itself
            return ctypes.CDLL(str(path))
    return None


def compile_for(nvrtc: ctypes.CDLL, source: str, names: Sequence[str], arch: str) -> Compiled:
    """Compile ``source`` for an architecture; AssertionError with the log if that fails.

    Only of a real one ("sm_90", not "compute_90") it is known what kernels take.
    """
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    ))  # fmt: skip
    for name in names:
        _check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    flags = [f"-arch={arch}".encode(), *(flag.encode() for flag in FLAGS)]
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    log = _text(nvrtc, program, "ProgramLog")
    assert not failed, log[:5000]
    ptx = _text(nvrtc, program, "PTX")
    lowered = {name: _lowered(nvrtc, program, name) for name in names}
    _check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    warnings = [line for line in log.splitlines() if "warning" in line and _OLD not in line]
    return Compiled(ptx, lowered, _resources(log), warnings)


def _resources(log: str) -> list[Resources]:
    found = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        log,
        re.S,
    )
    return [
        Resources(name, int(registers), int(stores) + int(loads))
        for name, stores, loads, registers in found
    ]


def _lowered(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, name: str) -> str:
    lowered = ctypes.c_char_p()
    _check(nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)))
    assert lowered.value is not None
    return lowered.value.decode()


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def _check(status: int) -> None:
    assert status == 0, f"NVRTC error {status}"
