"""Checks of packages: installed or not, and in a tested version."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.check import Finding, Level
from horovod_fftcomp.tools.run.launcher import is_torchrun
from horovod_fftcomp.wire.version import __version__

_OURS = "horovod_fftcomp"


# By import name: what to do if a package is missing, and what others are for.
_NEEDED = {name: f"pip install {name}" for name in ("numpy", "numba", "llvmlite")}
_NEEDED["torch"] = "to train with PyTorch: pip install torch"
_OPTIONAL = {
    "horovod": "to train under horovodrun: HOROVOD_WITH_PYTORCH=1 pip install horovod==0.28.1, or "
    "make install in a clone, which patches its build for new compilers",
    "tensorflow": "to train with TensorFlow",
    "mpi4py": "for scripts that call MPI themselves",
    "cupy": "for kernels on a GPU",
}
_REQUIREMENTS = {"cupy": "cupy-cuda12x"}  # where they have other names


def findings() -> Iterator[Finding]:
    """Yield one finding for Python, for this package and for each of the others."""
    yield _python()
    yield _ours()
    ranges = tested_ranges()
    unused = "horovod" if is_torchrun() else ""
    yield from (_version(each, ranges) for each in (*_NEEDED, *_OPTIONAL) if each != unused)
    if importlib.util.find_spec("tensorflow") is not None:
        yield _keras()


def tested_ranges() -> dict[str, str]:
    """Return the requirements of this package, extras included: name -> range of versions."""
    required = environment.known(metadata.requires, _OURS) or []
    return {one.name: str(one.specifier) for one in map(Requirement, required)}


def is_within(version: str, versions: str) -> bool:
    """Return whether ``version``, without suffixes, is in a range such as ``>=2.0,<3``."""
    try:
        # Release candidates and a vendor's own builds are taken for the release.
        return SpecifierSet(versions).contains(Version(version).base_version)
    except InvalidVersion:
        return not versions


def _python() -> Finding:
    required = (environment.known(metadata.metadata, _OURS) or {}).get("Requires-Python") or ""
    found = f"{platform.python_version()} ({sys.executable})"
    if is_within(".".join(map(str, sys.version_info[:3])), required):
        return Finding("Python", Level.OK, found)
    return Finding("Python", Level.FAIL, found, f"use Python {required}")


def _ours() -> Finding:
    found = f"{__version__} from {Path(__file__).resolve().parents[2]}"
    remedy = "pip install . in the clone; it also records the tested versions of the other packages"
    installed = environment.known(metadata.version, _OURS)
    if installed is None:
        return Finding(_OURS, Level.WARNING, f"{found}, not installed", remedy)
    if installed != __version__:
        return Finding(_OURS, Level.WARNING, f"{found}; {installed} is installed", remedy)
    return Finding(_OURS, Level.OK, found)


def _version(module: str, ranges: Mapping[str, str]) -> Finding:
    if importlib.util.find_spec(module) is None:
        if module in _NEEDED:
            return Finding(module, Level.WARNING, "not installed", _NEEDED[module])
        return Finding(module, Level.ABSENT, f"not installed; {_OPTIONAL[module]}")
    version, requirement = installed_version(module), _REQUIREMENTS.get(module, module)
    tested = ranges.get(requirement, "")
    if version is None:
        return Finding(module, Level.WARNING, "has no version", f"pip install {module}")
    if is_within(version, tested):
        return Finding(module, Level.OK, version)
    remedy = f"pip install '{requirement}{tested}'"
    return Finding(module, Level.WARNING, f"{version}; tested was {tested}", remedy)


def installed_version(module: str) -> str | None:
    """Return the version of the package of ``module`` (tensorflow: tensorflow-cpu, ...)."""
    names = [module, *metadata.packages_distributions().get(module, [])]
    return next(filter(None, (environment.known(metadata.version, name) for name in names)), None)


def _keras() -> Finding:
    version = installed_version("keras")
    if version is None:
        return Finding("keras", Level.ABSENT, "not installed; to train with Keras")
    if is_within(version, "<3"):
        return Finding("keras", Level.OK, version)
    found = f"{version}, which Horovod does not support"
    switch = "export TF_USE_LEGACY_KERAS=1"
    if importlib.util.find_spec("tf_keras") is None:
        remedy = f"to train with Keras: pip install tf_keras, and {switch}"
        return Finding("keras", Level.WARNING, found, remedy)
    if os.environ.get("TF_USE_LEGACY_KERAS", "").lower() not in ("1", "true"):
        remedy = f"to train with Keras: {switch}"
        return Finding("keras", Level.WARNING, f"{found}; tf_keras is installed", remedy)
    return Finding("keras", Level.OK, f"tf_keras instead of {version}")
