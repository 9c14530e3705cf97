"""Builds kernels for the emulator by g++: CUDA sources, or the PTX that NVRTC makes of them."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from horovod_fftcomp.kernels import cuda
from tests.gpu import nvrtc, ptx

HERE = Path(__file__).parent
# No contraction into fused multiply-adds, which would round otherwise than a device does.
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing",
         "-ftls-model=initial-exec", "-I", str(HERE))  # fmt: skip
# A kernel of PTX has thousands of variables, and a stack of 64 KiB in the emulator.
FLAGS_OF_PTX = ("-fwrapv", "-Werror=stack-usage=49152")
_CODE = ("build.py", "nvrtc.py", "ptx.py", "ptx_instructions.h", "cuda_emulator.h",
         "cuda_emulator.cpp")  # fmt: skip
_AT_A_TIME = 2  # compilers of PTX


class Target(NamedTuple):
    """What PTX is compiled for, and by which NVRTC: ("13", "sm_90")."""

    version: str
    arch: str


target: Target | None = None  # None: the source is built


class Kernel(NamedTuple):
    """A kernel of the emulator: the ``number``-th of a library."""

    library: ctypes.CDLL
    number: int


class _Text(NamedTuple):
    """C++ of kernels, and the function of each of them, by name expression."""

    text: str
    functions: dict[str, str]


def built(source: str, names: Sequence[str], flags: Sequence[str] = ()) -> dict[str, Kernel]:
    """Return the kernels of a source with these name expressions, built unless they are already.

    ``flags``: additional ones of g++. They build the source, whatever the ``target``, since
    sanitizers would find nothing in PTX.
    """
    if shutil.which("g++") is None:
        pytest.skip("g++ is missing: no emulated kernels")
    goal, found = None if flags else target, dict[str, Kernel]()
    for part in _parts(names, goal):
        folder = _folder([source, *part, *flags, *(goal or ())])
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building it
            if not (folder / "done").exists():
                texts = (
                    _translated(source, part, goal)
                    if goal
                    else [_Text(source, {name: name for name in part})]
                )
                _compile_all(folder, texts, FLAGS_OF_PTX if goal else ("-g", *flags))
        for path in sorted(folder.glob("*.so")):
            library = ctypes.CDLL(str(path))
            exported = path.with_suffix(".names").read_text().splitlines()
            found |= {name: Kernel(library, number) for number, name in enumerate(exported)}
    return {name: found[name] for name in names}


def _parts(names: Sequence[str], goal: Target | None) -> list[tuple[str, ...]]:
    """Return what is built at a time: all kernels of the package, since one build serves all tests.

    Of PTX, which takes minutes, the kernels for each block length on their own.
    """
    if not set(names) <= set(cuda.NAMES):
        return [tuple(names)]
    if goal is None:
        return [cuda.NAMES]
    blocks = dict.fromkeys(map(_block, names))
    return [tuple(name for name in cuda.NAMES if _block(name) == block) for block in blocks]


def _block(name: str) -> str:
    found = re.search(r"<(\d+), ", name)
    return found[1] if found else ""


def _folder(parts: list[str]) -> Path:
    """Return where the kernels that follow from these texts are built."""
    parts += [(HERE / name).read_text() for name in _CODE]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"fftcomp-emulator-{os.getuid()}-{digest}"
    folder.mkdir(exist_ok=True)
    return folder


def _translated(source: str, names: Sequence[str], goal: Target) -> list[_Text]:
    """Return the PTX of kernels in C++, in parts that are compiled at the same time."""
    library = nvrtc.library(goal.version)
    assert library is not None, f"NVRTC {goal.version} is not installed"
    # The same PTX as for the real architecture, without the time that ptxas takes.
    made = nvrtc.compile_for(library, source, names, goal.arch.replace("sm_", "compute_"))
    parts = [{name: made.lowered[name] for name in names[i::_AT_A_TIME]} for i in range(_AT_A_TIME)]
    return [_Text(ptx.to_cpp(made.ptx, part.values()), part) for part in parts if part]


def _compile_all(folder: Path, texts: Sequence[_Text], flags: Sequence[str]) -> None:
    stems = [folder / str(number) for number in range(len(texts))]
    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(functools.partial(_compile, flags), stems, texts))
    (folder / "done").touch()


def _compile(flags: Sequence[str], stem: Path, made: _Text) -> None:
    source, exports = stem.with_suffix(".cu"), stem.with_suffix(".inc")
    source.write_text(made.text)
    functions = enumerate(made.functions.values())
    exports.write_text("".join(f"EXPORT({number}, {name})\n" for number, name in functions))
    stem.with_suffix(".names").write_text("\n".join(made.functions))
    command = [
        "g++", *FLAGS, *flags, f'-DKERNELS="{source}"', f'-DEXPORTS="{exports}"',
        str(HERE / "cuda_emulator.cpp"), "-o", str(stem.with_suffix(".so")),
    ]  # fmt: skip
    environment = os.environ | {"LC_ALL": "C"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if unknown := re.findall(r"'ptx_(\w+)' was not declared", ran.stderr):
        raise ptx.PtxError(f"not in ptx_instructions.h: {', '.join(sorted({*unknown}))}")
    assert ran.returncode == 0, ran.stderr[-5000:]
