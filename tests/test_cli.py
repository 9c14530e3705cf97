"""The command line prints what the table of recipes says."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from horovod_fftcomp import list_compressors
from horovod_fftcomp.cli import main
from horovod_fftcomp.wire.version import __version__


def test_recipes_lists_all_of_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    main(["recipes", "-n", "5000"])
    printed = capsys.readouterr().out
    for name in list_compressors():
        assert re.search(rf"^{name} ", printed, re.M)
    assert "5,000 elements" in printed


def test_recipes_lists_what_ranks_receive(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")
    main(["recipes", "-n", "1000000"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    received = {row[0]: row[2:4] for row in rows if row}
    assert received["none"] == ["7", "7.88"]  # a ring: 2 (p-1)/p of 4 MB
    assert received["fp16"] == ["3.5", "3.94"]
    eight, many = map(float, received["qsgd"])
    assert eight < many < 1.15 * eight  # sharded


def test_the_module_runs_and_tells_its_version():
    command = [sys.executable, "-m", "horovod_fftcomp", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"horovod_fftcomp {__version__}"


def test_without_arguments_the_help_is_printed(capsys):
    main([])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: horovod-fftcomp")
    assert all(name in printed for name in ("recipes", "advise", "bench", "check", "run"))


def test_torchruns_report_tells_the_reason_of_a_status(capsys, monkeypatch, tmp_path):
    path = tmp_path / "error.json"
    for folder in (tmp_path / "gone", tmp_path):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        with pytest.raises(SystemExit):
            main(["recipes", "-n", "0"])
    assert json.loads(path.read_text())["message"]["message"] == (
        "none, as nothing has crashed: horovod-fftcomp recipes ends with status 2: argument "
        "-n/--numel: must be a whole number of at least 1, got 0"
    )


@pytest.mark.parametrize("arguments", [["nonsense"], ["recipes", "-n", "0"]])
def test_wrong_arguments_end_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: horovod-fftcomp" in capsys.readouterr().err
