"""Train by Accelerate with a moving average of the prepared model; save and load the state."""

from __future__ import annotations

import copy
import sys
import warnings

import torch
from accelerate import Accelerator
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 12


def main(folder: str) -> None:
    """Train, and compare the average with the model."""
    warnings.simplefilter("error", RuntimeWarning)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32 * STEPS, 40)
    batches = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), batch_size=16
    )
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for inputs, labels in batches:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    accelerator.save_state(folder)
    with torch.no_grad():
        whole, copied = average(inputs), copy.deepcopy(model)(inputs)
    assert torch.equal(copied, model(inputs))
    assert 0 < (whole - copied).norm() < copied.norm()
    accelerator.wait_for_everyone()  # the first rank writes
    accelerator.load_state(folder)
    print(f"loss {loss.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
