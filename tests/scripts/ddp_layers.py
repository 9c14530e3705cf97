"""Steps of a net of four layers of width 1024 under DDP, on random data; for forecasts of steps."""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = [64, 1024, 1024, 1024, 1024]
layers = [each for pair in itertools.pairwise(sizes) for each in (nn.Linear(*pair), nn.ReLU())]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(1024, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
inputs, labels = torch.randn(450, 64), torch.randint(0, 10, (450,))
while True:  # until --steps ends it
    loss = nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
