"""Unmodified scripts of Hugging Face, Accelerate and Lightning: see ``make test-integrations``."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch

from horovod_fftcomp.torch_distributed import AdamW
from tests.test_torch_distributed import torchrun

pytestmark = [pytest.mark.parallel, pytest.mark.torch]

FOLDER = Path(__file__).parent / "integrations"
SCRIPTS = {
    "hf_trainer": ("transformers", ["6", "6"]),  # the second run begins with a checkpoint
    "accelerate_ema": ("accelerate", ["12"]),
    "lightning_fit": ("lightning", ["6", "6"]),
}

SCALARS = {"ratio", "encode_ms", "wait_ms", "relative_error", "residual_ratio"}
UNMEASURED = {"residual_ratio"}  # after a checkpoint, until the next 53rd step


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_compressed_and_its_copies_and_checkpoints_work(script, tmp_path):
    package, steps = SCRIPTS[script]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "horovod_fftcomp", "run", "--compression", "topk:density=0.1",
         "--warmup-steps", "0",
         FOLDER / f"{script}.py", tmp_path / "saved"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=FOLDER.parents[1],
        text=True,
        capture_output=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert re.findall(r"topk\(density=0.1\): (\d+) steps on 2 ranks", done.stderr) == steps
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+)", done.stdout, re.M)]
    assert len(losses) == 2
    assert all(loss < 1.38 for loss in losses)  # log 4 by chance


def test_the_trainers_callback_continues_to_the_bit(tmp_path):
    """A checkpoint halfway, in another folder, leads to the same weights and residuals."""
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    whole, second = tmp_path / "whole", tmp_path / "second"
    for folder in (whole, second):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             FOLDER.parents[1] / "examples" / "huggingface_text.py", "--compression", "topk",
             "--steps", "40", "--out", folder],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[1])},
            text=True,
            capture_output=True,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        loss, ratio = re.search(r"^loss ([\d.]+), ([\d.]+) times fewer", done.stdout, re.M).groups()
        assert float(loss) < 5  # log 256, about 5.5, by chance
        assert float(ratio) > 20
        logged = set(re.findall(r"compression/(\w+)", done.stdout))
        assert logged == (SCALARS if folder is whole else SCALARS - UNMEASURED)
        if folder is whole:
            shutil.copytree(whole / "checkpoint-20", second / "checkpoint-20")
    ends = [folder / "checkpoint-40" for folder in (whole, second)]
    assert len({(end / "model.safetensors").read_bytes() for end in ends}) == 1
    states = [torch.load(end / "gradient_compression.pt", weights_only=True) for end in ends]
    assert [len(state["ranks"]) for state in states] == [2, 2]
    for one, other in zip(*(state["ranks"] for state in states), strict=True):
        assert one["step"] == other["step"] == 40
        a, b = one["state"]["residual"], other["state"]["residual"]
        assert a.keys() == b.keys() != set()
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def trainer(tmp_path, monkeypatch, no_launcher):
    """Return a function that makes a trainer in one process, with a callback that compresses."""
    transformers = pytest.importorskip("transformers")
    huggingface = importlib.import_module("horovod_fftcomp.integrations.huggingface")

    class Model(torch.nn.Linear):
        def forward(self, x, labels=None):
            return {"loss": super().forward(x).square().mean()}

    def make(**options):
        rows = [{"x": torch.ones(4), "labels": torch.ones(1)}] * 8
        quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 1}
        arguments = transformers.TrainingArguments(str(tmp_path), **{**quiet, **options})
        model = Model(4, 1)
        optimizer = AdamW(model.parameters(), lr=0.01, max_norm=1.0)
        made = transformers.Trainer(
            model, arguments, train_dataset=rows, optimizers=(optimizer, None)
        )
        huggingface.compress(made)
        return made

    return make


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_the_trainers_clipping_before_an_optimizer_that_clips_is_warned_of(trainer, max_grad_norm):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_steps=1, max_grad_norm=max_grad_norm).train()
    told = [
        each for each in caught if "the trainer clips to max_grad_norm=1.0" in str(each.message)
    ]
    assert len(told) == bool(max_grad_norm)
    for each in told:
        assert "before AdamW takes second moments" in str(each.message)
        assert each.filename == __file__


def test_residuals_that_one_process_loses_are_warned_of(trainer, tmp_path):
    trainer(max_steps=1, max_grad_norm=0).train()
    for residuals in (False, True):
        if residuals:
            (tmp_path / "checkpoint-1" / "gradient_compression.pt").touch()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(max_steps=2, max_grad_norm=0).train(
                resume_from_checkpoint=str(tmp_path / "checkpoint-1")
            )
        told = [str(each.message) for each in caught if each.filename == __file__]
        lost = "with one process nothing is compressed: the residuals of the checkpoint are lost"
        assert any(text.startswith(lost) for text in told) == residuals


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_the_lightning_example_continues_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))  # the environment lacks the package
    written: list[str] = []
    for epochs in (3, 4):
        resume = ["--resume", written[0]] if written else []
        run = torchrun("examples/lightning_digits.py", "--compression", "topk", "--epochs", epochs,
                       "--out", tmp_path, *resume)  # fmt: skip
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
        pattern = r"accuracy ([\d.]+)%, (\d+) steps, ([\d.]+) times fewer .*; wrote (.*)"
        accuracy, steps, ratio, path = re.search(pattern, run.stdout).groups()
        assert float(accuracy) > 60
        assert int(steps) == 22 * (epochs - len(written) * 3)
        assert float(ratio) > 25
        written.append(path)
        [metrics] = tmp_path.glob(f"lightning_logs/version_{len(written) - 1}/metrics.csv")
        heads = metrics.read_text("utf-8").splitlines()[0]
        logged = set(re.findall(r"compression/(\w+)", heads))
        assert logged == (SCALARS - UNMEASURED if resume else SCALARS)
        saved = torch.load(path, weights_only=True)["callbacks"]["CompressGradients"]
        assert [rank["step"] for rank in saved["ranks"]] == [22 * epochs] * 2


def test_lightnings_own_launcher_is_refused(tmp_path):
    """It starts the other rank by the script's command, which is not under ``run``."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    libraries = Path(numpy.__file__).parents[3]  # Open MPI's, for which Lightning looks
    environment = {"OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run(
        [sys.executable, "-m", "horovod_fftcomp", "run", "--compression", "topk",
         FOLDER / "lightning_fit.py", tmp_path / "saved"],
        env=os.environ | environment | {"OPAL_PREFIX": str(libraries.parent)},
        cwd=FOLDER.parents[1],
        text=True,
        capture_output=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode
    assert "UnsupportedError: ranks 1 do not run under `horovod-fftcomp run`" in done.stderr
