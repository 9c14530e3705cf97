"""The digits examples run on two ranks and report the same task, whatever the framework."""

from __future__ import annotations

import json
import re

import pytest

from tests.test_parallel import CONTROLLERS, run_ranks

SCRIPTS = [
    pytest.param("torch_digits", CONTROLLERS[0], marks=[pytest.mark.torch, pytest.mark.smoke]),
    pytest.param("tensorflow_digits", CONTROLLERS[1], marks=pytest.mark.tf),
    pytest.param("keras_digits", CONTROLLERS[0], marks=pytest.mark.tf),
]


@pytest.mark.parallel
@pytest.mark.parametrize(("script", "controller"), SCRIPTS)
def test_the_example_trains_and_reports(script, controller, tmp_path):
    code, output = run_ranks(
        2, controller, f"examples/{script}.py", "--epochs", "4",
        "--compression", "none,topk:density=0.1", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0, output[-8000:]
    assert f"wrote {tmp_path / script}.png and .json" in output
    assert (tmp_path / f"{script}.png").stat().st_size > 0
    assert (tmp_path / f"{script}_forecast.png").stat().st_size > 0
    [slow] = re.findall(r"topk\(density=0\.1\) +[\d.]+ \(([\d.]+)x\)", output)
    assert float(slow) > 2  # at 0.1 Gbit/s, where a dense step takes 48 ms to send
    report = json.loads((tmp_path / f"{script}.json").read_text())
    assert (report["ranks"], report["epochs"]) == (2, 4)
    dense, sparse = report["runs"]
    assert (dense["recipe"], sparse["recipe"]) == ("none", "topk(density=0.1)")
    assert sparse["options"]["density"] == 0.1
    assert dense["sent_nbytes_per_step"] == 4 * 151_306
    assert sparse["sent_nbytes_per_step"] == 19_300
    for run in (dense, sparse):
        assert run["accuracy"] > 0.6
        parts = run["ms_per_step"]
        assert list(parts) == ["compute", "encode", "exchange", "decode", "step"]
        assert min(parts.values()) >= 0
        assert sum(run["losses"][-8:]) < 0.7 * sum(run["losses"][:8])
    assert min(sparse["ms_per_step"].values()) > 0
