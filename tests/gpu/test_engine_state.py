"""What ranks on an emulated GPU carry from step to step, also past steps that fail."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from horovod_fftcomp import PayloadError
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.simulation import exchange_once
from tests.gpu.emulator import Emulator
from tests.gpu.steps import (
    TENSORS,
    assert_same_account,
    assert_same_step,
    make_engines,
    random_grads,
    run_step,
)


@pytest.mark.parametrize(
    "recipe", ["topk", "dgc", "signum", "powersgd", "gtopk", "arctopk", "sketchsgd"]
)
def test_a_state_goes_from_cpu_to_gpu_and_back(recipe):
    rng = np.random.default_rng(1)
    grads = [random_grads(rng) for _ in range(6)]
    options = {"density": 0.05} if recipe in ("topk", "dgc") else {}
    straight = make_engines(None, recipe, **options)
    changing = make_engines(None, recipe, **options)
    for step in range(6):
        if step in (2, 4):
            saved = [engine.state_dict() for engine in changing]
            changing = make_engines(Emulator() if step == 2 else None, recipe, **options)
            for engine, state in zip(changing, saved, strict=True):
                engine.load_state_dict(state)
        assert_same_step(straight, changing, grads[step])


@pytest.mark.parametrize("recipe", ["topk", "fft", "scalecom", "powersgd", "dgc", "auto"])
def test_a_discarded_step_never_was(recipe):
    """Also one that the GPU has rolled back, and whose skipped step nobody has read yet."""
    options = {"ratio": 10, "every": 2} if recipe == "auto" else {}
    plain, other = (make_engines(Emulator(), recipe, **options) for _ in range(2))
    rng = np.random.default_rng(4)
    for step in range(5):
        grads, foreign = random_grads(rng), random_grads(rng)
        if step == 3:
            foreign[1][0][0][7] = np.nan
        if step != 1:
            run_step(other, foreign)
            for engine in other:
                engine.discard()
        for ours, theirs in zip(run_step(other, grads), run_step(plain, grads), strict=True):
            assert ours.tobytes() == theirs.tobytes()
    for engine in plain:
        engine.read_device()
    assert_same_account(plain, other, skipped_steps=0)
    assert other[0].alarm.ratios() == plain[0].alarm.ratios()


def test_what_travels_as_it_is_takes_its_residual_along():
    cpu, gpu = (make_engines(on, "topk", density=0.05, bits=32) for on in (None, Emulator()))
    rng = np.random.default_rng(2)
    for step in range(3):
        if step == 1:
            for engine in cpu + gpu:
                engine.buckets = [
                    b._replace(policy=b.policy.with_density(1.0)) for b in engine.buckets
                ]
        assert_same_step(cpu, gpu, random_grads(rng))
    assert gpu[0].residual_norm() == 0


@pytest.mark.parametrize("bad", [False, True])
def test_a_dense_warmup_sends_a_residual_unless_the_step_is_dropped(bad):
    rng = np.random.default_rng(21)
    options = {"density": 0.05, "warmup_steps": 3, "max_norm": 60.0}
    cpu, gpu = (make_engines(on, "dgc", **options) for on in (None, Emulator()))
    assert_same_step(cpu, gpu, random_grads(rng))
    carried = rng.standard_normal(3000, np.float32)
    for engine in cpu + gpu:
        saved = engine.state_dict()
        saved["state"]["residual"] = {"b": carried}
        engine.load_state_dict(saved)
    grads = random_grads(rng)
    if bad:
        grads[1][0][0][7] = np.inf
    assert_same_step(cpu, gpu, grads)
    assert all(engine.computes_on_device(0) for engine in gpu)
    for ours, theirs in zip(gpu, cpu, strict=True):
        np.testing.assert_array_equal(ours.residual("b").ravel(), carried if bad else 0)
        for tensor in TENSORS:
            velocities = (e.state_dict()["state"]["velocity"][tensor.name] for e in (ours, theirs))
            np.testing.assert_array_equal(*velocities)
    assert_same_step(cpu, gpu, random_grads(rng))


@pytest.mark.parametrize("device", [None, Emulator()])
def test_a_residual_that_is_sent_whole_is_kept_if_the_step_is_dropped(device):
    engines, rng = make_engines(device, "sketchsgd"), np.random.default_rng(19)
    run_step(engines, random_grads(rng))
    denser = make_engines(device, "sketchsgd", density=0.1)
    for old, new in zip(engines, denser, strict=True):
        new.load_state_dict(old.state_dict())
    before = [[engine.residual(t.name) for t in TENSORS] for engine in denser]
    grads = random_grads(rng)
    grads[1][0][0][7] = np.nan
    run_step(denser, grads)
    for engine, kept in zip(denser, before, strict=True):
        for tensor, residual in zip(TENSORS, kept, strict=True):
            np.testing.assert_array_equal(engine.residual(tensor.name), residual)
    run_step(denser, random_grads(rng))
    assert all(engine.residual_norm() == 0 for engine in denser)


def test_a_flag_of_a_dense_tensor_drops_the_step():
    device = Emulator()
    engines, rng = make_engines(device, "topk", density=0.05), np.random.default_rng(3)
    run_step(engines, random_grads(rng))
    before = [engine.residual("a") for engine in engines]
    exchange_once(engines, random_grads(rng), random.Random(0))
    for engine in engines:
        engine.observe_on_device(device.upload(np.zeros(1, np.uint32)))
        engine.observe_on_device(device.upload(np.ones(1, np.uint32)))
        engine.settle()
        engine.read_device()
        assert engine.costs.skipped_steps == 1
    for engine, residual in zip(engines, before, strict=True):
        np.testing.assert_array_equal(engine.residual("a"), residual)


def test_a_measured_step_that_is_dropped_counts_nowhere():
    rng = np.random.default_rng(8)
    cpu, gpu = (make_engines(on, "topk", density=0.05) for on in (None, Emulator()))
    first = random_grads(rng)
    first[1][0][0][0] = np.nan  # of step 0, which is measured; rank 0 is finite itself
    for grads in (first, random_grads(rng)):
        run_step(cpu, grads)
        run_step(gpu, grads)
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.costs.total_error == theirs.costs.total_error == 0
        assert ours.costs.relative_error == 0


def mixed_engines(device):
    """Engines with a bucket that a GPU computes, and one that it does not."""
    buckets = [
        Bucket(TENSORS[:2], make_policy("topk", density=0.05)),
        Bucket(TENSORS[2:], make_policy("scalecom", density=0.05)),
    ]
    return [Engine(buckets, rank, 2, device) for rank in range(2)]


def test_buckets_of_host_and_device_commit_together():
    rng = np.random.default_rng(7)
    cpu, gpu = mixed_engines(None), mixed_engines(Emulator())
    for step in range(4):
        grads = random_grads(rng)
        if step == 1:
            grads[0][0][0][3] = np.inf  # the device's
        if step == 2:
            grads[1][1][0][3] = np.nan  # the host's
        assert_same_step(cpu, gpu, grads)
        for ours, theirs in zip(gpu, cpu, strict=True):
            for tensor in TENSORS:
                wanted = theirs.residual(tensor.name)
                np.testing.assert_array_equal(ours.residual(tensor.name), wanted)
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.costs.skipped_steps == theirs.costs.skipped_steps == 2


@pytest.mark.parametrize("recipe", ["topk", "dgc", "powersgd"])
def test_what_is_carried_follows_the_loss_scale(recipe):
    rng, options = np.random.default_rng(9), {} if recipe == "powersgd" else {"density": 0.05}
    if recipe == "dgc":
        options["max_norm"] = 60.0
    cpu, gpu = (make_engines(on, recipe, **options) for on in (None, Emulator()))
    for scale in (1.0, 4.0, 0.5):
        grads = random_grads(rng)
        for engine in cpu + gpu:
            engine.follow_loss_scale(scale)
        assert_same_step(cpu, gpu, grads)


def test_a_corrupt_payload_ends_the_run_a_step_later():
    [engine] = make_engines(Emulator(), "topk", 1, density=0.05)
    rng = np.random.default_rng(4)
    for step in range(2):
        [grads] = random_grads(rng, 1)
        for bucket in (0, 1):
            message = engine.resume(bucket, grads[bucket]).data
            if step == 0 and bucket == 0:
                message[3] ^= 8
            engine.resume(bucket, message)
        if step == 0:
            assert np.isnan(engine.sums(0)[0]).all()
            engine.settle()
    with pytest.raises(PayloadError, match="1 payloads were corrupt"):
        engine.settle()


def test_after_a_corrupt_payload_a_checkpoint_goes_on():
    rng = np.random.default_rng(10)
    [gpu], [cpu] = (make_engines(on, "topk", 1, density=0.05) for on in (Emulator(), None))
    grads = [random_grads(rng, 1) for _ in range(2)]
    for engine in (cpu, gpu):
        run_step([engine], grads[0])
    saved = gpu.state_dict()
    for bucket in (0, 1):
        message = gpu.resume(bucket, grads[1][0][bucket]).data
        message[3] ^= 8
        gpu.resume(bucket, message)
    gpu.settle()
    with pytest.raises(PayloadError, match="2 payloads were corrupt"):
        gpu.read_device()
    gpu.load_state_dict(saved)
    assert_same_step([cpu], [gpu], grads[1])
    gpu.read_device()


def test_messages_of_another_length_are_refused():
    [engine] = make_engines(Emulator(), "topk", 1, density=0.05)
    message = engine.resume(0, random_grads(np.random.default_rng(11), 1)[0][0]).data
    with pytest.raises(PayloadError, match="bytes arrived"):
        engine.resume(0, message[:-16])


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("topk", {"density": 0.05}),
        ("hard_threshold", {"threshold": 2.0}),
        ("adacomp", {}),
        ("scalecom", {}),
        ("onebit", {}),
        ("qsgd", {"error_feedback": True}),
        ("dgc", {"density": 0.05}),
        ("powersgd", {}),
    ],
)
@pytest.mark.parametrize("allocations", [0, 3, 6])
def test_without_memory_a_step_ends_and_leaves_the_state_whole(recipe, options, allocations):
    class Small(Emulator):
        """Has no memory left after so many allocations."""

        left = math.inf

        def empty(self, n, dtype=np.float32):
            self.left -= 1
            if self.left < 0:
                raise MemoryError
            return super().empty(n, dtype)

    device, rng = Small(), np.random.default_rng(6)
    cpu, gpu = (make_engines(on, recipe, **options) for on in (None, device))
    first, broken_off, last = (random_grads(rng) for _ in range(3))
    run_step(cpu, first)
    run_step(gpu, first)
    device.left = allocations + 3  # the gradients of a bucket
    with pytest.raises(MemoryError):
        run_step(gpu, broken_off)
    device.left = math.inf
    for engine in gpu:
        engine.abandon()
    assert_same_step(cpu, gpu, last)
