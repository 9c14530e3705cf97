"""The live view computes what passed between two moments, and never ends a training."""

from __future__ import annotations

import json
import math
import re
import resource
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.monitor.step_log import LiveView, figures

START = {
    "steps": 0, "dense_nbytes": 0, "sent_nbytes": 0, "received_nbytes": 0, "encode_s": 0.0,
    "wait_s": 0.0, "decode_s": 0.0, "collectives": 0, "skipped_steps": 0, "relative_error": 0.0,
    "density": 1.0,
}  # fmt: skip
AFTER_2 = START | {
    "steps": 2, "dense_nbytes": 8000, "sent_nbytes": 2000, "received_nbytes": 4000,
    "encode_s": 0.004, "wait_s": 0.25, "decode_s": 0.002, "collectives": 6, "skipped_steps": 1,
    "relative_error": 0.6, "density": 0.1,
}  # fmt: skip
AFTER_6 = AFTER_2 | {
    "steps": 6, "dense_nbytes": 24000, "sent_nbytes": 2400, "received_nbytes": 4800,
    "encode_s": 0.012, "wait_s": 0.25, "decode_s": 0.01, "collectives": 18, "density": None,
}  # fmt: skip


def lines_of(path):
    def refused(name):
        raise ValueError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refused) for line in path.read_text().splitlines()]


def test_figures_are_those_of_the_steps_in_between():
    assert figures(AFTER_2, AFTER_6, {"a": 0.5, "b": 2.0, "c": 1.0}) == {
        "steps": 4,
        "skipped_steps": 0,
        "ratio": 40.0,
        "sent_nbytes": 100.0,
        "received_nbytes": 200.0,
        "collectives": 3.0,
        "encode_ms": pytest.approx(2.0),
        "wait_ms": 0.0,
        "decode_ms": pytest.approx(2.0),
        "relative_error": 0.6,
        "kept_energy": pytest.approx(0.64),
        "residual_ratio": 2.0,
        "residual_tensor": "b",
        "density": None,
    }


def test_the_adapters_in_the_documentation_pass_scalars_on(tmp_path):
    page = (Path(__file__).parents[1] / "docs" / "training.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(class To\w+:\n.*?)^```", page, re.S | re.M)
    logged = []
    names = {
        "wandb": SimpleNamespace(log=lambda metrics: logged.append(metrics)),
        "mlflow": SimpleNamespace(log_metric=lambda name, value, step: logged.append((name, step))),
    }
    for block in blocks:
        exec(block, names)
    for adapter in (names["ToWandb"](), names["ToMlflow"]()):
        LiveView(None, adapter.add_scalar).show(2, AFTER_2, {})
    assert {"fftcomp/ratio": 4.0, "fftcomp/step": 2} in logged
    assert ("fftcomp/ratio", 2) in logged


def test_before_the_first_step_there_is_nothing_and_before_the_first_line_the_start():
    nothing = figures({}, START, {})
    assert nothing["steps"] == 0
    assert nothing["ratio"] is nothing["encode_ms"] is nothing["residual_ratio"] is None
    assert figures({}, AFTER_2, {}) == figures(START, AFTER_2, {})


def test_every_line_is_valid_json_and_scalars_are_numbers(tmp_path):
    path, scalars = tmp_path / "live.jsonl", []
    view = LiveView(path, lambda *scalar: scalars.append(scalar))
    view.check()
    assert path.read_text() == ""
    view.show(102, AFTER_2 | {"relative_error": math.nan}, {})
    view.show(106, AFTER_6, {"fc.weight": 3.0})
    first, second = lines_of(path)
    assert first["step"] == 102
    assert first["relative_error"] is first["kept_energy"] is first["residual_tensor"] is None
    assert second == {"step": 106} | figures(AFTER_2, AFTER_6, {"fc.weight": 3.0})
    names = {name for name, _, step in scalars if step == 102}
    assert "fftcomp/ratio" in names
    assert names.isdisjoint({"fftcomp/step", "fftcomp/relative_error", "fftcomp/residual_ratio"})
    values = {name.removeprefix("fftcomp/"): value for name, value, step in scalars if step == 106}
    left_out = {"step", "steps", "residual_tensor", "density"}  # the last is None here
    assert values == {name: value for name, value in second.items() if name not in left_out}


def test_a_resumed_run_appends_and_a_line_can_be_read_at_once(tmp_path):
    path = tmp_path / "live.jsonl"
    for run in range(2):
        view = LiveView(str(path), None)
        view.check()
        view.show(run, AFTER_2, {})
        assert [line["step"] for line in lines_of(path)] == list(range(run + 1))


def test_a_folder_that_is_missing_is_told_when_the_compressor_is_made(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"live_view: the folder .*missing' does not exist"):
        LiveView(tmp_path / "missing" / "live.jsonl", None).check()
    with pytest.raises(IsADirectoryError):
        LiveView(tmp_path, None).check()
    LiveView(None, print).check()


def test_a_full_disk_is_warned_of_once_and_scalars_go_on():
    scalars = []
    view = LiveView("/dev/full", lambda *scalar: scalars.append(scalar))
    with pytest.warns(RuntimeWarning, match=r"'/dev/full' cannot be written .*No space left"):
        view.show(2, AFTER_2, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        view.show(6, AFTER_6, {})
    assert {step for _, _, step in scalars} == {2, 6}


def test_a_disk_that_takes_half_a_line_keeps_whole_lines(tmp_path):
    view = LiveView(tmp_path / "live.jsonl", None)
    view.show(2, AFTER_2, {})
    size = (tmp_path / "live.jsonl").stat().st_size
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
    try:
        with pytest.warns(RuntimeWarning, match="No space left"):
            view.show(6, AFTER_6, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["step"] for line in lines_of(tmp_path / "live.jsonl")] == [2]


def test_a_writer_that_breaks_is_warned_of_once_and_lines_go_on(tmp_path):
    calls = []

    def broken(*scalar):
        calls.append(scalar)
        raise KeyError("closed")

    view = LiveView(tmp_path / "live.jsonl", broken)
    with pytest.warns(RuntimeWarning, match=r"scalars cannot be written .*KeyError: 'closed'"):
        view.show(2, AFTER_2, {})
    view.show(6, AFTER_6, {})
    assert len(calls) == 1
    assert len(lines_of(tmp_path / "live.jsonl")) == 2


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(TypeError, match="live_view must"):
        Settings(live_view=3)
    with pytest.raises(ValueError, match="live_every must"):
        Settings(live_every=0)
    for steps in (True, 2.0):
        with pytest.raises(TypeError, match="live_every must"):
            Settings(live_every=steps)
