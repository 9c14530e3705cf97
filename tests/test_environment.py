"""The environment that ``make install`` makes: Open MPI in processes that no launcher started."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def line():
    """Return the line that Python runs when it starts."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPTS / "bootstrap.py")
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    assert bootstrap.OPEN_MPI.suffix == ".pth"
    assert bootstrap.OPEN_MPI_LINE.startswith("import ")  # others would be folders
    assert bootstrap.OPEN_MPI_LINE.count("\n") == 1
    return bootstrap.OPEN_MPI_LINE


@pytest.mark.parametrize(
    ("has_open_mpi", "given", "expected"),
    [(True, None, "here"), (True, "/opt/openmpi", "/opt/openmpi"), (False, None, None)],
)
def test_open_mpi_of_the_environment_is_told_where_it_is(
    line, has_open_mpi, given, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("OPAL_PREFIX", given or "")
    if given is None:
        monkeypatch.delenv("OPAL_PREFIX")
    if has_open_mpi:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libmpi.so.40").touch()
    exec(line, {})
    assert os.environ.get("OPAL_PREFIX") == (str(tmp_path) if expected == "here" else expected)


@pytest.mark.parallel
@pytest.mark.smoke
@pytest.mark.torch
def test_one_process_needs_no_launcher():
    pytest.importorskip("horovod")
    environment = {k: v for k, v in os.environ.items() if k != "OPAL_PREFIX"}
    script = "import horovod.torch as hvd; hvd.init(); print(hvd.size(), 'process')"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1 process\n", done.stdout + done.stderr
