"""scripts/gpu_first_minutes.sh, which looks at a GPU, runs with the emulator too."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    case = json.loads(line)
    if case["kind"] == "crash":
        os.abort()
    if case["kind"] == "hang":
        time.sleep(60)
    print("a library's line")
    print("@@" + json.dumps({"ok": case["kind"] == "right", "pid": os.getpid()}), flush=True)
"""


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports one of the scripts."""
    for folder in ("scripts", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module


def lines_of(folder, *arguments):
    """Run the script without a GPU; return its lines by step, and check that all went well."""
    command = ["bash", "scripts/gpu_first_minutes.sh", "--emulated", *arguments]
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(folder)}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=550
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert json.loads((folder / "steps.jsonl").read_text().splitlines()[-1]) == lines[-1]
    return lines


@pytest.mark.more
def test_a_few_contract_cases_pass(tmp_path):
    lines = lines_of(tmp_path, "--only", "contracts", "--budget", "120")
    found = {line["step"]: line for line in lines}
    assert list(found) == ["machine", "compile", "contracts", "all"]
    assert found["contracts"]["passed"] > 5
    assert (found["contracts"]["failed"], found["contracts"]["not_finished"]) == ([], [])


@pytest.mark.slow
def test_all_steps_end_well(tmp_path):
    found = {line["step"]: line for line in lines_of(tmp_path)}
    assert {name for name, line in found.items() if line["ok"] is None} == {
        "memcheck", "racecheck", "ncu",
    }  # fmt: skip
    assert found["speed"]["step_ms_and_copies"]
    assert found["ddp"]["step_ms_and_waits"].keys() == {"1 over gloo", "2 over gloo"}


@pytest.mark.slow
def test_trainings_end_well(tmp_path):
    lines = [line for line in lines_of(tmp_path, "--train") if "recipe" in line]
    assert [line["recipe"] for line in lines] == ["none", "topk(density=0.01)"]
    for line in lines:
        assert line["finite"]
        assert line["steps"] == line["of_steps"]
    assert lines[0]["ratio"] == 1
    assert lines[1]["ratio"] > 50


def test_crashes_and_hangs_are_told_and_the_next_case_gets_another_process(
    script, tmp_path, monkeypatch, capsys
):
    processes = script("gpu_processes")
    (tmp_path / "gpu_cases.py").write_text(WORKER)
    monkeypatch.setattr(processes, "HERE", tmp_path)
    monkeypatch.setattr(processes, "START_S", 10)
    pool = processes.Pool(report := processes.Report(tmp_path), emulated=True)
    kinds = ("right", "wrong", "crash", "right", "hang", "right")
    cases = [(f"{i} {kind}", {"kind": kind}) for i, kind in enumerate(kinds)]
    found = pool.run("step", cases, time.monotonic() + 60, 1, n=1, threads=1)
    pool.close()
    report.close()
    assert [answer["ok"] for answer in found.values()] == [True, False, False, True, False, True]
    assert found["2 crash"]["error"] == "the process ended with -6"
    assert found["4 hang"]["error"] == "no answer in 1 s"
    pids = [answer.get("pid") for answer in found.values()]
    assert pids[0] == pids[1]
    assert len({pids[0], pids[3], pids[5]}) == 3
    assert capsys.readouterr().out.count('"ok": false') == 3


def test_a_program_that_does_not_end_is_ended(script, tmp_path):
    processes = script("gpu_processes")
    pool = processes.Pool(processes.Report(tmp_path), emulated=True)
    minutes = processes.Minutes(pool.report, pool, emulated=True, whole=False)
    endless = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    told, began = [], time.monotonic()
    command = [sys.executable, "-c", endless]
    assert minutes.run(command, began + 2, "endless", tell=told.append) == (None, "begun\n")
    minutes.close()
    assert told == ["begun"]
    assert time.monotonic() - began < 10


def test_a_difference_is_told_with_its_place(script):
    comparison = script("gpu_comparison")
    ours, theirs = np.arange(5, dtype=np.float32), np.arange(5, dtype=np.float32)
    exact, near = comparison.Comparison(0.0), comparison.Comparison(1e-3)
    for found in (exact, near):
        found.compare("same", ours, theirs)
        assert found.differences == []
        found.compare("other", ours[1:] + np.float32(1e-5), theirs[1:])
        found.compare("far", ours + np.nan, theirs)
    assert exact.differences[0].startswith("other: ")
    assert "the first at 0" in exact.differences[0]
    assert [text.partition(":")[0] for text in near.differences] == ["far"]


@pytest.mark.parametrize("recipe", ["topk", "bf16", "none", "powersgd", "scalecom"])
def test_learners_on_a_device_get_the_gradients_of_simulated_learners(script, recipe):
    from horovod_fftcomp.torch import SimulatedLearners
    from tests.gpu.torch_emulator import TorchEmulator

    device, found = TorchEmulator(), []
    for on_device in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(60, 50), torch.nn.Linear(50, 40))
        if on_device:
            module = script("language_model_device")
            learners = module.LearnersOnDevice(model, 3, recipe, device)
        else:
            learners = SimulatedLearners(model, 3, recipe)
        for _ in range(3):
            for rank in range(3):
                with learners.turn_of(rank):
                    model(torch.randn(8, 60)).square().mean().backward()
            learners.reduce()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        found.append([costs.sent_nbytes for costs in learners.costs] + [learners.dense_nbytes])
    for ours, theirs in zip(found[4:], found[:4], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.fixture
def trainer(script, monkeypatch):
    """Return gpu_train.py with a tiny model, which is evaluated after every second step."""
    training = script("language_model_training")
    for name, value in {"EVALUATE_EVERY": 2, "EVALUATED_BATCHES": 2, "BATCH": 2}.items():
        monkeypatch.setattr(training, name, value)
    monkeypatch.setitem(training.SIZES, "tiny", training.Size(48, 1, 8))
    return script("gpu_train")


@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    [
        ("fft", "adamw"),
        ("dct(density=0.15) after 2 dense steps, every 3th step by qsgd", "adamw-ours"),
        pytest.param("none", "adamw-unclipped", marks=pytest.mark.more),
        pytest.param("dither", "adamw", marks=pytest.mark.more),
        pytest.param("powersgd", "adamw-unclipped-10", marks=pytest.mark.more),
        pytest.param("auto", "adamw", marks=pytest.mark.more),
    ],
)
def test_trainings_on_a_device_find_what_those_on_a_cpu_do(trainer, recipe, optimizer):
    from tests.gpu.torch_emulator import TorchEmulator

    text = trainer.read_text(trainer.LIBRARY, any_text=True)
    on_cpu = trainer.Training(trainer.Run("tiny", 2, 8, recipe, optimizer, trainer.RATE, 0))
    there = trainer.Trial(recipe, optimizer, 8, trainer.Job(TorchEmulator(), "tiny", 2))
    found = []
    for made in (on_cpu, there):
        while made.step < 8:
            made.advance(text)
        found.append(made.found(text) | {"seconds": 0})
        assert found[-1].pop("validation_losses") == pytest.approx(on_cpu.losses, abs=1e-4)
        assert found[-1].pop("validation_loss") == pytest.approx(on_cpu.losses[-1], abs=1e-4)
    assert found[0] == found[1]
    assert on_cpu.learners.dense_nbytes == there.learners.dense_nbytes
    updated = [
        [state.get("refreshed") for state in made.optimizer.state.values()]
        for made in (on_cpu, there)
    ]
    assert updated[0] == updated[1]


@pytest.mark.parametrize("steps", [2, 99, 100])
def test_dense_steps_of_a_training_are_half_of_it_at_most(trainer, steps):
    from tests.gpu.torch_emulator import TorchEmulator

    job = trainer.Job(TorchEmulator(), "tiny", 2)
    made = [trainer.Trial(*run, steps, job) for run in trainer.RUNS]
    assert [each.warm_up for each in made if each.warm_up] == [{2: 1, 99: 24, 100: 50}[steps]]


def test_a_training_with_shared_second_moments_can_be_timed(trainer):
    from tests.gpu.torch_emulator import TorchEmulator

    text = trainer.read_text(trainer.LIBRARY, any_text=True)
    [run] = [run for run in trainer.RUNS if run[1] == "adamw-ours"]
    trial = trainer.Trial(*run, 2 * trainer.TIMED_STEPS, trainer.Job(TorchEmulator(), "tiny", 2))
    assert trainer.seconds_of_step(trial, text) > 0
    assert trial.learners.engines[0].n_compressed == [5]
