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
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest

import horovod_fftcomp as hfc
from horovod_fftcomp.monitor import gradient_recorder
from horovod_fftcomp.monitor.gradient_recorder import Recorder
from horovod_fftcomp.tools import gradient_files

SHAPES = {"layers.0.weight": (40, 50), "a/b": (3,), "größe": (2, 3, 4), "empty": (0, 7)}


def grads_of(step):
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in SHAPES.items()}


def recorded(folder):
    """Return {step: {name: gradient}} of the files in ``folder``."""
    found = {}
    for path in folder.glob("*.npz"):
        with np.load(path, allow_pickle=False) as loaded:
            found[int(path.stem)] = dict(loaded)
    return found


def assert_recorded(folder, steps):
    found = recorded(folder)
    assert sorted(found) == list(steps)
    for step, grads in found.items():
        assert grads.keys() == SHAPES.keys()
        for name, grad in grads_of(step).items():
            assert grads[name].dtype == np.float32
            np.testing.assert_array_equal(grads[name], grad)


@pytest.mark.parametrize("large", [False, True])
def test_what_was_recorded_is_what_is_loaded(large, tmp_path, monkeypatch):
    if large:  # as if a step had more than 4 GB and 65535 arrays
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 3)
    recorder = Recorder(tmp_path / "grads", every=5)
    assert list(recorder.path.iterdir()) == []
    steps = [step for step in range(23) if recorder.wants(step)]
    assert steps == [0, 5, 10, 15, 20]
    for number, step in enumerate(steps, 1):
        recorder.append(step, grads_of(step))
        recorder.flush()
        assert_recorded(recorder.path, steps[:number])
    assert sorted(path.name for path in recorder.path.iterdir()) == sorted(
        f"{step}.npz" for step in steps
    )
    # Little more than the values: two headers for each.
    values = sum(grad.nbytes for step in steps for grad in grads_of(step).values())
    size = sum(path.stat().st_size for path in recorder.path.iterdir())
    assert size < values + 5 * len(SHAPES) * 1000


def test_a_recording_is_read_step_by_step_in_ascending_order(tmp_path):
    recorder = Recorder(tmp_path / "grads", every=1)
    for step in (2, 10, 11, 100):
        recorder.append(step, {name: grad for name, grad in grads_of(step).items() if grad.size})
    recorder.flush()
    (recorder.path / "101.part").write_bytes(b"of a run that was killed")
    (recorder.path / "notes.npz").write_text("somebody's")
    histories = {history.name: history.steps for history in gradient_files.read(recorder.path)}
    assert set(histories) == {name for name, shape in SHAPES.items() if 0 not in shape}
    for name, steps in histories.items():
        for grad, step in zip(steps, (2, 10, 11, 100), strict=True):
            np.testing.assert_array_equal(grad, grads_of(step)[name])
    [weights] = (h for h in gradient_files.read(recorder.path / "10.npz") if h.name == "a/b")
    np.testing.assert_array_equal(weights.steps, [grads_of(10)["a/b"]])
    with pytest.raises(ValueError, match="holds no array"):
        gradient_files.read(tmp_path)


def test_a_tensor_may_have_any_name(tmp_path):
    recorder = Recorder(tmp_path / "grads", every=1)
    names = ("file", "allow_pickle", "a.npy", "3/b")
    recorder.append(0, {name: np.full(2, i, np.float16) for i, name in enumerate(names)})
    recorder.flush()
    assert {name: list(grad) for name, grad in recorded(recorder.path)[0].items()} == {
        name: [i, i] for i, name in enumerate(names)
    }


def test_a_step_is_written_once(tmp_path):
    """After a restore a run passes the same steps again."""
    recorder = Recorder(tmp_path / "grads", every=1)
    recorder.append(3, grads_of(3))
    assert [recorder.wants(step) for step in (2, 3, 4)] == [False, False, True]


def test_recorded_gradients_can_be_simulated(tmp_path):
    recorder = Recorder(tmp_path / "grads", every=1)
    for step in range(3):
        recorder.append(step, grads_of(step))
    recorder.flush()
    found = recorded(recorder.path)
    steps = [found[step]["layers.0.weight"].reshape(1, -1) for step in range(3)]
    last = list(hfc.simulate("topk", steps, density=0.1))[-1]
    assert last.residual.any()


def test_what_exists_is_left_alone(tmp_path):
    path = tmp_path / "grads"
    path.write_text("somebody's")
    with pytest.raises(FileExistsError, match=r"record: .*grads' exists .* another name"):
        Recorder(path, every=1)
    assert path.read_text() == "somebody's"
    with pytest.raises(FileExistsError, match="not overwritten"):
        Recorder(tmp_path, every=1)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError, match=r"record: the folder .*missing' does not exist"):
        Recorder(tmp_path / "missing" / "grads", every=1)
    (tmp_path / "empty").mkdir()
    Recorder(tmp_path / "empty", every=1)


def test_an_error_of_the_disk_comes_out_and_costs_one_step(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "grads", every=1)
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
    assert [path.name for path in recorder.path.iterdir()] == ["0.npz"]
    recorder.append(2, grads_of(2))
    recorder.flush()
    recorder.check()
    assert_recorded(recorder.path, [0, 2])


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
size = (recorder.path / "2.npz").stat().st_size
append(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(float(sys.argv[2]) * size),) * 2)
try:
    append(4)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99])
def test_a_full_disk_costs_one_step_whenever_it_is_full(tmp_path, share):
    """Of a file the directory is some hundredths, longer than a buffer."""
    path = tmp_path / "grads"
    run = subprocess.run(
        [sys.executable, "-c", FILLING, str(path), str(share)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "OSError\n"
    assert sorted(path.name for path in path.iterdir()) == [f"{step}.npz" for step in range(4)]
    for step, grads in recorded(path).items():
        assert len(grads) == 300
        assert (grads["layers.299.weight"] == step).all()


def test_check_raises_without_waiting(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "grads", every=1)
    monkeypatch.setattr(
        gradient_recorder, "write_file", lambda path, grads: time.sleep(0.1) or 1 / 0
    )
    recorder.append(0, grads_of(0))
    recorder.check()
    wait([recorder.writing], 60)
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
    path = tmp_path / "grads"
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
    found = recorded(path)
    assert sorted(found) in (list(range(steps)), list(range(steps + 1)))
    for step, grads in found.items():
        assert len(grads) == 5
        assert all((grad == step).all() for grad in grads.values())


def test_the_folder_can_be_read_while_it_is_written(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "grads", every=1)
    plain, seen = np.lib.format.write_array, []

    def looking(file, array):
        plain(file, array)
        file._fileobj.flush()
        seen.append(sum(len(grads) for grads in recorded(recorder.path).values()))

    monkeypatch.setattr(np.lib.format, "write_array", looking)
    for step in range(3):
        recorder.append(step, {f"t{i}": np.full(100_000, i, np.float32) for i in range(2)})
    recorder.flush()
    assert seen == [0, 0, 2, 2, 4, 4]


def test_what_was_appended_last_is_written_when_the_process_ends(tmp_path):
    script = WRITING.replace("itertools.count()", "range(1)").replace("    recorder.flush()\n", "")
    path = tmp_path / "grads"
    subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=Path(__file__).parent.parent, check=True
    )
    assert len(recorded(path)[0]) == 5
