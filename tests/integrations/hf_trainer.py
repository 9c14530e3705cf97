"""Train by Hugging Face's Trainer, save, and continue from the checkpoint; argument: a folder."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

STEPS = 12


class Classifier(torch.nn.Module):
    """Layers that return a loss, as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        """Return loss and scores."""
        scores = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def main(folder: str) -> None:
    """Train half of the steps, and the others from the checkpoint."""
    x = torch.randn(400, 40, generator=torch.Generator().manual_seed(1))
    rows = [{"x": row, "labels": row[:4].argmax()} for row in x]
    for steps in (STEPS // 2, STEPS):
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            save_steps=STEPS // 2,
            per_device_train_batch_size=16,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(Classifier(), arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=steps == STEPS)
        assert trainer.state.global_step == steps
    print(f"loss {trainer.state.log_history[-1]['train_loss']:.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
