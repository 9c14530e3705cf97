"""Train two real models and record gradients from the beginning, the middle and the end.

    python benchmarks/record_gradients.py

Writes six files such as out/charlm-late.npz, as ``horovod-fftcomp bench --gradients`` reads them,
and results/record_gradients.json; README.md tells what the models are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import horovod_fftcomp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch_charlm
import torch_resnet_digits
from comparison import Batches

RESULTS = Path(__file__).resolve().parent / "results"
STEPS = 400
# Steps in a row, as error feedback sees them; a file for each, since what an early step leaves is
# larger than whole gradients of the end and would hide them.
WINDOW = 8
WINDOWS = {"early": 10, "middle": 150, "late": STEPS - WINDOW}  # the first step of each
BATCH = 32


def convnet() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a small ResNet, its optimizer and batches of handwritten digits for ever."""
    model = torch_resnet_digits.make_model((32, 64, 128))
    digits = load_digits()
    images = torch.from_numpy((digits.images[:, None] / 16).astype(np.float32))
    labels = torch.from_numpy(digits.target).long()

    def batches() -> Batches:
        while True:
            for chosen in torch.randperm(len(images))[: len(images) // BATCH * BATCH].split(BATCH):
                yield images[chosen], labels[chosen]

    return model, torch.optim.SGD(model.parameters(), 0.03, momentum=0.9), batches()


def charlm() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a character model, its optimizer and batches of the standard library's source."""
    text = torch.cat(torch_charlm.read_modules())
    model = torch_charlm.CharacterModel(width=128, layers=4)

    def batches() -> Batches:
        while True:
            begin = torch.randint(len(text) - torch_charlm.CONTEXT, (BATCH, 1))
            yield torch_charlm.windows(text, begin[:, 0])

    return model, torch.optim.AdamW(model.parameters(), 2e-3), batches()


def record(make: Callable, folder: Path) -> dict[str, object]:
    """Train from seed 0, write the gradients of each window, return what came out."""
    torch.manual_seed(0)
    model, optimizer, batches = make()
    recorded: dict[str, dict[str, np.ndarray]] = {name: {} for name in WINDOWS}
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = next(batches)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        for window, first in WINDOWS.items():
            if first <= step < first + WINDOW:
                for name, parameter in model.named_parameters():
                    recorded[window][f"{step}/{name}"] = parameter.grad.numpy().copy()
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 0:
            print(f"{make.__name__}: step {step} of {STEPS}, loss {losses[-1]:.3f}", flush=True)
    for window, gradients in recorded.items():
        np.savez(folder / f"{make.__name__}-{window}.npz", **gradients)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss_of_first_step": round(losses[0], 4),
        "mean_loss_of_windows": {
            name: round(float(np.mean(losses[first : first + WINDOW])), 4)
            for name, first in WINDOWS.items()
        },
    }


def main() -> None:
    """Record both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the .npz (default: %(default)s)"
    )
    flags = parser.parse_args()
    torch.set_num_threads(1)  # the order of additions is then the same on any number of cores
    flags.out.mkdir(parents=True, exist_ok=True)
    found = {make.__name__: record(make, flags.out) for make in MODELS}
    result = {
        "command": " ".join(["python benchmarks/record_gradients.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}",
        "versions": {
            "horovod_fftcomp": horovod_fftcomp.__version__,
            "python": platform.python_version(),  # whose standard library is the text
            **{name: version(name) for name in ("torch", "numpy", "scikit-learn")},
        },
        "steps": STEPS,
        "windows": {name: [first, first + WINDOW - 1] for name, first in WINDOWS.items()},
        "models": found,
    }
    path = RESULTS / "record_gradients.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


MODELS = (convnet, charlm)

if __name__ == "__main__":
    main()
