"""What pyproject.toml leaves to code: dependencies, and links into the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

# Where the repository is, without a slash at the end; unset, the package's page has no links to it.
REPOSITORY_URL = os.environ.get("REPOSITORY_URL", "")
README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
if REPOSITORY_URL:  # an index of packages has the README alone, not the files that it links to
    README = re.sub(r"(!\[.*?\]\()(?!\w+:)", rf"\1{REPOSITORY_URL}/raw/HEAD/", README)
    README = re.sub(r"(?<!!)(\[[^]]*\]\()(?!\w+:|#)", rf"\1{REPOSITORY_URL}/blob/HEAD/", README)

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
        "coverage>=7.10,<8",
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
        "twine>=6.1,<8",
    ],
    "docs": ["mkdocs-material>=9.6,<10", "mkdocstrings[python]>=0.27,<2"],
}

setup(
    long_description=README,
    long_description_content_type="text/markdown",
    project_urls={"Repository": REPOSITORY_URL} if REPOSITORY_URL else {},
    install_requires=[
        "numpy>=2.0,<3",
        "numba>=0.60,<0.69",
        "llvmlite>=0.43,<0.51",
        "packaging>=22,<27",
        "rich>=13,<16",
    ],
    extras_require=EXTRAS,
)
