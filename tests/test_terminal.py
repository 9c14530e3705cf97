"""Tables lose nothing: every command in a terminal of 60 to 200 columns, and in a pipe."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress

from horovod_fftcomp.cli import console, main, run_report
from horovod_fftcomp.cli.check import Report
from horovod_fftcomp.tools.advise import load
from horovod_fftcomp.tools.check import Finding, Level
from horovod_fftcomp.tools.run.launcher import RANK_VARIABLES

pytestmark = pytest.mark.xdist_group("terminal")  # runs each command once
ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (60, 80, 120, 200)
LONG = "fft(density=0.125,bits=10,block=1024,error_feedback=False),topk"
COMMANDS: list[list[str]] = [
    ["recipes"],
    ["bench", "-n", "2000", "--repeat", "1", "--compression", LONG],
    ["advise", "--gradients", "g.npz", "--compute-ms", "5", "--repeat", "1", "--compression", LONG,
     # So slow a network that topk's bytes decide, however busy the machine is: the options of fft
     # are one word, too long for 60 columns.
     "--gbit-per-s", "0.0001", "--ranks", "4", "--nodes", "2..512"],
]  # fmt: skip


def compared() -> list[dict]:
    """Return what jobs of ``run --compare`` report."""
    times = {f"{what}_s": 0.0123 for what in ("encode", "wait", "decode")}
    first = {"steps": 9, "step_s": 1.2345, "sent_nbytes": 123_456_789, "dense_nbytes": 4e9}
    first |= {"blocks_s": [1.2, 1.3]}
    names = ("none", "fft(density=0.125, bits=10, block=1024, error_feedback=False)", "topk")
    troubles = ("", run_report.DIFFER, "ranks 0, 1: ValueError: a bug; exit status 1")
    return [
        {"recipe": name, "place": place, "trouble": trouble, "repeat": repeat, "load": 0.5}
        | {"ranks": [first | times] if name != "topk" else [], "metric": 0.987654 + repeat}
        for repeat in range(3)
        for place, (name, trouble) in enumerate(zip(names, troubles, strict=True))
    ]


def show_all() -> None:
    """Run every command, or what prints the tables of those that take long."""
    load.look = lambda: np.array([1, 10**9, 0, 0])  # else nothing is recommended on a busy machine
    for command in COMMANDS:
        main(command)
    report = Report(None)
    report.add(Finding("horovod.torch", Level.OK, "built with MPI, Gloo; without NCCL, as here"))
    remedy = "set HOROVOD_WITH_PYTORCH=1 and HOROVOD_WITHOUT_MXNET=1, and install it anew"
    report.add(Finding("kernels", Level.FAIL, "12 of 34 recipes have other bytes", remedy))
    report.print()
    run_report.print_comparison(compared())


def show_at_all_widths() -> None:
    """Print everything at each width, and after it the tables' cells as JSON."""
    made: list[console.Table] = []
    plain = console.Table.__init__

    def noted(self, *arguments) -> None:
        plain(self, *arguments)
        made.append(self)

    console.Table.__init__ = noted
    for width in WIDTHS:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        made.clear()
        print(f"WIDTH {width}", flush=True)
        show_all()
        cells = [cell.plain for table in made for row in table.rows for cell in row]
        heads = [line for table in made for head in table.heads[1:] for line in head.split("\n")]
        print(f"CELLS {json.dumps(heads + cells)}")


def is_complete(cell: str, lines: list[str]) -> bool:
    """Whether ``cell`` is in the lines, in whole words, on one line or on some in a column."""
    words = cell.split()
    if not words:
        return True
    first = re.compile(rf"(?<![^ ]){re.escape(words[0])}(?![^ ;:])")
    starts = [(n, found.start()) for n, line in enumerate(lines) for found in first.finditer(line)]
    return any(_goes_on(words, lines[n:], start) for n, start in starts)


def _goes_on(words: list[str], lines: list[str], start: int) -> bool:
    for line in lines:
        fits = (n for n in range(len(words), 0, -1) for x in {start, 2}
                if re.match(rf"{re.escape(' '.join(words[:n]))}(?![^ ;:])", line[x:]))  # fmt: skip
        taken = next(fits, 0)
        words = words[taken:]
        if not words or not taken:
            return not words
    return False


def test_what_is_cut_is_found_out():
    table = ["name  what is        MB at", "fft   all of       1.25", "      it"]
    assert is_complete("all of it", table)
    assert is_complete("1.25", table)
    for cut in ("all of it there", "1.2", "it all", "T at"):
        assert not is_complete(cut, table)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with gradients in the file g.npz."""
    folder = tmp_path_factory.mktemp("terminal")
    rng = np.random.default_rng(0)
    np.savez(folder / "g.npz", w=rng.standard_normal((60, 50)).astype(np.float32))
    return folder


def printed_to_a_terminal(
    *command: str,
    folder: Path,
    streams: tuple[str, ...],
    plain: bool = True,
    ends: tuple[int, ...] = (0,),
    **others: int,
) -> str:
    """Run Python's ``command`` with ``streams`` in a pseudo-terminal; return what it printed there.

    ``plain``: without escape sequences. ``ends``: exit statuses. ``others``: the other streams, as
    of ``subprocess.Popen``.
    """
    removed = {"COLUMNS", "LINES", *RANK_VARIABLES}
    environment = {key: value for key, value in os.environ.items() if key not in removed}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        **dict.fromkeys(streams, theirs),
        **others,
    )
    os.close(theirs)
    printed = b""
    while True:
        try:
            printed += (part := os.read(ours, 1 << 16))
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
    os.close(ours)
    text = printed.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) if plain else text
    assert process.wait() in ends, text[-4000:]
    return text


@pytest.fixture(scope="module")
def in_a_terminal(folder) -> dict[int, tuple[list[str], list[str]]]:
    """Return (lines, cells of all tables) by width, printed to a pseudo-terminal."""
    streams, progress = ("stdin", "stdout"), {"stderr": subprocess.DEVNULL}
    text = printed_to_a_terminal(
        "-m", "tests.test_terminal", folder=folder, streams=streams, **progress
    )
    text = text.replace("\r", "")
    parts = re.findall(r"^WIDTH (\d+)\n(.*?)^CELLS (.*?)$", text, re.M | re.S)
    return {int(width): (shown.splitlines(), json.loads(cells)) for width, shown, cells in parts}


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_too_long_and_no_cell_is_cut(in_a_terminal, width):
    lines, cells = in_a_terminal[width]
    assert len(cells) > 300
    assert [line for line in lines if len(line.rstrip()) > width] == []
    assert [cell for cell in cells if not is_complete(cell, lines)] == []
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("width", [40, 64, 200])
def test_a_path_that_is_too_long_for_a_line_is_broken(width, monkeypatch, capsys):
    path = "/" + "/".join(f"folder-{n}" for n in range(10, 20))
    monkeypatch.setenv("COLUMNS", str(width))
    report = Report(None)
    report.add(Finding("kernel cache", Level.OK, path))
    report.print()
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert path in "".join(line[14:].removeprefix("   OK").strip() for line in lines[2:])


def test_commands_to_paste_can_be_pasted(in_a_terminal):
    lines, _ = in_a_terminal[60]
    text = "\n".join(line.rstrip() for line in lines).split("editing the script:\n")[1]
    shown = text.split("\nCompare")[0]
    command = shlex.split(shown.replace("\\\n", ""))  # as a shell joins lines
    start = "horovodrun -np 4 horovod-fftcomp run --compression".split()
    assert (command[:6], command[7:]) == (start, ["train.py"])
    assert "\\\n" in shown


def test_progress_is_shown_on_a_terminal(folder):
    """In a pipe there is none: see ``advise`` in test_advise.py."""
    command, more = ["-m", "horovod_fftcomp", *COMMANDS[2]], {"stdout": subprocess.DEVNULL}
    more |= {"ends": (0, 3)}  # on a busy machine nothing is recommended
    shown = printed_to_a_terminal(*command, folder=folder, streams=("stderr",), **more)
    assert "measuring topk" in shown
    assert "100%" in shown


def test_the_time_left_is_that_of_the_stages_to_come(monkeypatch):
    now_s = [0.0]
    bar = functools.partial(Progress, get_time=lambda: now_s[0])
    monkeypatch.setattr(console, "progress_bar", bar)
    stages = console.Stages(10 + 10 + 4)
    told = []
    for begin_s, share in ((0, 10), (20, 10), (44, 4), (52, 0)):
        for later_s in (0, 5, 100):
            now_s[0] = begin_s + later_s
            if not later_s:
                stages.begin(f"from {begin_s} s", share)
            [task] = stages.bar.tasks
            told.append(stages.bar.columns[-1].render(task).plain)
    assert told == [
        "", "", "",
        "about 28 s left", "about 23 s left", "",
        "about 9 s left", "about 4 s left", "",
        "", "", "",
    ]  # fmt: skip
    assert task.finished


@pytest.mark.parametrize(("width", "expected"), [(None, 120), ("70", 70)])
def test_in_a_pipe_there_are_120_columns_or_as_many_as_told(
    width, expected, monkeypatch, no_launcher
):
    monkeypatch.setattr(os, "isatty", lambda _: False)
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", width)
    assert console.make_console().width == expected
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert console.make_console().width == 64  # and the launcher's prefix
    monkeypatch.delenv("HOROVOD_RANK")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun puts none before it
    monkeypatch.setenv("RANK", "1")
    assert console.make_console().width == 120


def test_errors_of_arguments_end_lines_between_words(folder):
    """In a pipe they are one line."""
    show = "import fcntl, os, struct, sys, termios; from horovod_fftcomp.cli import main\n"
    show += "fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 60, 0, 0))\n"
    show += "try: main(['run', '--compare', 'fft:dense=1', 'x.py'])\nexcept SystemExit: pass"
    streams, others = ("stderr",), {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    shown = printed_to_a_terminal("-c", show, folder=folder, streams=streams, **others)
    lines = shown.replace("\r", "").split("error: ")[1].splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    piped = subprocess.run(
        [sys.executable, "-c", show.replace("fcntl.ioctl", "print")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert piped.stderr.split("error: ")[1].splitlines() == [" ".join(lines)]


@pytest.mark.parametrize("width", [20, 60])
def test_what_was_written_is_told_without_a_break_in_a_path(width):
    text = "wrote /a/folder/that-has-a-long-name/x.png and .json, /b/y.png\nsecond"
    lines = console.in_lines(text, width).splitlines()
    assert " ".join(lines).split() == text.split()
    assert [line for line in lines if len(line) > width and " " in line] == []
    assert lines[-1] == "second"


def test_a_rank_writes_no_escape_sequence_at_its_end(folder):
    """Ranks under MPI have a pseudo-terminal, whose output a launcher passes on."""
    pytest.importorskip("colorama")
    code = "import horovod_fftcomp.monitor.parameter_hash as h; h.hash_kernel(); print('done')"
    shown = printed_to_a_terminal("-c", code, folder=folder, streams=("stdout",), plain=False)
    assert shown.replace("\r", "") == "done\n"


if __name__ == "__main__":
    show_at_all_widths()
