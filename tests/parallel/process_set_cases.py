"""Compression inside process sets; on three ranks, two of which train together."""

from __future__ import annotations

import time

import horovod.torch as hvd
import pytest
import torch
from torch import nn

from horovod_fftcomp import ConfigMismatchError, get_scheme
from horovod_fftcomp.torch import Compression
from tests import payloads
from tests.parallel.models import batches, make_model, small_buckets
from tests.parallel.sets import sets_of_job


def in_set(model, compression, process_set):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=compression,
        process_set=process_set,
    )


@pytest.mark.parametrize(
    "recipe",
    payloads.over_gloo_too(["none", "fp16", "bf16", "topk", "fft", "random_k", "scalecom"]),
)
def test_members_agree_and_the_others_are_left_alone(recipe):
    sets = sets_of_job()
    model = make_model()
    compression = small_buckets(model, recipe, process_set=sets["pair"])
    optimizer = in_set(model, compression, sets["pair"])
    for x, y in batches(10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, range(6)), y).backward()
        optimizer.step()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = hvd.allgather(flat[None], name="everyone")  # unnamed ones count per rank
    assert torch.equal(everyone[0], everyone[2])
    assert not torch.equal(everyone[0], everyone[1])
    if hvd.rank() == 1:
        assert compression.stats()["collectives"] == 0
    elif recipe != "none":
        assert compression.stats()["collectives"] == 10 * 3 * len(get_scheme(recipe).rounds)
        assert compression.engine.world_size == 2


def test_lossless_compression_averages_over_the_members():
    sets = sets_of_job()
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    options = {"density": 1.0, "bits": 32, "process_set": sets["pair"], "timeout_s": 200}
    optimizer = in_set(model, Compression.topk(model, **options), sets["pair"])
    model(torch.full((1, 64), 1.0 + hvd.rank())).sum().backward()
    optimizer.synchronize()
    expected = 2.0 if hvd.rank() in (0, 2) else 1.0 + hvd.rank()
    assert torch.equal(model.weight.grad, torch.full((64, 64), expected))


def test_density_and_state_are_agreed_within_the_set():
    sets = sets_of_job()
    model = make_model()
    compression = small_buckets(model, "topk", process_set=sets["pair"])
    if hvd.rank() != 1:
        compression.set_density(0.2)
        gathered = compression.gathered_state_dict()
        assert gathered["world_size"] == 2
        compression.load_state_dict(gathered)
        assert compression.stats()["density"] == 0.2


def test_a_set_that_was_never_registered():
    with pytest.raises(ValueError, match="process_set is not registered"):
        Compression.topk(make_model(), process_set=hvd.ProcessSet([0, 1]))


@pytest.mark.transport
@pytest.mark.parametrize("wrong_on", [(0, 2), (2,)])
def test_a_compressor_on_another_set_than_its_optimizer(wrong_on):
    """It would wait for ranks that never come; all members get the same message instead."""
    sets = sets_of_job()
    model = make_model()
    own = hvd.global_process_set if hvd.rank() in wrong_on else sets["pair"]
    optimizer = in_set(model, small_buckets(model, "topk", process_set=own), sets["pair"])
    texts = []
    hvd.barrier()
    begin = time.monotonic()
    if hvd.rank() != 1:
        with pytest.raises(ConfigMismatchError, match="process set is") as caught:
            nn.functional.cross_entropy(
                model(torch.ones(4, 40), range(6)), torch.zeros(4).long()
            ).backward()
        texts = [str(caught.value)]
        assert time.monotonic() - begin < 150
    del optimizer
    assert len({text for texts in hvd.allgather_object(texts) for text in texts}) == 1
