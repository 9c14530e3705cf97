"""Two real ranks train what two simulated learners train, to the last bit, under every recipe."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from horovod_fftcomp import get_scheme
from horovod_fftcomp.torch import Compression, SimulatedLearners
from tests import payloads
from tests.parallel.models import (
    compressed_names,
    distributed,
    flat,
    momentum_beside,
    synchronized_step,
)

STEPS = 12


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 24, 3), nn.BatchNorm2d(24),
        nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 10),
    )  # fmt: skip


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(
        10, (8,), generator=generator
    )


def loss_of(model, rank, step):
    images, labels = batch(rank, step)
    return nn.functional.cross_entropy(model(images), labels)


def trained_by_ranks(recipe, options):
    model = make_model()
    compression = getattr(Compression, recipe)(model, bucket_nbytes=8_000, **options)
    optimizer = distributed(model, compression)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        synchronized_step(optimizer)
    return model, compression


def trained_by_learners(recipe, options):
    model = make_model()
    learners = SimulatedLearners(model, 2, recipe, bucket_nbytes=8_000, **options)
    momentum = momentum_beside(get_scheme(recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for step in range(STEPS):
        for rank in range(2):
            with learners.turn_of(rank):
                loss_of(model, rank, step).backward()
        learners.reduce()
        optimizer.step()
    with learners.turn_of(hvd.rank()):
        buffers = [buffer.clone() for buffer in model.buffers()]
    return model, learners, buffers


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, {}) for recipe in payloads.EACH),
        ("hard_threshold", {"density": 0.05, "calibrate_steps": 4}),
        ("topk", {"warmup_steps": 4, "density_schedule": {0: 0.5, 4: 0.1}}),
        ("scalecom", {"rules": [("0.weight", 0.5), ("7.*", {"recipe": "fft"})]}),
        ("topk", {"scope": "model"}),
    ],
    ids=str,
)
def test_ranks_and_learners_train_the_same(recipe, options, same_everywhere):
    model, compression = trained_by_ranks(recipe, options)
    same_everywhere(flat(model))
    simulated, learners, buffers = trained_by_learners(recipe, options)
    assert torch.equal(flat(model), flat(simulated))
    for buffer, other in zip(model.buffers(), buffers, strict=True):
        assert torch.equal(buffer, other)
    costs, stats = learners.costs[hvd.rank()], compression.stats()
    assert costs.total_error == pytest.approx(stats["total_error"])
    assert costs.skipped_steps == stats["skipped_steps"] == 0
    if recipe != "none":
        probes = 4 * STEPS * len(compressed_names(compression))
        assert costs.sent_nbytes + learners.dense_nbytes + probes == stats["sent_nbytes"]
