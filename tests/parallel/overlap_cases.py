"""Encoding in a thread of its own: the same results, and steps that are broken off."""

from __future__ import annotations

import gc
import math
import threading
import time
import warnings
from concurrent.futures import Future

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from torch import nn

from horovod_fftcomp import UnsupportedError, simulate
from horovod_fftcomp.kernels.host import coder
from horovod_fftcomp.torch import Compression
from tests.parallel.models import (
    ScriptedScaler,
    batches,
    compressed_names,
    distributed,
    flat,
    loss_of,
    make_model,
    small_buckets,
    train,
)


class Inline:
    """Computes where it is asked to, as if there were no thread."""

    def submit(self, work):
        done = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done


def inline(compression):
    compression.driver.pipeline.worker = Inline()
    return compression


@pytest.fixture
def slow(monkeypatch):
    """Let every encoding of a bucket take 50 ms more; return the threads in which they ran."""
    plain, threads = coder.zeros, []

    def zeros(*arguments):  # an encoding begins with the memory of its message
        threads.append(threading.current_thread())
        time.sleep(0.05)
        return plain(*arguments)

    monkeypatch.setattr(coder, "zeros", zeros)
    return threads


@pytest.mark.parametrize("recipe", ["fp16", "bf16", "topk", "fft", "dct", "random_k", "scalecom"])
def test_training_is_the_same_to_the_bit_as_with_encoding_in_the_hooks(recipe, same_everywhere):
    ends = []
    for prepare in (inline, lambda compression: compression):
        model = make_model()
        compression = prepare(small_buckets(model, recipe, warmup_steps=2))
        train(model, distributed(model, compression), 12)
        stats = compression.stats()
        told = [stats[key] for key in ("sent_nbytes", "collectives", "relative_error", "steps")]
        names = compressed_names(compression)
        ends.append((flat(model), told, [compression.residual(name) for name in names]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    for residual, other in zip(ends[0][2], ends[1][2], strict=True):
        assert torch.equal(residual, other)
    same_everywhere(ends[1][0])


@pytest.mark.parametrize("recipe", ["topk", "fft"])
def test_reduced_gradients_are_those_of_a_simulation(recipe, slow):
    torch.manual_seed(0)
    model = nn.Linear(100, 60, bias=False)
    compression = getattr(Compression, recipe)(model, density=0.1, timeout_s=200)
    optimizer = distributed(model, compression, lr=0.0)
    own, reduced = [], []
    for step in range(4):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        x = torch.randn(8, 100, generator=generator, requires_grad=True)
        model.weight.register_hook(lambda grad: own.append(grad.clone().reshape(-1)))
        model(x).square().sum().backward()
        model.weight._backward_hooks.clear()
        optimizer.step()
        reduced.append(model.weight.grad.clone().reshape(-1))
    gradients = hvd.allgather(torch.stack(own)[None], name="own").numpy().swapaxes(0, 1)
    for step, expected in enumerate(simulate(recipe, gradients, density=0.1)):
        assert reduced[step].numpy().tobytes() == expected.average.tobytes()
    assert threading.current_thread() not in slow[:4]


@pytest.mark.parametrize(
    "options",
    [{"op": hvd.Sum}, {"gradient_predivide_factor": 3.0}, {"groups": 3}, {"scaled": True}],
    ids=str,
)
def test_horovods_own_options_with_slow_encodings(options, slow, same_everywhere):
    ends = []
    for prepare in (inline, lambda compression: compression):
        model = make_model()
        horovods = dict(options)
        scaler = ScriptedScaler([1.0, 4.0, 2.0]) if horovods.pop("scaled", False) else None
        compression = prepare(small_buckets(model, "topk", density=0.2, grad_scaler=scaler))
        optimizer = distributed(model, compression, lr=0.01, **horovods)
        for step, (x, y) in enumerate(batches(3)):
            if scaler:
                scaler.step = step
            optimizer.zero_grad()
            loss_of(model, x, y, step).backward()
            optimizer.step()
        ends.append(flat(model))
    assert torch.equal(*ends)
    same_everywhere(ends[0])


def test_gradients_that_accumulate_are_encoded_when_they_are_complete(slow, same_everywhere):
    ends = []
    for prepare in (inline, lambda compression: compression):
        model = make_model()
        compression = prepare(small_buckets(model, "fft"))
        optimizer = distributed(model, compression, backward_passes_per_step=2)
        for step, (x, y) in enumerate(batches(6)):
            if step % 2 == 0:
                optimizer.zero_grad()
            loss_of(model, x, y, step).backward()
            if step % 2:
                optimizer.step()
        assert compression.stats()["collectives"] == 3 * 3
        ends.append(flat(model))
    assert torch.equal(*ends)
    same_everywhere(ends[0])


@pytest.mark.processes  # a thread that waits for its turn would pass for one that encodes
def test_the_hooks_do_not_wait_for_encodings(slow):
    model = make_model()
    compression = small_buckets(model, "topk")
    optimizer = distributed(model, compression)
    train(model, optimizer, 2)
    found = []
    for x, y in batches(3):  # a busy machine may delay one of them
        before = compression.stats()
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        hvd.barrier()
        begin = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter() - begin
        time.sleep(0.4)  # as if other gradients took so long
        optimizer.step()
        after = compression.stats()
        spent = {key: after[key] - before[key] for key in after if key.startswith("encode")}
        assert 0 <= spent["encode_hidden_s"] <= backward_s
        waited_little = spent["encode_wait_s"] < spent["encode_s"] / 2
        found.append(backward_s < spent["encode_s"] and waited_little)
    assert any(found)


@pytest.mark.transport
def test_two_models_whose_backward_passes_end_before_either_steps(slow, same_everywhere):
    ends = []
    for prepare in (inline, lambda compression: compression):
        models = [make_model(seed) for seed in range(2)]
        pairs = []
        for prefix, model in zip("ab", models, strict=True):
            named = [(f"{prefix}.{n}", p) for n, p in model.named_parameters()]
            compression = prepare(small_buckets(named, "topk" if prefix == "a" else "fft"))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                named_parameters=named,
                compression=compression,
            )
            pairs.append((model, optimizer))
        for step, (x, y) in enumerate(batches(3)):
            turns = pairs if (hvd.rank() + step) % 2 else pairs[::-1]
            for model, optimizer in turns:
                optimizer.zero_grad()
                loss_of(model, x, y, step).backward()
            for _, optimizer in pairs:
                optimizer.step()
        ends.append(torch.cat([flat(model) for model in models]))
    assert torch.equal(*ends)
    same_everywhere(ends[0])


def exchange(model, compression, step):
    """Run one step as Horovod's optimizer does, whose own state no error can then spoil."""
    model.zero_grad()
    loss_of(model, *next(batches(1, seed=step)), step).backward()
    handles = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            sent, context = compression.compress(parameter.grad)
            handles.append((hvd.allreduce_async(sent, name=f"{name}"), context))
    outputs = [(hvd.synchronize(handle), context) for handle, context in handles]
    averages = [compression.decompress(*output).reshape(-1) for output in outputs]
    compression.note_used()
    return torch.cat(averages)


def test_an_error_in_the_worker_is_raised_after_backward_and_the_step_can_be_dropped(
    monkeypatch, same_everywhere
):
    model = make_model()
    compression, other = small_buckets(model, "fft"), small_buckets(model, "fft")
    for step in range(2):
        assert torch.equal(exchange(model, compression, step), exchange(model, other, step))
    saved = compression.state_dict()

    def broken(*arguments):
        raise TypeError(f"no such dtype on rank {hvd.rank()}")

    with monkeypatch.context() as patch:
        patch.setattr(coder, "zeros", broken)
        model.zero_grad()
        loss_of(model, *next(batches(1))).backward()
        named = list(model.named_parameters())
        contexts = [compression.compress(parameter.grad)[1] for _, parameter in named]
        with pytest.raises(TypeError, match=f"no such dtype on rank {hvd.rank()}"):
            compression.decompress(torch.ones(1), contexts[0])
    for again in (
        lambda: compression.decompress(torch.ones(1), contexts[0]),
        lambda: compression.compress(named[0][1].grad),
    ):
        with pytest.raises(UnsupportedError, match=r"interrupted by TypeError.* discard it: load"):
            again()
    compression.load_state_dict(saved)
    for step in range(2, 5):
        reduced = exchange(model, compression, step)
        assert torch.equal(reduced, exchange(model, other, step))
        same_everywhere(reduced)


def test_nan_of_a_dropped_step_is_not_told_in_the_next():
    model = make_model()
    compression = small_buckets(model, "topk")
    exchange(model, compression, 0)
    saved = compression.state_dict()
    model.zero_grad()
    loss_of(model, *next(batches(1))).backward()
    sent = {name: compression.compress(weight.grad) for name, weight in model.named_parameters()}
    total, context = sent["head.bias"]  # dense
    compression.decompress(total * math.nan, context)
    compression.load_state_dict(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exchange(model, compression, 1)


@pytest.mark.transport
@pytest.mark.parametrize("came", [(8, 8), (8, 1), (1, 8)], ids=str)
def test_a_state_that_is_loaded_while_the_worker_is_busy_drops_the_step(
    came, slow, same_everywhere
):
    model = make_model()
    compression, other = small_buckets(model, "topk"), small_buckets(model, "topk")
    for step in range(2):
        assert torch.equal(exchange(model, compression, step), exchange(model, other, step))
    saved = compression.state_dict()
    model.zero_grad()
    loss_of(model, *next(batches(1))).backward()
    came = came[hvd.rank()]  # 8: one bucket and half of the next
    for number, parameter in enumerate(list(model.parameters())[:came]):
        if number == 7 and came != 1:
            time.sleep(0.2)  # the bucket is encoded by then, and sent, whatever others do
        compression.compress(parameter.grad)
    with pytest.raises(ValueError, match="a step is under way"):
        compression.state_dict()
    with pytest.raises(ValueError, match="a step is under way"):
        compression.set_density(0.5)
    compression.load_state_dict(saved)
    for step in range(2, 4):
        reduced = exchange(model, compression, step)
        assert torch.equal(reduced, exchange(model, other, step))
        same_everywhere(reduced)


def test_asking_for_the_state_in_the_midst_changes_nothing(slow):
    ends = []
    for asks in (False, True):
        model = make_model()
        compression = small_buckets(model, "fft")
        optimizer = distributed(model, compression)
        for step, (x, y) in enumerate(batches(3)):
            optimizer.zero_grad()
            loss_of(model, x, y, step).backward()
            if asks:
                with pytest.raises(ValueError, match="a step is under way"):
                    compression.state_dict()
                compression.stats()
            optimizer.step()
        ends.append(flat(model))
    assert torch.equal(*ends)


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = np.random.default_rng([hvd.rank(), index])
        return torch.from_numpy(generator.standard_normal(40).astype(np.float32))


@pytest.mark.processes  # a fork takes one thread along
def test_data_loaders_that_fork_during_training(slow, same_everywhere):
    model = make_model()
    optimizer = distributed(model, small_buckets(model, "topk"))
    train(model, optimizer, 1)
    optimizer.zero_grad()
    loss_of(model, *next(batches(1))).backward()  # the worker is busy when the loader forks
    loader = torch.utils.data.DataLoader(
        Items(), batch_size=16, num_workers=2, multiprocessing_context="fork"
    )
    begin = time.monotonic()
    for x in loader:
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, x, torch.zeros(16).long()).backward()
    optimizer.step()
    assert time.monotonic() - begin < 150
    same_everywhere(flat(model))


def test_no_thread_outlives_its_compressor():
    model = make_model()
    compression = small_buckets(model, "topk")
    optimizer = distributed(model, compression)
    train(model, optimizer, 1)
    [thread] = compression.driver.pipeline.worker._threads
    assert thread.is_alive()
    assert thread.name.startswith("fftcomp-encode")
    # Horovod's hooks hold its optimizer, and that one the compressor.
    del optimizer, model
    compression = None
    for _ in range(100):  # another thread, as that of the watch, may hold the steps for a moment
        gc.collect()
        thread.join(0.1)
        if not thread.is_alive():
            break
    assert not thread.is_alive()
