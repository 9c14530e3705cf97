"""Fit by Lightning twice, from a checkpoint, with a moving average of the weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint


class Classifier(lightning.LightningModule):
    """Layers and their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(40, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        """Return the loss."""
        x, labels = batch
        loss = torch.nn.functional.cross_entropy(self.layers(x), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(folder: str) -> None:
    """Fit an epoch, and another one from the checkpoint of the first."""
    lightning.seed_everything(0)
    x = torch.randn(192, 40)
    data = torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))
    path = None
    for epochs in (1, 2):
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            callbacks=[EMAWeightAveraging(decay=0.5), ModelCheckpoint(folder, save_last=True)],
            logger=False,
            enable_progress_bar=False,
        )
        batches = torch.utils.data.DataLoader(data, batch_size=16)
        trainer.fit(Classifier(), batches, ckpt_path=path)
        path = str(Path(folder) / "last.ckpt")
        assert trainer.global_step == 6 * epochs
    print(f"loss {trainer.callback_metrics['loss'].item():.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
