"""Recorded gradients can be read by NumPy alone, whatever has become of the run."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

import horovod_fftcomp as hfc
from horovod_fftcomp.monitor import gradient_recorder
from horovod_fftcomp.monitor.gradient_recorder import Recorder

SHAPES = {"layers.0.weight": (40, 50), "a/b": (3,), "größe": (2, 3, 4), "empty": (0, 7)}


def grads_of(step):
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in SHAPES.items()}


@pytest.mark.parametrize("large", [False, True])
def test_what_was_recorded_is_what_is_loaded(large, tmp_path, monkeypatch):
    if large:  # as if the file had grown beyond 4 GB and 65535 arrays
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 7)
    recorder = Recorder(tmp_path / "grads.npz", every=5)
    assert len(np.load(recorder.path)) == 0
    steps = [step for step in range(23) if recorder.wants(step)]
    assert steps == [0, 5, 10, 15, 20]
    for step in steps:
        recorder.append(step, grads_of(step))
        recorder.flush()
        with np.load(recorder.path) as loaded:
            assert len(loaded) == len(SHAPES) * (step // 5 + 1)
    with np.load(recorder.path, allow_pickle=False) as loaded:
        for step in steps:
            for name, grad in grads_of(step).items():
                assert loaded[f"{step}/{name}"].dtype == np.float32
                np.testing.assert_array_equal(loaded[f"{step}/{name}"], grad)
    # Little more than the values: two headers for each, and the directories.
    values = sum(grad.nbytes for step in steps for grad in grads_of(step).values())
    assert recorder.path.stat().st_blocks * 512 < values + 5 * len(SHAPES) * 8192


def test_a_step_is_written_once(tmp_path):
    """After a restore a run passes the same steps again."""
    recorder = Recorder(tmp_path / "grads.npz", every=1)
    recorder.append(3, grads_of(3))
    assert [recorder.wants(step) for step in (2, 3, 4)] == [False, False, True]


def test_recorded_gradients_can_be_simulated(tmp_path):
    recorder = Recorder(tmp_path / "grads.npz", every=1)
    for step in range(3):
        recorder.append(step, grads_of(step))
    recorder.flush()
    with np.load(recorder.path) as loaded:
        steps = [loaded[f"{step}/layers.0.weight"].reshape(1, -1) for step in range(3)]
    last = list(hfc.simulate("topk", steps, density=0.1))[-1]
    assert last.residual.any()


def test_a_file_that_exists_is_left_alone(tmp_path):
    path = tmp_path / "grads.npz"
    path.write_text("somebody's")
    with pytest.raises(FileExistsError, match=r"record: .*grads.npz' exists .* another name"):
        Recorder(path, every=1)
    assert path.read_text() == "somebody's"
    with pytest.raises(FileNotFoundError, match=r"record: the folder .*missing' does not exist"):
        Recorder(tmp_path / "missing" / "grads.npz", every=1)


def test_an_error_of_the_disk_comes_out_and_costs_one_step(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "grads.npz", every=1)
    recorder.append(0, grads_of(0))
    recorder.flush()
    plain, written = np.lib.format.write_array, []

    def full(file, array):
        written.append(array)
        if len(written) == 3:
            file.write(b"a part")
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(file, array)

    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array", full)
        recorder.append(1, grads_of(1))
        with pytest.raises(OSError, match="No space left"):
            recorder.flush()
    with np.load(recorder.path) as loaded:
        assert {key.split("/")[0] for key in loaded} == {"0"}
    recorder.append(2, grads_of(2))
    recorder.flush()
    recorder.check()
    with np.load(recorder.path) as loaded:
        assert {key.split("/")[0] for key in loaded} == {"0", "2"}
        for name, grad in grads_of(2).items():
            np.testing.assert_array_equal(loaded[f"2/{name}"], grad)


FILLING = """
import resource, sys
import numpy as np
from horovod_fftcomp.monitor.gradient_recorder import Recorder
recorder = Recorder(sys.argv[1], every=1)
def append(step):
    grads = {f"layers.{i}.weight": np.full(100, step, np.float32) for i in range(300)}
    recorder.append(step, grads)
    recorder.flush()
for step in range(3):
    append(step)
size = recorder.path.stat().st_size
append(3)
grown = recorder.path.stat().st_size - size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + grown + int(float(sys.argv[2]) * grown),) * 2)
try:
    append(4)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99])
def test_a_full_disk_costs_one_step_whenever_it_is_full(tmp_path, share):
    """Of the file's last part the directories are some hundredths, longer than a buffer."""
    path = tmp_path / "grads.npz"
    run = subprocess.run(
        [sys.executable, "-c", FILLING, str(path), str(share)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "OSError\n"
    with np.load(path) as loaded:
        assert len(loaded) == 4 * 300
        assert (loaded["3/layers.299.weight"] == 3).all()


def test_check_raises_without_waiting(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "grads.npz", every=1)
    monkeypatch.setattr(
        gradient_recorder, "_append", lambda path, members: time.sleep(0.1) or 1 / 0
    )
    recorder.append(0, grads_of(0))
    recorder.check()
    time.sleep(0.3)
    with pytest.raises(ZeroDivisionError):
        recorder.check()
    recorder.check()


WRITING = """
import itertools, sys
import numpy as np
from horovod_fftcomp.monitor.gradient_recorder import Recorder
recorder = Recorder(sys.argv[1], every=1)
for step in itertools.count():
    recorder.append(step, {f"t{i}": np.full((300, 1000), step, np.float32) for i in range(5)})
    recorder.flush()
    print(step, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_loses_no_more_than_the_step_being_written(tmp_path, seed):
    path = tmp_path / "grads.npz"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITING, str(path)],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    first = process.stdout.readline()
    time.sleep(random.Random(seed).uniform(0, 0.1))
    os.kill(process.pid, signal.SIGKILL)
    rest, _ = process.communicate()
    steps = len((first + rest).splitlines())
    with np.load(path) as loaded:
        assert len(loaded) in (5 * steps, 5 * (steps + 1))
        for key in loaded:
            assert (loaded[key] == int(key.split("/")[0])).all()


def test_the_file_can_be_read_while_it_is_written(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "grads.npz", every=1)
    plain, seen = np.lib.format.write_array, []

    def looking(file, array):
        plain(file, array)
        file._fileobj.flush()
        with np.load(recorder.path) as loaded:
            seen.append(len(loaded))

    monkeypatch.setattr(np.lib.format, "write_array", looking)
    for step in range(3):
        recorder.append(step, {f"t{i}": np.full(100_000, i, np.float32) for i in range(2)})
    recorder.flush()
    assert seen == [0, 0, 2, 2, 4, 4]


def test_what_was_appended_last_is_written_when_the_process_ends(tmp_path):
    script = WRITING.replace("itertools.count()", "range(1)").replace("    recorder.flush()\n", "")
    path = tmp_path / "grads.npz"
    subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=Path(__file__).parent.parent, check=True
    )
    with np.load(path) as loaded:
        assert len(loaded) == 5
