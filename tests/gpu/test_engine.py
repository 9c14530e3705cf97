"""Whole steps of several ranks on an emulated GPU: what the CPU computes, without a wait."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_codec
from horovod_fftcomp.backends.gpu.probe import probe
from horovod_fftcomp.buckets import Bucket
from horovod_fftcomp.engine import Engine
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.policy import make_policy
from horovod_fftcomp.schemes import MEASURE_EVERY, Tensor
from horovod_fftcomp.world import exchange_once
from tests.gpu.emulator import Emulator

TENSORS = (Tensor("a", (100, 90)), Tensor("b", (3000,)), Tensor("c", (50, 70)))


def make_engines(device, recipe, n_ranks=2, **options):
    policy = make_policy(recipe, **options)
    buckets = [Bucket(TENSORS[:2], policy), Bucket(TENSORS[2:], policy)]
    return [Engine(buckets, rank, n_ranks, device) for rank in range(n_ranks)]


def random_grads(rng, n_ranks=2):
    def grad(tensor):
        return rng.standard_t(3, math.prod(tensor.shape)).astype(np.float32)

    return [[[grad(t) for t in TENSORS[:2]], [grad(TENSORS[2])]] for _ in range(n_ranks)]


def run_step(engines, grads):
    """Return the sums of a step, the same on all ranks."""
    exchange_once(engines, grads, random.Random(0))
    sums = [[total for bucket in (0, 1) for total in engine.sums(bucket)] for engine in engines]
    for others in sums[1:]:
        for ours, theirs in zip(sums[0], others, strict=True):
            assert ours.tobytes() == theirs.tobytes()
    found = [np.array(total) for total in sums[0]]
    for engine in engines:
        engine.settle()
    return found


@pytest.mark.parametrize(
    ("recipe", "options", "tolerance"),
    [
        ("topk", {"density": 0.05}, 0),
        ("topk", {"density": 0.05, "error_feedback": False}, 0),
        ("topk", {"density": 0.05, "warmup_steps": 2}, 0),
        ("none", {}, 0),
        ("fp16", {}, 0),  # of the host
        ("scalecom", {"density": 0.05}, 0),  # of the host too
        ("hard_threshold", {"threshold": 1.5}, 0),
        ("fft", {}, 2e-6),
        ("dct", {}, 2e-6),
    ],
)
def test_steps_are_the_cpus(recipe, options, tolerance):
    cpu, gpu = make_engines(None, recipe, **options), make_engines(Emulator(), recipe, **options)
    rng = np.random.default_rng(0)
    for step in range(6):
        grads = random_grads(rng)
        if step == 2:
            grads[1][0][1][5] = np.nan
        if step == 3:
            grads[0][0][1] = grads[1][0][1] = None
        expected = run_step(cpu, grads)
        for ours, theirs in zip(run_step(gpu, grads), expected, strict=True):
            scale = np.nan_to_num(np.abs(theirs)).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.costs.skipped_steps == theirs.costs.skipped_steps == 1
        assert ours.costs.sent_nbytes == theirs.costs.sent_nbytes
        assert ours.costs.total_error == pytest.approx(theirs.costs.total_error, rel=1e-5)
        assert ours.costs.relative_error == pytest.approx(theirs.costs.relative_error, rel=1e-5)
        for tensor in TENSORS:
            found, wanted = ours.residual(tensor.name), theirs.residual(tensor.name)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * 10)


def test_a_state_goes_from_cpu_to_gpu_and_back():
    rng = np.random.default_rng(1)
    grads = [random_grads(rng) for _ in range(6)]
    straight = make_engines(None, "topk", density=0.05)
    changing = make_engines(None, "topk", density=0.05)
    for step in range(6):
        if step in (2, 4):
            saved = [engine.state_dict() for engine in changing]
            changing = make_engines(Emulator() if step == 2 else None, "topk", density=0.05)
            for engine, state in zip(changing, saved, strict=True):
                engine.load_state_dict(state)
        for ours, theirs in zip(
            run_step(changing, grads[step]), run_step(straight, grads[step]), strict=True
        ):
            assert ours.tobytes() == theirs.tobytes()


def test_what_travels_as_it_is_takes_its_residual_along():
    device, rng = Emulator(), np.random.default_rng(2)
    engines = {on: make_engines(on, "topk", density=0.05, bits=32) for on in (None, device)}
    for step in range(3):
        grads = random_grads(rng)
        if step == 1:
            for ranks in engines.values():
                for engine in ranks:
                    engine.buckets = [
                        b._replace(policy=b.policy.with_density(1.0)) for b in engine.buckets
                    ]
        on_cpu, on_gpu = (run_step(ranks, grads) for ranks in engines.values())
        for ours, theirs in zip(on_gpu, on_cpu, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert engines[device][0].residual_norm() == 0


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


def test_a_corrupt_payload_ends_the_run_a_step_later():
    [engine] = make_engines(Emulator(), "topk", 1, density=0.05)
    rng = np.random.default_rng(4)
    for step in range(2):
        [grads] = random_grads(rng, 1)
        for bucket in (0, 1):
            message = engine.start(bucket, grads[bucket]).data
            if step == 0 and bucket == 0:
                message[3] ^= 8
            engine.advance(bucket, message)
        if step == 0:
            assert np.isnan(engine.sums(0)[0]).all()
            engine.settle()
    with pytest.raises(PayloadError, match="1 payloads were corrupt"):
        engine.settle()


def test_without_memory_a_step_ends_and_leaves_the_state_whole():
    class Small(Emulator):
        """Has no memory left at times."""

        full = False

        def empty(self, n, dtype=np.float32):
            if self.full:
                raise MemoryError
            return super().empty(n, dtype)

    device, rng = Small(), np.random.default_rng(6)
    cpu, gpu = (make_engines(on, "topk", density=0.05) for on in (None, device))
    first, broken_off, last = (random_grads(rng) for _ in range(3))
    run_step(cpu, first)
    run_step(gpu, first)
    device.full = True
    with pytest.raises(MemoryError):
        run_step(gpu, broken_off)
    device.full = False
    for engine in gpu:
        engine.abandon()
    for ours, theirs in zip(run_step(gpu, last), run_step(cpu, last), strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_only_what_is_asked_for_is_waited_for():
    class Patient(Emulator):
        """Counts the waits for what was copied in the same step."""

        waits = step = 0

        def fetch(self, array):
            fetched, begun = super().fetch(array), self.step

            def wait():
                self.waits += self.step == begun
                return fetched()

            return wait

    device = Patient()
    engines, rng = make_engines(device, "fft"), np.random.default_rng(5)
    for step in range(MEASURE_EVERY + 2):
        device.step = step
        run_step(engines, random_grads(rng))
    assert device.waits == 0
    engines[0].read_device()
    assert device.waits > 0
    assert engines[0].costs.relative_error > 0


def test_the_probe_finds_a_device_that_computes_wrong():
    codecs = [get_codec(recipe) for recipe in ("topk", "fft", "dct", "bf16")]
    probe(Emulator(), codecs)

    class Wrong(Emulator):
        def fetch(self, array):
            copied = array.copy()
            copied[copied.size // 2] += 1
            return lambda: copied

    with pytest.raises(UnsupportedError, match=r"1 of .* bytes of a payload are wrong"):
        probe(Wrong(), codecs)


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
        for ours, theirs in zip(run_step(gpu, grads), run_step(cpu, grads), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for ours, theirs in zip(gpu, cpu, strict=True):
            for tensor in TENSORS:
                wanted = theirs.residual(tensor.name)
                np.testing.assert_array_equal(ours.residual(tensor.name), wanted)
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.costs.skipped_steps == theirs.costs.skipped_steps == 2


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


def test_residuals_follow_the_loss_scale():
    rng = np.random.default_rng(9)
    cpu, gpu = (make_engines(on, "topk", density=0.05) for on in (None, Emulator()))
    for scale in (1.0, 4.0, 0.5):
        grads = random_grads(rng)
        for engine in cpu + gpu:
            engine.follow_loss_scale(scale)
        for ours, theirs in zip(run_step(gpu, grads), run_step(cpu, grads), strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_after_a_corrupt_payload_a_checkpoint_goes_on():
    rng = np.random.default_rng(10)
    [gpu], [cpu] = (make_engines(on, "topk", 1, density=0.05) for on in (Emulator(), None))
    grads = [random_grads(rng, 1) for _ in range(2)]
    for engine in (cpu, gpu):
        run_step([engine], grads[0])
    saved = gpu.state_dict()
    for bucket in (0, 1):
        message = gpu.start(bucket, grads[1][0][bucket]).data
        message[3] ^= 8
        gpu.advance(bucket, message)
    gpu.settle()
    with pytest.raises(PayloadError, match="2 payloads were corrupt"):
        gpu.read_device()
    gpu.load_state_dict(saved)
    for ours, theirs in zip(run_step([gpu], grads[1]), run_step([cpu], grads[1]), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    gpu.read_device()


def test_messages_of_another_length_are_refused():
    [engine] = make_engines(Emulator(), "topk", 1, density=0.05)
    message = engine.start(0, random_grads(np.random.default_rng(11), 1)[0][0]).data
    with pytest.raises(PayloadError, match="bytes arrived"):
        engine.advance(0, message[:-16])
