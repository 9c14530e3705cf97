"""The source distribution and the wheel: built, installed and used where nothing else of it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from horovod_fftcomp.wire.version import __version__

ROOT = Path(__file__).resolve().parent.parent
BUILD = """
import os, sys
from setuptools import build_meta
print(getattr(build_meta, f"build_{sys.argv[1]}")(sys.argv[2]))
"""
USE = """
import numpy as np
import horovod_fftcomp as hfc
print(hfc.__file__)
steps = list(hfc.simulate("none", np.ones((2, 2, 2048), np.float32)))
print(len(steps), float(steps[0].average.sum()))
"""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Return what a command prints; raise AssertionError with its errors if it fails."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(kind: str, source: Path, folder: Path) -> Path:
    """Return the path of the distribution that is built from the tree in ``source``."""
    printed = run(sys.executable, "-c", BUILD, kind, folder, cwd=source)
    return folder / printed.splitlines()[-1]


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_works_by_itself(tmp_path):
    tree = tmp_path / "tree"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "*.egg-info")
    shutil.copytree(ROOT, tree, ignore=left_out)
    archive = built("sdist", tree, tmp_path)
    run("tar", "-xzf", archive, cwd=tmp_path)
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    wheel = built("wheel", source, tmp_path)
    assert wheel.name == f"horovod_fftcomp-{__version__}-py3-none-any.whl"

    package = tree / "horovod_fftcomp"
    needed = [p for p in package.rglob("*") if p.suffix in (".py", ".pyi", ".cuh", ".typed")]
    assert any(path.suffix == ".cuh" for path in needed)
    with zipfile.ZipFile(wheel) as contents:
        names = set(contents.namelist())
    assert {path.relative_to(tree).as_posix() for path in needed} <= names
    assert {name.split("/")[0] for name in names} == {
        "horovod_fftcomp",
        f"horovod_fftcomp-{__version__}.dist-info",
    }

    fresh = tmp_path / "fresh"
    venv.create(fresh)
    site = fresh / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # What it depends on; not this clone, whose own .pth is read in site folders only.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = ("install", "-q", "--no-deps", "--no-index", "--ignore-installed", wheel)
    run(sys.executable, "-m", "pip", "--python", fresh / "bin" / "python", *install, cwd=tmp_path)
    alone = {"PYTHONPATH": "", "COLUMNS": "80"}
    where, result = run(fresh / "bin" / "python", "-c", USE, cwd=tmp_path, **alone).splitlines()
    assert where == str(site / "horovod_fftcomp" / "__init__.py")
    assert result == "2 2048.0"
    command = fresh / "bin" / "horovod-fftcomp"
    assert run(command, "--version", cwd=tmp_path, **alone).split()[-1] == __version__
    assert "topk" in run(command, "recipes", cwd=tmp_path, **alone)
