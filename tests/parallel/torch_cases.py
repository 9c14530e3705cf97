"""Stock Horovod drives the torch adapter; started by ``tests/test_parallel.py``."""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from horovod_fftcomp.adapter import connection
from horovod_fftcomp.torch import Compression
from tests import payloads
from tests.parallel import told_of_nan
from tests.parallel.models import (
    EXACT,
    batches,
    compressed_names,
    distributed,
    make_model,
    order_of,
    small_buckets,
    train,
)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", payloads.over_gloo_too(payloads.EACH))
def test_ranks_are_bit_identical_after_50_steps(recipe, same_everywhere):
    model = make_model()
    compression = small_buckets(model, recipe)
    losses = train(model, distributed(model, compression), 50)
    same_everywhere(*model.parameters())
    # density 1 % of these layers is 16 values a step: slow, but it has to learn.
    assert np.mean(losses[-5:]) < 0.98 * np.mean(losses[:5])
    stats = compression.stats()
    assert stats["steps"] == 50
    assert stats["skipped_steps"] == 0
    if recipe != "none":
        rounds = [
            b.policy.at(step).rounds for b in compression.engine.buckets for step in range(50)
        ]
        assert stats["collectives"] == sum(map(len, rounds))
        assert len(rounds) == 50 * 3
        assert stats["ratio"] > (1.5 if recipe in ("fp16", "bf16") else 4)


@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["topk", "fft"])
def test_a_step_sends_what_the_scheme_predicts(recipe):
    model = make_model()
    compression = small_buckets(model, recipe)
    train(model, distributed(model, compression), 3)
    stats = compression.stats()
    dense = sum(p.numel() for p in model.parameters() if p.dim() == 1) + model.head.weight.numel()
    predicted = sum(
        bucket.policy.at(0).sent_nbytes(tensor)
        for bucket in compression.engine.buckets
        for tensor in bucket.tensors
    )
    probes = 4 * len(compressed_names(compression))
    assert stats["sent_nbytes"] == 3 * (4 * dense + predicted + probes)
    assert stats["dense_nbytes"] == 3 * 4 * sum(p.numel() for p in model.parameters())


def counted(function, *arguments):
    """Return what ``function`` returns, and the package's functions that it called."""
    calls = []

    def note(frame, event, argument):
        if event == "call" and "/horovod_fftcomp/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        return function(*arguments), calls
    finally:
        sys.setprofile(before)


def test_a_gradient_in_the_order_of_the_last_step_costs_two_calls():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    compression = Compression.topk(model, replica_check="off")
    for parameter in model.parameters():
        parameter.grad = torch.randn(64, 64)
    for step in range(3):
        handles, starts, ends = [], [], []
        for number, parameter in enumerate(model.parameters()):
            (sent, context), calls = counted(compression.compress, parameter.grad)
            handles.append((hvd.allreduce_async(sent, name=f"calls.{number}"), context))
            starts.append(calls)
        for (handle, context), parameter in zip(handles, model.parameters(), strict=True):
            reduced, calls = counted(compression.decompress, hvd.synchronize(handle), context)
            parameter.grad.set_(reduced)
            ends.append(calls)
        if step > 0:  # the first and the last gradient do what is needed once in a step
            assert starts[1:-1] == [["start_gradient"]] * 6
            assert ends[1:-1] == [["finish_gradient"]] * 6


def gradients_after_one_backward(compression, model, **options):
    optimizer = distributed(model, compression, **options)
    x, y = next(batches(1))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x, order_of(0)), y).backward()
    optimizer.synchronize()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Average},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 3.0},
        {"groups": 3},
        {"backward_passes_per_step": 1},
    ],
    ids=str,
)
def test_lossless_compression_equals_horovods_own_reduction(options, same_everywhere):
    model = make_model()
    dense = gradients_after_one_backward(hvd.Compression.none, model, **options)
    model = make_model()
    compressed = gradients_after_one_backward(
        small_buckets(model, "topk", **EXACT), model, **options
    )
    for expected, actual in zip(dense, compressed, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)
    same_everywhere(*compressed)


@pytest.mark.parametrize("recipe", ["fp16", "topk", "fft"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_training_with_either_op_keeps_ranks_identical(recipe, op, same_everywhere):
    model = make_model()
    lr = 0.05 if op == hvd.Average else 0.05 / hvd.size()
    losses = train(model, distributed(model, small_buckets(model, recipe), lr, op=op), 30)
    same_everywhere(*model.parameters())
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_sum_is_size_times_average(same_everywhere):
    grads = {}
    for op in (hvd.Average, hvd.Sum):
        model = make_model()
        grads[op] = gradients_after_one_backward(small_buckets(model, "fft"), model, op=op)
    for average, total in zip(grads[hvd.Average], grads[hvd.Sum], strict=True):
        torch.testing.assert_close(total, average * hvd.size(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("recipe", ["topk", "dct", "bf16"])
def test_a_parameter_without_gradient_on_one_rank(recipe, same_everywhere):
    def order(step):
        layers = order_of(step)
        return [i for i in layers if i != 2] if hvd.rank() == step % 2 else layers

    model = make_model()
    losses = train(model, distributed(model, small_buckets(model, recipe)), 20, order=order)
    same_everywhere(*model.parameters())
    assert np.isfinite(losses).all()


def test_a_parameter_that_no_rank_uses(same_everywhere):
    model = make_model()
    before = model.layers[3].weight.detach().clone()
    optimizer = distributed(model, small_buckets(model, "topk"))
    train(model, optimizer, 5, order=lambda step: [0, 1, 2, 4, 5])
    same_everywhere(*model.parameters())
    assert torch.equal(model.layers[3].weight, before)


def test_gradient_accumulation_compresses_once_a_step(same_everywhere):
    model = make_model()
    compression = small_buckets(model, "fft")
    optimizer = distributed(model, compression, backward_passes_per_step=2)
    for step, (x, y) in enumerate(batches(8)):
        if step % 2 == 0:
            optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, range(6)), y).backward()
        if step % 2:
            optimizer.step()
    same_everywhere(*model.parameters())
    assert compression.stats()["collectives"] == 4 * 3


@pytest.mark.sampled
@told_of_nan
@pytest.mark.parametrize(
    ("bad", "step"), [(float("nan"), 0), (float("inf"), 3), (-float("inf"), 3)]
)
@pytest.mark.parametrize(
    "recipe", payloads.over_gloo_too(["fp16", "bf16", "topk", "fft", "dct", "random_block"])
)
@pytest.mark.parametrize("where", ["compressed", "dense"])
def test_a_bad_gradient_on_one_rank_is_a_step_that_never_was(
    step, where, recipe, bad, same_everywhere
):
    model = make_model()
    compression = small_buckets(model, recipe)
    optimizer = distributed(model, compression)
    train(model, optimizer, step)
    names = compressed_names(compression)
    parameter = model.layers[1].weight if where == "compressed" else model.head.bias
    x, y = next(batches(1))
    optimizer.zero_grad()
    hook = parameter.register_hook(
        lambda grad: torch.full_like(grad, bad) if hvd.rank() == 1 else grad
    )
    before = [compression.residual(name) for name in names]
    skipped = compression.stats()["skipped_steps"]
    nn.functional.cross_entropy(model(x, range(6)), y).backward()
    optimizer.synchronize()
    hook.remove()
    assert not torch.isfinite(parameter.grad).any()
    for name, residual in zip(names, before, strict=True):
        assert torch.equal(compression.residual(name), residual), name
    assert compression.stats()["skipped_steps"] == skipped + 1
    optimizer.zero_grad()
    train(model, optimizer, 2)
    same_everywhere(*model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes(dtype, same_everywhere):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
    compression = Compression.topk(model, **EXACT, timeout_s=200)
    optimizer = distributed(model, compression)
    x = torch.full((4, 64), 1.0 + hvd.rank(), dtype=dtype)
    model(x).sum().backward()
    optimizer.synchronize()
    assert all(p.grad.dtype == dtype for p in model.parameters())
    same_everywhere(*(p.grad for p in model.parameters()))
    expected = torch.full((64,), 4.0, dtype=dtype)
    torch.testing.assert_close(model[1].bias.grad, expected)


@pytest.mark.parametrize("recipe", ["none", "topk"])
def test_channels_last_gradients_keep_their_strides(recipe, same_everywhere):
    """Stock Horovod refuses them; with any of our compressors they work."""
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(hvd.rank()))
    grads = {}
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
        model = model.to(memory_format=memory_format)
        options = EXACT if recipe == "topk" else {}
        compression = getattr(Compression, recipe)(model, timeout_s=200, **options)
        if memory_format is torch.contiguous_format:
            compression = hvd.Compression.none
        optimizer = distributed(model, compression)
        model(x.to(memory_format=memory_format)).square().sum().backward()
        optimizer.synchronize()
        assert model[2].weight.grad.is_contiguous(memory_format=memory_format)
        grads[memory_format] = [p.grad.contiguous() for p in model.parameters()]
        same_everywhere(*grads[memory_format])
    for plain, last in zip(*grads.values(), strict=True):
        torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sparse_as_dense", [True, False])
def test_sparse_embeddings_travel_dense_or_gathered(sparse_as_dense, same_everywhere):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40, sparse=True), nn.Linear(40, 40))
    compression = Compression.topk(model, density=0.1, timeout_s=200)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        compression=compression,
        sparse_as_dense=sparse_as_dense,
    )
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(4):
        optimizer.zero_grad()
        model(torch.arange(8) + 8 * hvd.rank() + step).square().sum().backward()
        optimizer.step()
    same_everywhere(*model.parameters())
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@told_of_nan
def test_nan_in_a_gathered_sparse_gradient_is_a_step_that_never_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40, sparse=True), nn.Linear(40, 40))
    compression = Compression.topk(model, density=0.1, timeout_s=200)
    optimizer = distributed(model, compression)
    model[0].weight.register_hook(lambda grad: grad * (float("nan") if hvd.rank() else 1.0))
    model(torch.arange(8)).square().sum().backward()
    optimizer.synchronize()
    assert compression.stats()["skipped_steps"] == 1
    assert not compression.residual("1.weight").any()


def test_two_models_and_compressors_in_one_process(same_everywhere):
    pairs = []
    for seed, recipe in enumerate(("topk", "fft")):
        model = make_model(seed)
        pairs.append((model, distributed(model, small_buckets(model, recipe))))
    for x, y in batches(5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x, range(6)), y).backward()
            optimizer.step()
    same_everywhere(*(p for model, _ in pairs for p in model.parameters()))


@pytest.mark.transport
@pytest.mark.parametrize("recipe", ["topk", "fft"])
def test_a_resumed_run_equals_an_uninterrupted_one(recipe):
    straight = make_model()
    train(straight, distributed(straight, small_buckets(straight, recipe)), 4)

    saved = None
    for half in range(2):
        model = make_model()
        compression = small_buckets(model, recipe)
        optimizer = distributed(model, compression)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            compression.load_state_dict(saved[2])
        for step, (x, y) in enumerate(batches(4)):
            if step // 2 == half:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x, order_of(step)), y).backward()
                optimizer.step()
        saved = (model.state_dict(), optimizer.state_dict(), compression.state_dict())
    for expected, actual in zip(straight.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.transport
@pytest.mark.parametrize("greeting_s", [connection.GREETING_S, 0.0])
def test_first_hooks_of_two_compressors_in_another_order(same_everywhere, monkeypatch, greeting_s):
    """Neither may wait in its first gradient for ranks that wait in the other's, nor has to."""
    monkeypatch.setattr(connection, "GREETING_S", greeting_s)
    models = [make_model(seed) for seed in range(2)]
    pairs = []
    for prefix, model in zip("ab", models, strict=True):
        named = [(f"{prefix}.{n}", p) for n, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=named,
            compression=Compression.topk(named, timeout_s=200),
        )
        pairs.append((model, optimizer))
    x, y = next(batches(1))
    begin = time.monotonic()
    for model, _ in pairs if hvd.rank() == 0 else pairs[::-1]:
        nn.functional.cross_entropy(model(x, range(6)), y).backward()
    for _, optimizer in pairs:
        optimizer.step()
    assert time.monotonic() - begin < 150
    same_everywhere(*(p for model in models for p in model.parameters()))


@pytest.mark.parametrize("recipe", payloads.RECIPES)
def test_payloads_and_residuals_are_those_of_every_framework(recipe, monkeypatch):
    spy = payloads.Spy(monkeypatch, hvd.rank())
    weight = nn.Parameter(torch.zeros(payloads.SHAPE))
    named = [("gradient", weight)]
    compression = getattr(Compression, recipe)(named, timeout_s=200)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.0), named_parameters=named, compression=compression
    )
    for grad in payloads.gradients(2)[:, hvd.rank()]:
        optimizer.zero_grad()
        (weight * torch.from_numpy(grad)).sum().backward()
        optimizer.step()
    payloads.check(recipe, spy, 2, hvd.rank(), compression.residual("gradient").numpy())
