"""Unmodified scripts of Hugging Face, Accelerate and Lightning: see ``make test-integrations``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch

from tests.test_torch_distributed import torchrun

pytestmark = [pytest.mark.parallel, pytest.mark.torch]

FOLDER = Path(__file__).parent / "integrations"
SCRIPTS = {
    "hf_trainer": ("transformers", ["6", "6"]),  # the second run begins with a checkpoint
    "accelerate_ema": ("accelerate", ["12"]),
    "lightning_fit": ("lightning", ["6", "6"]),
}


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
        assert "compression/ratio" in done.stdout
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
        assert "compression/ratio" in metrics.read_text("utf-8").splitlines()[0]
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
