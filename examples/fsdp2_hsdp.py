"""Train a small transformer under FSDP2 on two replicas of two shards, once with each recipe.

    torchrun --nproc-per-node 4 examples/fsdp2_hsdp.py

It reads each handwritten digit row by row; the images come with scikit-learn. Prints the bytes that
a rank sends to the other replica in a step. What compression changes in a script for HSDP is marked
in ``train``.
"""

from __future__ import annotations

import argparse

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from horovod_fftcomp.torch_distributed import compress


class RowReader(nn.Module):
    """Transformer over the eight rows of an image."""

    def __init__(self, width: int = 64, n_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.places = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(n_layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits; ``images``: ``[n, 8, 8]``."""
        hidden = self.embed(images) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def train(recipe: str, options: dict, epochs: int) -> tuple[float, dict]:
    """Return the accuracy on the test images and the compressor's statistics."""
    torch.manual_seed(0)
    x_train, x_test, y_train, y_test = map(torch.from_numpy, digits.load_data())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = RowReader()

    # Compression: mesh["shard"] in place of mesh, and the line below the loop.
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["shard"])
    options = digits.SHORT | options
    compression = compress(model, recipe, replicate=mesh["replicate"], **options)

    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for epoch in range(epochs):
        order = torch.randperm(len(x_train), generator=torch.Generator().manual_seed(epoch))
        for batch in order[: len(order) // 64 * 64].view(-1, 4, 16)[:, dist.get_rank()]:
            optimizer.zero_grad()
            logits = model(x_train[batch].view(-1, 8, 8))
            nn.functional.cross_entropy(logits, y_train[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(x_test.view(-1, 8, 8)).argmax(1) == y_test).double().mean().item()
    return accuracy, compression.stats()


def main() -> None:
    """Train once for each recipe; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    for recipe, options in (("none", {}), ("topk", {"density": 0.05}), ("fft", {"density": 0.15})):
        accuracy, stats = train(recipe, options, epochs)
        if dist.get_rank() == 0:
            nbytes = stats["sent_nbytes"] // stats["steps"]
            print(
                f"{recipe:<5} accuracy {accuracy:.3f}, {nbytes:,} bytes a step between replicas, "
                f"ratio {stats['ratio']:.1f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
