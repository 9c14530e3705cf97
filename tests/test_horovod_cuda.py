"""Building Horovod for GPUs: what is missing is told before minutes are spent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "horovod_cuda.py"
TORCH = "__version__ = '2.11.0'\nclass version: cuda = '13.0'\n"


def run(folder: Path, nvcc: str = "") -> str:
    """Run the script with this PyTorch and nvcc; return the error that it ends with."""
    torch = folder / "torch"
    (torch / "utils").mkdir(parents=True)
    (torch / "utils" / "__init__.py").touch()
    (torch / "__init__.py").write_text(TORCH)
    (torch / "utils" / "cpp_extension.py").write_text(f"CUDA_HOME = {str(folder)!r}")
    if nvcc:
        (folder / "bin").mkdir()
        (folder / "bin" / "nvcc").write_text(f"#!/bin/sh\necho '{nvcc}'\n")
        (folder / "bin" / "nvcc").chmod(0o755)
        (folder / "include").mkdir()
        (folder / "include" / "cuda_runtime.h").touch()
    environment = os.environ | {"PYTHONPATH": str(folder), "PATH": "/nowhere"}
    ran = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1, ran.stderr
    return ran.stderr


def test_another_cuda_than_pytorchs_is_told(tmp_path):
    told = run(tmp_path, "Cuda compilation tools, release 12.6, V12.6.85")
    assert "bin/nvcc is not of PyTorch's CUDA 13.0: install the CUDA toolkit 13.0" in told


def test_a_missing_compiler_is_told(tmp_path):
    told = run(tmp_path, "Cuda compilation tools, release 13.0, V13.0.88")
    assert "cmake is missing: install it, then run again." in told


@pytest.mark.skipif(Path("/usr/local/cuda/bin/nvcc").exists(), reason="a CUDA toolkit is there")
def test_a_missing_toolkit_is_told(tmp_path):
    assert "no CUDA toolkit was found for PyTorch 2.11.0" in run(tmp_path)


@pytest.mark.torch
@pytest.mark.more  # loads PyTorch and Horovod anew
def test_a_pytorch_for_cpus_is_told():
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("this PyTorch is one for GPUs")
    ran = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "is one for CPUs: install one for CUDA" in ran.stderr
