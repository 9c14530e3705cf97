"""Train on the digits with PyTorch, as Horovod's documentation shows it."""

import argparse
import hashlib
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--fail", action="store_true")
args = parser.parse_args()

# Horovod: initialize library.
hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

images, labels = load_digits(return_X_y=True)
dataset = torch.utils.data.TensorDataset(
    torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
)
# Horovod: use DistributedSampler to partition the training data.
sampler = torch.utils.data.distributed.DistributedSampler(
    dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch, sampler=sampler)

model = nn.Sequential(
    nn.Linear(64, args.width),
    nn.ReLU(),
    nn.Linear(args.width, args.width),
    nn.ReLU(),
    nn.Linear(args.width, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)

# Horovod: broadcast parameters & optimizer state.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

# Horovod: (optional) compression algorithm.
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

# Horovod: wrap optimizer with DistributedOptimizer.
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)

for epoch in range(args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0:
            print(f"loss {loss.item().hex()}", flush=True)
if hvd.rank() == 0:
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)
if args.fail:
    sys.exit(3)
