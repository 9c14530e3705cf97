"""Build stock Horovod for the CUDA PyTorch of the Python that runs this, and install it there.

    python3 scripts/horovod_cuda.py                      # collectives of GPU tensors by NCCL
    python3 scripts/horovod_cuda.py --operations host    # through the host; two ranks on one GPU

Needs nvcc of PyTorch's CUDA, g++, CMake and pip; takes minutes. Standard library only.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bootstrap import ADJUSTMENTS, HOROVOD, NAME, SetupError, adjust

# nvcc of CUDA 13 no longer takes C++11, and PyTorch's NCCL comes without the name for linkers.
CUDA_ADJUSTMENTS = (
    *ADJUSTMENTS,
    ("horovod/common/ops/cuda/CMakeLists.txt", "CMAKE_CUDA_STANDARD 11", "CMAKE_CUDA_STANDARD 17"),
    (
        "cmake/Modules/FindNCCL.cmake",
        '(NCCL_LIBNAME "nccl")',
        '(NCCL_LIBNAME "libnccl.so.2" "nccl")',
    ),
)
# What its build and ``import horovod.torch`` take, and the packages that have it.
MODULES = {name: name for name in ("setuptools", "wheel", "packaging", "cffi", "cloudpickle")}
MODULES |= {"psutil": "psutil", "yaml": "PyYAML"}
PYTORCH = (
    "import torch; from torch.utils.cpp_extension import CUDA_HOME; "
    "print(torch.__version__, torch.version.cuda, CUDA_HOME)"
)


def run(*command: str | Path, cwd: Path | None = None, **settings: str) -> None:
    """Run a command and show its output; SetupError if it fails."""
    shown = " ".join(map(str, command))
    print(f"$ {shown}", flush=True)
    if subprocess.run(command, cwd=cwd, env=os.environ | settings, check=False).returncode:
        raise SetupError(f"this command failed, see above: {shown}")


def find_cuda() -> Path:
    """Return the folder of the CUDA toolkit that fits PyTorch."""
    asked = subprocess.run([sys.executable, "-c", PYTORCH], capture_output=True, text=True)
    if asked.returncode:
        raise SetupError(f"{sys.executable} has no PyTorch: {asked.stderr.strip()[-300:]}")
    torch, cuda, home = asked.stdout.split()[-3:]
    if cuda == "None":
        raise SetupError(f"PyTorch {torch} is one for CPUs: install one for CUDA, then run again.")
    mend = (
        f"install the CUDA toolkit {cuda}, or name its folder: CUDA_HOME=/usr/local/cuda-{cuda} ..."
    )
    # PyTorch may have found a script that calls another folder's nvcc.
    for folder in map(Path, (home, "/usr/local/cuda")):
        if (folder / "bin/nvcc").exists() and (folder / "include/cuda_runtime.h").exists():
            break
    else:
        raise SetupError(f"no CUDA toolkit was found for PyTorch {torch}: {mend}")
    nvcc = folder / "bin" / "nvcc"
    told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.\d+", told)
    if not release or release[1] != cuda.partition(".")[0]:
        raise SetupError(f"{nvcc} is not of PyTorch's CUDA {cuda}: {mend}")
    return folder


def nccl_of_pytorch() -> dict[str, str]:
    """Return settings for the NCCL that was installed with PyTorch; empty if there is none."""
    spec = importlib.util.find_spec("nvidia")
    for path in (spec and spec.submodule_search_locations) or ():
        home = Path(path, "nccl")
        if (home / "lib" / "libnccl.so.2").exists():
            return {
                "HOROVOD_NCCL_INCLUDE": str(home / "include"),
                "HOROVOD_NCCL_LIB": str(home / "lib"),
                "HOROVOD_NCCL_LINK": "SHARED",
            }
    return {}


def settings_for(operations: str, cuda: Path) -> dict[str, str]:
    """Return the environment variables of Horovod's build."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    jobs = max(1, min(len(os.sched_getaffinity(0)), int(memory / 2.5e9)))  # 2.5 GB a compiler
    found = {
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # what CMake 4 wants to be told for Gloo
        "CUDA_HOME": str(cuda),
        "HOROVOD_CUDA_HOME": str(cuda),
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "MAKEFLAGS": f"-j{jobs}",
        "PATH": f"{cuda / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    if operations == "nccl":
        found["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        if not any(name.startswith("HOROVOD_NCCL_") for name in os.environ):
            found |= nccl_of_pytorch()
    return found


def build(args: argparse.Namespace, folder: Path) -> Path:
    """Return the wheel in ``folder``."""
    cuda, pip = find_cuda(), (sys.executable, "-m", "pip")
    for tool in ("cmake", "g++"):
        if not shutil.which(tool):
            raise SetupError(f"{tool} is missing: install it, then run again.")
    needed = [name for name in MODULES if not importlib.util.find_spec(name)]
    if needed:
        named = " ".join(MODULES[name] for name in needed)
        raise SetupError(f"packages are missing: {sys.executable} -m pip install {named}")
    plain = ("--no-deps", "--no-build-isolation")
    if not (sdist := args.sdist):
        run(*pip, "download", *plain, "--no-binary", ":all:", "-d", folder, HOROVOD)
        sdist = next(folder.glob("horovod-*.tar.gz"))
    shutil.unpack_archive(sdist, folder)
    adjust(folder / NAME, CUDA_ADJUSTMENTS)
    settings = settings_for(args.operations, cuda)
    run(*pip, "wheel", *plain, "-w", folder, ".", cwd=folder / NAME, **settings)
    return next(folder.glob("horovod-*.whl"))


def main() -> int:
    """Build the wheel and install or keep it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--operations",
        choices=("nccl", "host"),
        default="nccl",
        help="library that moves GPU tensors",
    )
    add("--sdist", type=Path, help="Horovod's sources, for machines without a network")
    add("--wheel-dir", type=Path, help="keep the wheel in this folder instead of installing it")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="horovod-cuda-") as folder:
            wheel = build(args, Path(folder))
            if args.wheel_dir:
                args.wheel_dir.mkdir(parents=True, exist_ok=True)
                print(f"wrote {shutil.move(wheel, args.wheel_dir / wheel.name)}")
                return 0
            run(sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", wheel)
        run(sys.executable, "-c", "import horovod.torch as hvd; assert hvd.cuda_built()")
    except (SetupError, OSError) as error:
        print(f"\nhorovod_cuda.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
