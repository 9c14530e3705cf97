"""Package metadata. Pure Python: nothing is compiled at install time."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"',
    (ROOT / "horovod_fftcomp" / "wire" / "version.py").read_text(),
    re.M,
).group(1)

# Ranges that the tests were run with; scripts/requirements.txt holds the exact versions of CI.
EXTRAS = {
    "torch": ["torch>=2.1,<2.14", "horovod==0.28.1"],
    "torch-distributed": ["torch>=2.1,<2.15"],
    "tensorflow": ["tensorflow>=2.16,<2.22", "tf_keras>=2.16,<2.22", "horovod==0.28.1"],
    "gpu": ["cupy-cuda12x>=13.0,<15"],
    "gpu13": ["cupy-cuda13x>=13.6,<15"],
    "mpi": ["mpi4py>=4.0,<5"],
    "plot": ["matplotlib>=3.8,<4"],
    "examples": ["matplotlib>=3.8,<4", "scikit-learn>=1.4,<2"],
    "dev": [
        "hypothesis>=6.100,<7",
        "matplotlib>=3.8,<4",
        "ml_dtypes>=0.4,<1",
        "mypy>=1.11,<2",
        "pytest>=8,<9.3",
        "pytest-xdist>=3.6,<4",
        "pyyaml>=6,<7",
        "ruff==0.17.5",
        "scikit-learn>=1.4,<2",
        "scipy>=1.13,<2",
    ],
    "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.27,<2"],
}

setup(
    name="horovod_fftcomp",
    version=VERSION,
    description="Gradient compression for data-parallel training: Horovod, torch.distributed",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["horovod_fftcomp", "horovod_fftcomp.*"]),
    package_data={"": ["*.pyi"], "horovod_fftcomp": ["py.typed", "kernels/cuda/src/*.cuh"]},
    install_requires=[
        "numpy>=2.0,<3",
        "numba>=0.60,<0.69",
        "llvmlite>=0.43,<0.51",
        "packaging>=22,<27",
        "rich>=13,<16",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["horovod-fftcomp = horovod_fftcomp.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
