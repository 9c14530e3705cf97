"""Training whose steps a GPU computes, here an emulated one; started by test_parallel.py."""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch

from horovod_fftcomp import ConfigMismatchError
from horovod_fftcomp.torch import compressor
from horovod_fftcomp.torch.parameters import Parameters
from tests.gpu.torch_emulator import TorchEmulator
from tests.parallel.models import distributed, make_model, small_buckets, train


@pytest.fixture
def on_gpu(monkeypatch):
    """Make compressors that are made from now on use the emulated GPU."""

    def use():
        monkeypatch.setattr(compressor, "device_of", lambda parameters, buckets: TorchEmulator())

    return use


def trained(recipe, steps, **options):
    model = make_model()
    compression = small_buckets(model, recipe, **options)
    optimizer = distributed(model, compression)
    train(model, optimizer, steps)
    return model, optimizer, compression


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("topk", {}),
        ("scalecom", {}),
        ("scalecom", {"selector": "exact"}),  # of the host
        ("random_k", {}),
        ("fp16", {}),
        ("natural", {}),
        ("signum", {}),
        ("hard_threshold", {"calibrate_steps": 3}),
        ("sparcml", {}),
        ("adacomp", {}),
        ("gtopk", {}),
        ("topk", {"scope": "bucket"}),
    ],
)
def test_a_training_is_the_cpus(recipe, options, on_gpu, same_everywhere):
    expected, _, theirs = trained(recipe, 8, **options)
    on_gpu()
    model, _, ours = trained(recipe, 8, **options)
    same_everywhere(*model.parameters())
    # How Horovod rounds a sum of float16 depends on where it lies among others.
    tolerance = 2e-3 if recipe == "fp16" else 0
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    assert ours.stats()["sent_nbytes"] == theirs.stats()["sent_nbytes"]
    assert ours.residual_norm() == theirs.residual_norm()
    assert ours._engine.computes_on_device(0) == (options != {"selector": "exact"})


def test_a_flipped_bit_is_found_where_it_is(on_gpu, monkeypatch):
    on_gpu()
    model, optimizer, _ = trained("none", 3)
    weight = model.layers[2].weight
    if hvd.rank() == 1:
        weight.data.view(-1).view(torch.int32)[7] ^= 1
    # Nothing may bring parameters to the host.
    monkeypatch.setattr(Parameters, "read", lambda parameters, number: pytest.fail("copied"))
    with pytest.warns(RuntimeWarning, match=r"layers\.2\.weight' on rank 1"):
        train(model, optimizer, 100)


@pytest.mark.parametrize("recipe", ["fft", "dct", "demo", "powersgd", "auto"])
def test_ranks_stay_equal(recipe, on_gpu, same_everywhere):
    on_gpu()
    model, _, compression = trained(recipe, 8)
    same_everywhere(*model.parameters())
    assert compression.stats()["steps"] == 8
    assert 0 < compression.stats()["relative_error"] < 1


def test_a_step_with_nan_leaves_no_trace(on_gpu, same_everywhere):
    on_gpu()
    model, optimizer, compression = trained("topk", 3)
    before = compression.residual_norm()
    optimizer.zero_grad()
    loss = sum(p.square().sum() for p in model.parameters())
    (loss * (float("nan") if hvd.rank() == 0 else 1.0)).backward()
    optimizer.synchronize()
    assert all(p.grad.isnan().any() for p in model.parameters())
    same_everywhere(*[p.grad.nan_to_num() for p in model.parameters()])
    assert compression.residual_norm() == before
    assert compression.stats()["skipped_steps"] == 1


def test_a_state_saved_on_the_gpu_goes_on_on_the_cpu(on_gpu, monkeypatch, same_everywhere):
    expected, _, _ = trained("topk", 6)
    with monkeypatch.context() as patched:
        patched.setattr(compressor, "device_of", lambda parameters, buckets: TorchEmulator())
        model, optimizer, compression = trained("topk", 3)
    assert compression.residual_ratios()
    other_model = make_model()
    other = small_buckets(other_model, "topk")
    other_optimizer = distributed(other_model, other)
    other_model.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    other.load_state_dict(compression.state_dict())
    train(other_model, other_optimizer, 6, skip=3)
    same_everywhere(*other_model.parameters())
    for found, wanted in zip(other_model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_a_rank_whose_gpu_computes_nothing_is_told_by_all(on_gpu):
    if hvd.rank() == 0:
        on_gpu()
    with pytest.raises(ConfigMismatchError, match="steps computed on"):
        trained("topk", 1)
