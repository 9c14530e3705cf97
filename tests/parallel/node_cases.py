"""Two nodes of two ranks."""

from __future__ import annotations

import os

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_fftcomp import ConfigMismatchError, UnsupportedError, get_scheme, simulate
from horovod_fftcomp.adapter import process_sets
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.schemes.parts import node_plan
from horovod_fftcomp.torch import Compression, compressor
from tests import payloads
from tests.gpu.torch_emulator import TorchEmulator
from tests.parallel.models import distributed, flat, make_model, small_buckets, train


class OneTensor(torch.nn.Module):
    """A tensor with the name that a simulation gives its own, whose gradient is the input.

    Two ranks of a node divide it as they divide the simulation's vector.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gradient = torch.nn.Parameter(torch.zeros(64, 128))

    def forward(self, own):
        return (self.gradient * own).sum()


def gradients(steps=5):
    """Return all ranks' gradients ``[steps, ranks, 8192]``."""
    shape = steps, hvd.size(), 8192
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "recipe", payloads.over_gloo_too(["fp16", "topk", "fft", "scalecom", "gtopk", "auto", "onebit"])
)
def test_gradients_and_residuals_are_those_of_a_simulation(recipe, same_everywhere):
    check_simulation(recipe, same_everywhere)


@pytest.mark.parametrize("recipe", ["fp16", "topk", "scalecom", "onebit"])
def test_and_on_a_gpu(recipe, same_everywhere, monkeypatch):
    monkeypatch.setattr(compressor, "device_of", lambda parameters, buckets: TorchEmulator())
    assert check_simulation(recipe, same_everywhere).engine.computes_on_device(0)


def check_simulation(recipe, same_everywhere):
    model, own = OneTensor(), gradients()
    compression = getattr(Compression, recipe)(model, ranks_per_node=2, timeout_s=200)
    optimizer = distributed(model, compression, lr=0.0)
    steps = list(simulate(recipe, own, ranks_per_node=2))
    for grads, expected in zip(own, steps, strict=True):
        optimizer.zero_grad()
        model(torch.from_numpy(grads[hvd.rank()].reshape(64, 128))).backward()
        optimizer.step()
        found = model.gradient.grad.reshape(-1)
        same_everywhere(found)
        tolerance = 2e-3 * np.abs(expected.average).max() if recipe == "fp16" else 0
        np.testing.assert_allclose(found.numpy(), expected.average, rtol=0, atol=tolerance)
    residual = compression.residual("gradient").numpy().reshape(-1)
    assert residual.tobytes() == steps[-1].residual[hvd.rank()].tobytes()
    stats, probes = compression.stats(), 4 * len(own)
    sent = [step.sent_bytes[hvd.rank()] for step in steps]
    assert stats["sent_nbytes"] - probes == sum(sent)
    assert stats["inside_nbytes"] == payloads.inside_nbytes(recipe, sent, hvd.size() // 2)
    return compression


@pytest.mark.parametrize("recipe", ["topk", "scalecom", "gtopk"])
def test_many_buckets_and_two_models(recipe, same_everywhere):
    ends = []
    for seed in range(2):
        model = make_model()
        compression = small_buckets(model, recipe, ranks_per_node=2, warmup_steps=3)
        losses = train(model, distributed(model, compression), 8 + seed)
        assert np.isfinite(losses).all()
        ends.append(flat(model))
    same_everywhere(*ends)
    rounds = len(get_scheme(recipe).rounds)
    plans = [node_plan(bucket.tensors, 2) for bucket in compression.engine.buckets]
    owning = sum(bool(plan.shares[hvd.rank() % 2].tensors) for plan in plans)
    expected = 9 * 2 * len(plans) + (3 + 6 * rounds) * owning
    assert compression.stats()["collectives"] == expected


def test_states_of_all_ranks_are_gathered_and_loaded(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "topk", ranks_per_node=2)
    optimizer = distributed(model, compression)
    train(model, optimizer, 4)
    saved = compression.gathered_state_dict()
    norm = compression.residual_norm()
    assert sum(hvd.allgather_object(norm)) > 0
    compression.load_state_dict(saved)
    assert compression.residual_norm() == norm
    train(model, optimizer, 3)
    same_everywhere(flat(model))


@pytest.mark.transport
def test_ranks_that_see_other_nodes_stop():
    model = make_model()
    compression = small_buckets(model, "topk", ranks_per_node=2 if hvd.rank() else 4)
    with pytest.raises(ConfigMismatchError, match="ranks_per_node is 4 on rank 0 but 2"):
        train(model, distributed(model, compression), 1)


@pytest.mark.transport
def test_auto_is_the_ranks_of_a_host(monkeypatch):
    def resolved(**settings):
        return small_buckets(make_model(), "topk", ranks_per_node="auto", **settings).policy

    assert resolved().ranks_per_node == 1  # all are on this host
    basics = hvd.mpi_ops._basics
    monkeypatch.setattr(basics, "local_size", lambda: 2)
    for even in (True, False):
        monkeypatch.setattr(basics, "is_homogeneous", lambda even=even: even)
        assert resolved().ranks_per_node == (2 if even else 1)
    monkeypatch.setattr(basics, "is_homogeneous", lambda: True)
    monkeypatch.setitem(os.environ, "HOROVOD_ELASTIC", "1")
    assert resolved().ranks_per_node == 1


def test_what_cannot_be_served_is_refused(monkeypatch):
    policy = make_policy("topk", ranks_per_node=2)
    some = hvd.ProcessSet([0, 1])
    some.process_set_id = 1
    with pytest.raises(UnsupportedError, match="leave process_set out"):
        process_sets.makers(policy, Settings(process_set=some))
    monkeypatch.setitem(os.environ, "HOROVOD_ELASTIC", "1")
    with pytest.raises(UnsupportedError, match="elastic"):
        process_sets.makers(policy, Settings())
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS")
    with pytest.raises(UnsupportedError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        process_sets.makers(policy, Settings())
