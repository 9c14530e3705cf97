"""Training whose steps a GPU computes, which the ranks share; started by test_parallel.py.

Where there is none, or Horovod is built without CUDA, it is an emulated one.
"""

from __future__ import annotations

import contextlib
import functools

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from horovod_fftcomp import ConfigMismatchError
from horovod_fftcomp.adapter.torch_tensors.replicas import OptimizedParameters
from horovod_fftcomp.torch import compressor
from tests.contracts import HOST_ONLY
from tests.gpu import torch_emulator
from tests.parallel import models
from tests.parallel.models import distributed, make_model, small_buckets, synchronized_step

HAS_GPU = torch.cuda.is_available() and hvd.cuda_built()
_place = "cpu"
# With which PyTorch tells that hooks run on the stream on which the optimizer was made.
on_another_stream = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


on_gpu = functools.partial(torch_emulator.on_gpu, HAS_GPU, globals(), compressor)


def prepared(recipe, **options):
    model = make_model().to(_place)
    compression = small_buckets(model, recipe, **options)
    return model, distributed(model, compression), compression


def summed(model, optimizer, steps, skip=0, begin=lambda: None):
    """Return the sums of steps whose gradients are the same on a CPU and on a GPU."""
    rng = np.random.default_rng(hvd.rank())
    parameters, sums = list(model.parameters()), []
    for step in range(steps):
        grads = [torch.from_numpy(rng.standard_normal(p.shape, np.float32)) for p in parameters]
        order = rng.permutation(len(grads))
        if step < skip:
            continue
        optimizer.zero_grad()
        begin()
        sum((parameters[i] * grads[i].to(parameters[i].device)).sum() for i in order).backward()
        synchronized_step(optimizer)
        sums.append([p.grad.cpu().clone() for p in parameters])
    return sums


def assert_same(ours, theirs, tolerance=0.0):
    for step, expected in zip(ours, theirs, strict=True):
        for found, wanted in zip(step, expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.sampled
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
        ("gtopk", {}),  # of the host
        ("arctopk", {"density": 0.2, "block": 32}),  # of the host
        ("topk", {"scope": "bucket"}),
        ("topk", {"exchange": "sharded"}),
        ("qsgd", {"exchange": "sharded"}),
        ("strom", {"exchange": "sharded", "threshold": 0.1}),
        ("hard_threshold", {"exchange": "sharded", "calibrate_steps": 3}),
    ],
)
def test_sums_are_the_cpus(recipe, options, same_everywhere):
    model, optimizer, theirs = prepared(recipe, **options)
    expected = summed(model, optimizer, 8)
    with on_gpu():
        model, optimizer, ours = prepared(recipe, **options)
        found = summed(model, optimizer, 8)
    same_everywhere(*model.parameters())
    # How Horovod rounds a sum of float16 depends on where it lies among others.
    assert_same(found, expected, 2e-3 if recipe == "fp16" else 0.0)
    assert ours.stats()["sent_nbytes"] == theirs.stats()["sent_nbytes"]
    assert ours.residual_norm() == theirs.residual_norm()
    on_host = recipe in HOST_ONLY or options == {"selector": "exact"}
    assert ours.engine.computes_on_device(0) != on_host


@on_another_stream
def test_another_stream_computes_the_same(same_everywhere):
    if not HAS_GPU:
        pytest.skip("the emulator has no streams")
    with on_gpu():
        model, optimizer, _ = prepared("topk")
        expected = summed(model, optimizer, 8)
        model, optimizer, _ = prepared("topk")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = summed(model, optimizer, 8, begin=lambda: torch.cuda._sleep(100_000_000))
        torch.cuda.synchronize()
    same_everywhere(*model.parameters())
    assert_same(found, expected)


def test_a_model_that_moves_after_its_compressor_was_made_is_warned_of(same_everywhere):
    if not HAS_GPU:
        pytest.skip("there is nowhere to move")
    model = make_model()
    compression = small_buckets(model, "topk")
    optimizer = distributed(model.cuda(), compression)
    with pytest.warns(RuntimeWarning, match="moved to cuda"):
        summed(model, optimizer, 2)
    same_everywhere(*model.parameters())


@on_another_stream
def test_hooks_may_run_on_another_stream_than_the_step(same_everywhere):
    """Hooks run on the stream on which the optimizer was made."""
    if not HAS_GPU:
        pytest.skip("the emulator has no streams")
    with on_gpu():
        model, optimizer, _ = prepared("topk")
        expected = summed(model, optimizer, 8)
        with torch.cuda.stream(torch.cuda.Stream()):
            model, optimizer, _ = prepared("topk")
            torch.cuda.synchronize()
        found = summed(model, optimizer, 8, begin=lambda: torch.cuda._sleep(100_000_000))
        torch.cuda.synchronize()
    same_everywhere(*model.parameters())
    assert_same(found, expected)


@pytest.mark.more
def test_a_flipped_bit_is_found_where_it_is(monkeypatch):
    with on_gpu():
        model, optimizer, _ = prepared("topk")
        summed(model, optimizer, 3)
        weight = model.layers[2].weight
        if hvd.rank() == 1:
            weight.data.view(-1).view(torch.int32)[7] ^= 1 << 20  # sums do not round it away
        # Nothing may bring parameters to the host.
        monkeypatch.setattr(OptimizedParameters, "read", lambda *number: pytest.fail("copied"))
        with pytest.warns(RuntimeWarning, match=r"layers\.2\.weight' on rank 1"):
            summed(model, optimizer, 100)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", ["fft", "dct", "demo", "powersgd", "auto"])
def test_a_model_learns_and_ranks_stay_equal(recipe, same_everywhere):
    with on_gpu():
        model, optimizer, compression = prepared(recipe)
        losses = models.train(model, optimizer, 20)
    same_everywhere(*model.parameters())
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:3])
    assert compression.stats()["steps"] == 20
    assert 0 < compression.stats()["relative_error"] < 1


def test_a_step_with_nan_leaves_no_trace(same_everywhere):
    with on_gpu():
        model, optimizer, compression = prepared("topk")
        summed(model, optimizer, 3)
    before = compression.residual_norm()
    optimizer.zero_grad()
    loss = sum(p.square().sum() for p in model.parameters())
    (loss * (float("nan") if hvd.rank() == 0 else 1.0)).backward()
    optimizer.synchronize()
    assert all(p.grad.isnan().any() for p in model.parameters())
    same_everywhere(*[p.grad.nan_to_num() for p in model.parameters()])
    assert compression.residual_norm() == before
    assert compression.stats()["skipped_steps"] == 1


def test_a_state_saved_on_the_gpu_goes_on_on_the_cpu(same_everywhere):
    model, optimizer, _ = prepared("topk")
    expected = summed(model, optimizer, 6)
    with on_gpu():
        model, optimizer, compression = prepared("topk")
        summed(model, optimizer, 3)
    assert compression.residual_ratios()
    other_model, other_optimizer, other = prepared("topk")
    other.load_state_dict(compression.state_dict())
    found = summed(other_model, other_optimizer, 6, skip=3)
    same_everywhere(*other_model.parameters())
    assert_same(found, expected[3:])


def test_a_rank_whose_gpu_computes_nothing_is_told_by_all():
    with on_gpu() if hvd.rank() == 0 else contextlib.nullcontext():
        model, optimizer, _ = prepared("topk")
        with pytest.raises(ConfigMismatchError, match="steps computed on"):
            summed(model, optimizer, 1)
