"""The command line prints what the table of recipes says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from horovod_fftcomp import list_compressors
from horovod_fftcomp.cli import main
from horovod_fftcomp.version import __version__


def test_recipes_lists_all_of_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["recipes", "-n", "5000"])
    printed = capsys.readouterr().out
    for name in list_compressors():
        assert f" {name} " in printed
    assert "5,000 elements" in printed


def test_the_module_runs_and_tells_its_version():
    command = [sys.executable, "-m", "horovod_fftcomp", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"horovod_fftcomp {__version__}"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["recipes", "-n", "0"]])
def test_wrong_arguments_end_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: horovod-fftcomp" in capsys.readouterr().err
