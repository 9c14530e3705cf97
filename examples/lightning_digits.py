"""Train a net on handwritten digits with Lightning, whose DDP exchanges compressed gradients.

    pip install lightning
    torchrun --nproc-per-node 2 examples/lightning_digits.py --compression fft

The images come with scikit-learn. What compression adds to a script is a callback of the trainer,
which keeps the residuals in its checkpoints.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import digits
import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from horovod_fftcomp.integrations.lightning import CompressGradients


class Digits(lightning.LightningModule):
    """Net of two layers for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.net(images)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def main() -> None:
    """Train, and print accuracy and compression ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    # fmt: off
    add("--compression", default="fft", help="recipe (default: %(default)s)")
    add("--epochs", type=int, default=8, help="passes over the images (default: %(default)s)")
    add("--resume", type=Path, metavar="FILE", help="checkpoint of an earlier call")
    add("--out", type=Path, default=Path("out"), help="folder (default: %(default)s)")
    # fmt: on
    args = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores
    lightning.seed_everything(0)
    x_train, x_test, y_train, y_test = map(torch.from_numpy, digits.load_data())
    loader = DataLoader(TensorDataset(x_train, y_train), 32, shuffle=True)
    model, callback = Digits(), CompressGradients(args.compression, **digits.SHORT)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        max_epochs=args.epochs,
        callbacks=[callback],
        default_root_dir=args.out,
        logger=CSVLogger(args.out),
        log_every_n_steps=20,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader, ckpt_path=args.resume)
    with torch.no_grad():
        accuracy = (model(x_test).argmax(1) == y_test).double().mean().item()
    if trainer.is_global_zero:
        stats, path = callback.compression.stats(), trainer.checkpoint_callback.best_model_path
        print(
            f"{args.compression}: accuracy {accuracy:.1%}, {stats['steps']} steps, "
            f"{stats['ratio']:.1f} times fewer bytes than float32; wrote {path}"
        )


if __name__ == "__main__":
    main()
