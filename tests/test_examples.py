"""The digits examples run on two ranks and report the same task, whatever the framework."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from horovod_fftcomp.tools.advise import cost_model
from tests.test_parallel import CONTROLLERS, run_ranks

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    pytest.param("torch_digits", CONTROLLERS[0], marks=[pytest.mark.torch, pytest.mark.more]),
    pytest.param("tensorflow_digits", CONTROLLERS[1], marks=pytest.mark.tf),
    pytest.param("keras_digits", CONTROLLERS[0], marks=pytest.mark.tf),
]


@pytest.mark.parallel
@pytest.mark.parametrize(("script", "controller"), SCRIPTS)
def test_the_example_trains_and_reports(script, controller, tmp_path, digits):
    code, output = run_ranks(
        2, controller, f"examples/{script}.py", "--epochs", "4",
        "--compression", "none,topk:density=0.1", "--out", str(tmp_path),
    )  # fmt: skip
    assert code == 0, output[-8000:]
    printed = " ".join(re.sub(r"^\[.*?\]<std\w+>:", "", output, flags=re.M).split())
    assert f"wrote {tmp_path / script}.png and .json" in printed
    assert (tmp_path / f"{script}.png").stat().st_size > 0
    assert (tmp_path / f"{script}_forecast.png").stat().st_size > 0
    report = json.loads((tmp_path / f"{script}.json").read_text())
    assert (report["ranks"], report["epochs"]) == (2, 4)
    dense, sparse = report["runs"]
    assert (dense["recipe"], sparse["recipe"]) == ("none", "topk(density=0.1)")
    assert sparse["options"]["density"] == 0.1
    assert dense["sent_nbytes_per_step"] == 4 * 151_306
    assert sparse["sent_nbytes_per_step"] == 19_716
    for run in (dense, sparse):
        assert run["accuracy"] > 0.6
        parts = run["ms_per_step"]
        assert list(parts) == ["compute", "encode", "exchange", "decode", "step"]
        assert min(parts.values()) >= 0
        assert sum(run["losses"][-8:]) < 0.7 * sum(run["losses"][:8])
    assert min(sparse["ms_per_step"].values()) > 0
    measured = [digits.Run(**run) for run in report["runs"]]
    compute_ms = min(run.ms_per_step["compute"] for run in measured)
    none_ms, topk_ms = (
        digits.forecast_ms(run, compute_ms, min(digits.LINKS), cost_model.CYCLE_S)
        for run in measured
    )
    [slow] = re.findall(r"topk\(density=0\.1\) +([\d.]+ \([\d.]+x\))", output)
    assert slow == f"{topk_ms:.1f} ({none_ms / topk_ms:.2f}x)"


@pytest.fixture
def digits(monkeypatch):
    """Return the module that the digits examples share."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")  # which the module sets
    yield importlib.import_module("digits")
    del sys.modules["digits"]


def a_run(digits, recipe, sent_nbytes=600_000):
    parts = dict(zip(digits.PARTS, (5.0, 1.0, 9.0, 1.0, 16.0), strict=True))
    return digits.Run(recipe, {}, 0.9, sent_nbytes, 600_000 / sent_nbytes, parts, [1.0, 0.5])


def test_horovods_cycle_is_counted_once_for_each_round(digits):
    for recipe, rounds in (("none", 1), ("scalecom", 2)):
        run = a_run(digits, recipe)
        ms = [digits.forecast_ms(run, 5.0, 1.0, cycle_s) for cycle_s in (0.0, 1e-3)]
        assert ms[1] - ms[0] == pytest.approx(rounds)
    # A ring: 8 * 600 kB over 1 Gbit/s and two latencies, beside what was measured.
    assert digits.forecast_ms(a_run(digits, "none"), 5.0, 1.0, 0.0) == pytest.approx(11.9)


ALL_TOOLS = {"ip", "tc", "others"}


@pytest.mark.parametrize(
    ("tools", "user", "local_size", "offered"),
    [
        (ALL_TOOLS, 0, 2, True),
        (ALL_TOOLS - {"ip"}, 0, 2, False),
        (ALL_TOOLS - {"tc"}, 0, 2, False),
        (ALL_TOOLS - {"others"}, 0, 2, False),
        (ALL_TOOLS, 1000, 2, False),
        (ALL_TOOLS, 0, 1, False),  # a rank on each host, as in the cluster itself
    ],
)
def test_a_cluster_is_offered_where_one_can_be_made(
    tools, user, local_size, offered, digits, monkeypatch
):

    def which(tool):
        return tool if (tool if tool in ALL_TOOLS else "others") in tools else None

    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    job = SimpleNamespace(size=lambda: 2, local_size=lambda: local_size)
    assert digits.can_make_cluster(job) == offered


@pytest.mark.parametrize("horovod", [True, False])
def test_what_only_horovod_has_is_not_told_of_other_jobs(
    horovod, digits, monkeypatch, tmp_path, capsys
):
    arguments = ["--compression", "none,topk", "--epochs", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    monkeypatch.setattr(digits, "can_make_cluster", lambda _: True)
    job = SimpleNamespace(init=lambda: None, rank=lambda: 0, size=lambda: 2)

    def train(recipe, options, args, progress):
        return a_run(digits, recipe)

    digits.main("script", "A description.", job, train, "waiting.", horovod=horovod)
    printed = capsys.readouterr().out
    assert "Forecast of a step between two hosts" in printed
    assert ("make cluster-netns" in printed) == horovod
    assert ("Horovod's cycle" in printed) == horovod
    # 600 kB at 0.1 Gbit/s take 48 ms, a round of a cycle 1 ms more.
    assert f"{5 + 1 + 48.1 + 1 + horovod:.1f} (1.00x)" in printed, printed


def test_the_tools_looked_for_are_those_of_the_cluster(digits):
    script = (ROOT / "docker" / "netns").read_text()
    [named] = re.findall(r"for tool in (.*?); do", script)
    assert [*digits.CLUSTER_TOOLS, "horovodrun"] == named.split()
    target = re.search(r"^cluster-netns: .*\n\t.*$", (ROOT / "Makefile").read_text(), re.M)[0]
    assert "docker/netns -r $(or $(RATE)" in target
    assert "make cluster-netns RATE=" in digits.CLUSTER
