"""Whole steps of several ranks on an emulated GPU: what the CPU computes, without a wait."""

from __future__ import annotations

import math
import random
import sys

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_scheme
from horovod_fftcomp.backends import gpu
from horovod_fftcomp.buckets import Bucket
from horovod_fftcomp.engine import Engine
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.policy import make_policy
from horovod_fftcomp.probe import probe
from horovod_fftcomp.schemes import MEASURE_EVERY, Tensor
from horovod_fftcomp.schemes.auto import TRIAL_STEPS
from horovod_fftcomp.schemes.nodes import Layout
from horovod_fftcomp.world import exchange_once
from tests.gpu.emulator import DeviceArray, Emulator

# The recipes that a GPU computes, with their defaults.
ON_DEVICE = (
    *(
        "fp16",
        "topk",
        "fft",
        "dct",
        "bf16",
        "hard_threshold",
        "scalecom",
        "random_k",
        "random_block",
    ),
    *("onebit", "efsignsgd", "qsgd", "terngrad", "dgc", "dorefa", "natural", "signsgd", "signum"),
    *("demo", "powersgd", "sparcml", "auto", "strom", "adacomp", "wangni", "gtopk", "sketchsgd"),
)
# Of the cases below those of the host: by recipe, or by recipe and options.
ON_HOST = (
    ("scalecom", "density", "selector"),
    ("dgc", "density", "max_norm"),
    ("dgc", "density", "warmup_steps"),  # a density of 1 in 32 bits travels as it is
)
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
        ("fp16", {}, 0),
        ("scalecom", {"density": 0.05, "selector": "exact"}, 0),  # of the host too
        ("scalecom", {"density": 0.05}, 0),
        ("scalecom", {"density": 1.0, "beta": 1.0}, 0),
        ("random_k", {"density": 0.05}, 0),
        ("random_k", {"density": 0.3, "exchange": "gather"}, 0),
        ("random_block", {"density": 0.05, "unbiased": True, "error_feedback": False}, 0),
        ("hard_threshold", {"threshold": 1.5}, 0),
        ("hard_threshold", {"threshold": 6.0}, 0),
        ("hard_threshold", {"threshold": 1e-3, "bits": 6}, 0),  # above it is nearly all
        ("hard_threshold", {"threshold": 1.5, "error_feedback": False}, 0),
        ("hard_threshold", {"threshold": 1e-3, "bits": 32}, 0),  # as it is, with those below
        ("hard_threshold", {"density": 0.05, "calibrate_steps": 2}, 0),
        ("onebit", {}, 0),
        ("onebit", {"group": "column"}, 0),
        ("onebit", {"error_feedback": False}, 0),
        ("efsignsgd", {}, 0),
        ("qsgd", {}, 0),
        ("qsgd", {"levels": 2, "bucket": 64, "norm": "l2", "error_feedback": True}, 0),
        ("terngrad", {}, 0),
        ("terngrad", {"packing": "bits", "clip": 0}, 0),
        ("dgc", {"density": 0.05}, 0),
        ("dgc", {"density": 0.05, "nesterov": True, "masking": False, "bits": 8}, 0),
        ("dgc", {"density": 1.0, "warmup_steps": 2}, 0),
        ("dgc", {"density": 0.05, "max_norm": 1.0}, 0),  # of the host
        ("strom", {"threshold": 2.0}, 0),
        ("strom", {"threshold": 0.01, "quanta": 7}, 0),  # nearly all reach it
        ("adacomp", {}, 0),
        ("adacomp", {"bin": 3}, 0),
        ("wangni", {}, 0),
        ("wangni", {"density": 0.9}, 0),
        ("gtopk", {}, 0),
        ("gtopk", {"density": 0.4, "error_feedback": False}, 0),
        ("sketchsgd", {}, 0),
        ("sketchsgd", {"density": 0.05}, 0),  # all travels as it is
        ("sketchsgd", {"density": 0.002, "rows": 3, "nesterov": True, "masking": False}, 0),
        ("sparcml", {"density": 0.05}, 0),
        ("topk", {"density": 0.05, "scope": "bucket"}, 0),
        ("scalecom", {"density": 0.05, "scope": "bucket"}, 0),
        ("natural", {}, 0),
        ("dorefa", {}, 0),
        ("dorefa", {"bits": 1}, 0),
        ("dorefa", {"bits": 12}, 0),
        ("signsgd", {}, 0),
        ("signum", {"decay": 0.7}, 0),
        ("powersgd", {}, 0),
        ("powersgd", {"rank": 1}, 0),
        ("powersgd", {"rank": 12, "error_feedback": False}, 0),
        ("demo", {}, 2e-6),
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
            assert tolerance or ours.tobytes() == theirs.tobytes()
            scale = np.nan_to_num(np.abs(theirs)).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)
    on_host = (recipe, *options) in ON_HOST or recipe in ON_HOST
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert ours.computes_on_device(0) == (not on_host)
        ours.read_device()
        assert ours.costs.skipped_steps == theirs.costs.skipped_steps == 1
        assert ours.costs.sent_nbytes == theirs.costs.sent_nbytes
        assert ours.costs.total_error == pytest.approx(theirs.costs.total_error, rel=1e-5)
        assert ours.costs.similarity == theirs.costs.similarity
        assert ours.costs.relative_error == pytest.approx(theirs.costs.relative_error, rel=1e-5)
        for tensor in TENSORS:
            found, wanted = ours.residual(tensor.name), theirs.residual(tensor.name)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize(
    ("recipe", "options", "tolerance"),
    [
        ("topk", {"density": 0.05}, 0),
        ("topk", {"density": 0.05, "warmup_steps": 2, "scope": "bucket"}, 0),
        ("fp16", {}, 0),
        ("scalecom", {"density": 0.05}, 0),
        ("hard_threshold", {"density": 0.05, "calibrate_steps": 2}, 0),  # at first of the host
        ("powersgd", {}, 0),
        ("adacomp", {}, 0),
        ("gtopk", {}, 0),
        ("sketchsgd", {"momentum": 0.0}, 0),
        ("fft", {}, 2e-6),
    ],
)
@pytest.mark.parametrize(("n_ranks", "ranks_per_node"), [(5, 2), (3, 4)])
def test_between_nodes_steps_are_the_cpus(recipe, options, tolerance, n_ranks, ranks_per_node):
    options = {**options, "ranks_per_node": ranks_per_node}
    cpu, gpu = (make_engines(on, recipe, n_ranks, **options) for on in (None, Emulator()))
    rng = np.random.default_rng(17)
    for step in range(6):
        grads = random_grads(rng, n_ranks)
        if step in (2, 4):  # of a leader in one bucket at least, and of another rank
            grads[step // 2][0][1][5] = np.nan
        if step == 3:
            grads[0][0][1] = grads[1][0][1] = None
        expected = run_step(cpu, grads)
        for ours, theirs in zip(run_step(gpu, grads), expected, strict=True):
            assert tolerance or ours.tobytes() == theirs.tobytes()
            scale = np.nan_to_num(np.abs(theirs)).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * scale)
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert ours.computes_on_device(0)
        ours.read_device()
        assert ours.costs.skipped_steps == theirs.costs.skipped_steps == 2
        assert ours.costs.sent_nbytes == theirs.costs.sent_nbytes
        assert ours.costs.inside_nbytes == theirs.costs.inside_nbytes
        assert ours.costs.total_error == pytest.approx(theirs.costs.total_error, rel=1e-5)
        for tensor in TENSORS:
            found, wanted = ours.residual(tensor.name), theirs.residual(tensor.name)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("bad", [False, True])
def test_what_a_rank_owes_that_leads_no_more_arrives_when_a_step_counts(bad):
    old, rng = make_engines(Emulator(), "topk", 4, density=0.05), np.random.default_rng(18)
    run_step(old, random_grads(rng, 4))
    saved = [engine.state_dict() for engine in old]
    grads = [random_grads(rng, 4) for _ in range(2)]
    if bad:
        grads[0][1][1][0][7] = np.inf
    found = []
    for device in (None, Emulator()):
        new = make_engines(device, "topk", 4, density=0.05, ranks_per_node=2)
        for engine, state in zip(new, saved, strict=True):
            engine.load_state_dict(state)
        sums = [total.tobytes() for own in grads for total in run_step(new, own)]
        norms = [engine.residual_norm() for engine in new]
        assert norms.count(0.0) == 4 - len({Layout(2, 4).leaders([t]) for t in TENSORS[::2]}) * 2
        found.append((sums, norms))
    assert found[0] == found[1]


def test_signs_of_sums_are_the_cpus_but_where_a_rounding_decides():
    cpu, gpu = (make_engines(on, "demo", 3, sign=True, density=0.3) for on in (None, Emulator()))
    rng = np.random.default_rng(3)
    for _ in range(3):
        grads = random_grads(rng, 3)
        for ours, theirs in zip(run_step(gpu, grads), run_step(cpu, grads), strict=True):
            assert set(np.unique(ours)) <= {-3.0, 0.0, 3.0}
            assert np.mean(ours != theirs) < 1e-3 < np.mean(theirs < 0)
    assert all(engine.computes_on_device(0) for engine in gpu)


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_ranks_share_the_lead_as_on_the_cpu(ranks):
    cpu, gpu = (make_engines(on, "scalecom", ranks, density=0.03) for on in (None, Emulator()))
    rng = np.random.default_rng(13)
    for _ in range(ranks + 1):
        grads = random_grads(rng, ranks)
        for ours, theirs in zip(run_step(gpu, grads), run_step(cpu, grads), strict=True):
            assert ours.tobytes() == theirs.tobytes()
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.costs.similarity == theirs.costs.similarity
        assert (ours.costs.similarity is None) == (ranks == 1)


def test_low_rank_sums_are_the_cpus_whatever_the_matrices():
    shapes = {"tall": (1000, 40), "kernel": (8, 5, 7, 3), "wide": (8, 5000), "dependent": (300, 30)}
    shapes |= {"vector": (77,), "none": (0, 4)}
    tensors = tuple(Tensor(name, shape) for name, shape in shapes.items())
    policy, rng = make_policy("powersgd", rank=3), np.random.default_rng(14)
    cpu, gpu = (
        [Engine([Bucket(tensors, policy)], rank, 3, on) for rank in range(3)]
        for on in (None, Emulator())
    )
    for step in range(4):
        grads = [
            [rng.standard_normal(math.prod(t.shape), np.float32) for t in tensors] for _ in cpu
        ]
        for of_rank in grads:
            of_rank[3] = np.outer(of_rank[3][:300], np.ones(30, np.float32)).ravel()  # of rank 1
            of_rank[2] = None if step == 1 else of_rank[2]
            of_rank[4] = None if step == 2 else of_rank[4]
        grads[1][1] *= np.float32(1e38 if step == 3 else 1)  # overflows when it is multiplied
        for engines in (cpu, gpu):
            exchange_once(engines, [[own] for own in grads], random.Random(0))
        for ours, theirs in zip(gpu, cpu, strict=True):
            for found, wanted in zip(ours.sums(0), theirs.sums(0), strict=True):
                assert found.tobytes() == wanted.tobytes()
            ours.settle()
            theirs.settle()
            kept, wanted = ours.state_dict()["state"], theirs.state_dict()["state"]
            assert {kind: {*arrays} for kind, arrays in kept.items()} == {
                kind: {*arrays} for kind, arrays in wanted.items()
            }
            for kind, arrays in wanted.items():
                for name, array in arrays.items():
                    np.testing.assert_array_equal(kept[kind][name], array)
    for engine in gpu:
        engine.read_device()
        assert engine.computes_on_device(0)
        assert engine.costs.skipped_steps == 1


def test_between_trials_auto_is_the_cpus():
    """A wave goes by a transform, what has large elements by none; trials are of the host."""
    options = {"ratio": 20, "every": TRIAL_STEPS + 4}
    cpu, gpu = (make_engines(on, "auto", **options) for on in (None, Emulator()))
    rng = np.random.default_rng(16)
    for step in range(2 * TRIAL_STEPS + 7):
        grads = random_grads(rng)
        for of_rank in grads:
            of_rank[0][1] = np.sin(np.arange(3000) / rng.uniform(9, 11)).astype(np.float32)
        if step == TRIAL_STEPS + 1:
            grads[1][0][1][5] = np.nan
        if step == TRIAL_STEPS + 2:
            grads[0][0][1] = grads[1][0][1] = None
        expected = run_step(cpu, grads)
        for ours, theirs in zip(run_step(gpu, grads), expected, strict=True):
            scale = np.nan_to_num(np.abs(theirs)).max()
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * scale)
        in_trial = step % options["every"] < TRIAL_STEPS
        for engine in gpu:
            for arrays in (engine._state[0]["residual"], engine._state[1]["residual"]):
                assert all(isinstance(a, DeviceArray) != in_trial for a in arrays.values())
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.choices() == theirs.choices()
        assert {choice.split("(")[0] for choice in ours.choices().values()} > {"Identity"}
        assert ours.costs.skipped_steps == theirs.costs.skipped_steps == 1
        assert ours.costs.sent_nbytes == theirs.costs.sent_nbytes
        saved, wanted = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert {k: {*arrays} for k, arrays in saved.items()} == {k: {*a} for k, a in wanted.items()}
        for kind in ("choice", "trials"):
            for name, array in wanted[kind].items():
                assert saved[kind][name].tobytes() == array.tobytes()


@pytest.mark.parametrize("recipe", ON_DEVICE)
def test_what_arrived_may_be_overwritten_once_it_is_summed(recipe):
    """As TensorFlow does, which owns it, on a stream that knows nothing of ours."""
    options = {"threshold": 1.5} if recipe == "hard_threshold" else {}
    rng, device = np.random.default_rng(15), Emulator()
    expected, engines = (make_engines(on, recipe, **options) for on in (Emulator(), device))
    for _ in range(TRIAL_STEPS + 2 if recipe == "auto" else 3):
        grads = random_grads(rng)
        wanted = run_step(expected, grads)
        received = []
        for bucket in (0, 1):
            rounds = [e.start(bucket, g[bucket]) for e, g in zip(engines, grads, strict=True)]
            while rounds[0] is not None:
                data = [round_.data for round_ in rounds]
                gathers = rounds[0].collective == "allgather"
                output = np.concatenate(data) if gathers else data[0] + data[1]
                received += (copies := [device.upload(output) for _ in engines])
                rounds = [e.advance(bucket, c) for e, c in zip(engines, copies, strict=True)]
        sums = [np.array(total) for bucket in (0, 1) for total in engines[0].sums(bucket)]
        for ours, theirs in zip(sums, wanted, strict=True):
            assert ours.tobytes() == theirs.tobytes()
        for array in received:
            array.view(np.uint8).fill(0xFF)
        for engine in engines:
            engine.settle()
    engines[0].read_device()
    assert engines[0].costs.skipped_steps == 0


@pytest.mark.parametrize("recipe", ["topk", "dgc", "signum", "powersgd", "gtopk", "sketchsgd"])
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


def test_auto_keeps_what_a_loaded_dense_choice_would_send_if_the_step_is_dropped():
    [engine], rng = make_engines(Emulator(), "auto", 1), np.random.default_rng(20)
    for _ in range(TRIAL_STEPS + 1):
        run_step([engine], random_grads(rng, 1))
    saved = engine.state_dict()
    for name in saved["state"]["choice"]:
        saved["state"]["choice"][name][:] = 0
        saved["state"]["residual"][name] = np.ones(engine.residual(name).size, np.float32)
    engine.load_state_dict(saved)
    before, grads = engine.residual_norm(), random_grads(rng, 1)
    grads[0][0][0][7] = np.nan
    run_step([engine], grads)
    engine.read_device()
    assert engine.residual_norm() == before > 0


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


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("topk", {"density": 0.05}),
        ("hard_threshold", {"threshold": 2.0}),
        ("adacomp", {}),
        ("gtopk", {}),
        ("sketchsgd", {}),
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
    for ours, theirs in zip(run_step(gpu, last), run_step(cpu, last), strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("topk", {"density": 0.12, "bits": 6}),
        ("fft", {}),
        ("scalecom", {}),
        ("random_k", {}),
        ("onebit", {}),
        ("qsgd", {}),
        ("dgc", {"density": 0.05}),
        ("powersgd", {}),
    ],
)
def test_tables_are_copied_only_when_they_change(recipe, options):
    class Recycling(Emulator):
        """Gives out memory again that nobody holds any more, as a caching allocator does."""

        tables = 0

        def empty(self, n, dtype=np.float32):
            rooms = self.cache.setdefault(("rooms", n, np.dtype(dtype)), [])
            free = [array for array in rooms if sys.getrefcount(array.base) == 2]
            if not free:
                rooms += (free := [super().empty(n, dtype)])
            return free[0].view()

        def upload(self, array):
            self.tables += array.dtype == np.uint8
            return super().upload(array)

    device = Recycling()
    [engine], [grads] = (
        make_engines(device, recipe, 1, **options),
        random_grads(np.random.default_rng(12), 1),
    )
    grads = [[device.upload(grad) for grad in bucket] for bucket in grads]
    for step in range(12):
        if step == 8:
            device.tables = 0
        for bucket in (0, 1):
            round_ = engine.start(bucket, grads[bucket])
            while round_ is not None:
                round_ = engine.advance(bucket, round_.data)
        engine.settle()
    # Other positions in each step, bucket and half; other keys in each step and bucket.
    drawn = {"random_k": 4 * 2 * 2, "qsgd": 4 * 2}
    assert device.tables == drawn.get(recipe, 0)


@pytest.mark.parametrize(
    ("recipe", "options", "waits"),
    # Of the counts and of the headers, in each bucket on each rank.
    [
        ("fft", {}, 0),
        ("onebit", {}, 0),
        ("terngrad", {}, 0),
        ("dgc", {"density": 0.05}, 0),
        ("powersgd", {}, 0),
        ("hard_threshold", {"threshold": 1.5}, 2 * 2 * 2),
        ("strom", {"threshold": 1.5}, 2 * 2 * 2),
        ("adacomp", {}, 3 * 2 * 2),  # of the bins' maxima, too
    ],
)
def test_only_what_is_asked_for_is_waited_for(recipe, options, waits):
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
    engines, rng = make_engines(device, recipe, **options), np.random.default_rng(5)
    for step in range(MEASURE_EVERY + 2):
        device.step = step
        run_step(engines, random_grads(rng))
    assert device.waits == waits * (MEASURE_EVERY + 2)
    engines[0].read_device()
    assert device.waits > waits * (MEASURE_EVERY + 2)
    assert engines[0].costs.relative_error > 0


def test_the_probe_finds_a_device_that_computes_wrong():
    class Asked(Emulator):
        """Notes which kernels are used."""

        names: frozenset = frozenset()

        def functions(self, source, names):
            self.names |= set(names)
            return super().functions(source, names)

    schemes = [get_scheme(recipe) for recipe in ON_DEVICE]
    device = Asked()
    probe(device, schemes)
    assert device.names <= set(gpu.NAMES)

    class Wrong(Emulator):
        def functions(self, source, names):
            found = super().functions(source, names)
            left_out = {
                "mark<1>",
                "mark<2>",
                "choose<0>",
                "choose<1>",
                "choose<2>",
                "sum_raw",
                "take_shares",
            }
            left_out |= {"write_signs", "write_levels", "write_halves", "orthonormalize"}
            left_out &= set(found)
            return found | dict.fromkeys(left_out, lambda *arguments: None)

    class Mute(Emulator):
        """Leaves one kernel out."""

        def __init__(self, name):
            super().__init__()
            self.name = name

        def functions(self, source, names):
            return super().functions(source, names) | {self.name: lambda *arguments: None}

    for scheme in schemes:  # the host reads lists itself
        with pytest.raises((UnsupportedError, PayloadError), match=r"a sum with values|k bits set"):
            probe(Wrong(), [scheme])
    for name, recipe in (
        *(("keep_signs", "signsgd"), ("keep_signs", "signum")),
        *(("keep_factors", "powersgd"), ("subtract_products", "powersgd")),
    ):
        with pytest.raises(UnsupportedError, match="a sum with values"):
            probe(Mute(name), [get_scheme(recipe)])
    with pytest.raises(UnsupportedError, match="a sum with values"):
        probe(Mute("orthonormalize"), [get_scheme("powersgd", rank=128)])
    probe(Emulator(), [get_scheme("demo", sign=True)])


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


@pytest.mark.parametrize("recipe", ["topk", "dgc", "powersgd"])
def test_what_is_carried_follows_the_loss_scale(recipe):
    rng, options = np.random.default_rng(9), {} if recipe == "powersgd" else {"density": 0.05}
    cpu, gpu = (make_engines(on, recipe, **options) for on in (None, Emulator()))
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
