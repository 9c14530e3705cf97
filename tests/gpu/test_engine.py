"""Whole steps of several ranks on an emulated GPU: what the CPU computes, without a wait."""

from __future__ import annotations

import math
import random
import sys

import numpy as np
import pytest

from horovod_fftcomp import RECIPES, PayloadError, get_scheme
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.device_selftest import TRANSFORMED, probe, trusted
from horovod_fftcomp.engine.drive import drive, exchange_of
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels import cuda
from horovod_fftcomp.schemes import MEASURE_EVERY, Round, Tensor
from horovod_fftcomp.schemes.auto import TRIAL_STEPS
from horovod_fftcomp.schemes.parts import node_plan
from horovod_fftcomp.simulation import exchange_once
from tests.contracts import HOST_ONLY, STEPS
from tests.gpu.emulator import DeviceArray, Emulator
from tests.gpu.steps import (
    TENSORS,
    assert_same_account,
    assert_same_step,
    make_engines,
    random_grads,
    run_step,
)

pytestmark = pytest.mark.sampled

# Of the cases of ``STEPS`` those of the host.
ON_HOST = (
    ("scalecom", {"density": 0.05, "selector": "exact"}),
    ("dgc", {"density": 1.0}),  # in 32 bits it travels as it is
)


@pytest.mark.parametrize(("recipe", "options", "tolerance"), STEPS)
def test_steps_are_the_cpus(recipe, options, tolerance):
    cpu, gpu = make_engines(None, recipe, **options), make_engines(Emulator(), recipe, **options)
    rng = np.random.default_rng(0)
    for step in range(6):
        grads = random_grads(rng)
        if step == 2:
            grads[1][0][1][5] = np.nan
        if step == 3:
            grads[0][0][1] = grads[1][0][1] = None
        assert_same_step(cpu, gpu, grads, tolerance)
        is_warmup = step < options.get("warmup_steps", 0)
        on_host = (recipe, options) in ON_HOST or (recipe in HOST_ONLY and not is_warmup)
        assert all(engine.computes_on_device(0) != on_host for engine in gpu)
    assert_same_account(cpu, gpu, 1, tolerance)


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
        ("arctopk", {"density": 0.2, "block": 32}, 0),
        ("sketchsgd", {"momentum": 0.0}, 0),
        ("fft", {}, 2e-6),
    ],
)
@pytest.mark.parametrize(("n_ranks", "ranks_per_node"), [(4, 2), (3, 4)])
def test_between_nodes_steps_are_the_cpus(recipe, options, tolerance, n_ranks, ranks_per_node):
    options = {**options, "ranks_per_node": ranks_per_node}
    cpu, gpu = (make_engines(on, recipe, n_ranks, **options) for on in (None, Emulator()))
    rng = np.random.default_rng(17)
    for step in range(6):
        grads = random_grads(rng, n_ranks)
        if step in (2, 4):
            grads[step // 2][0][1][5] = np.nan
        if step == 3:
            grads[0][0][1] = grads[1][0][1] = None
        assert_same_step(cpu, gpu, grads, tolerance)
    assert all(engine.computes_on_device(0) != (recipe in HOST_ONLY) for engine in gpu)
    assert_same_account(cpu, gpu, 2, tolerance)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("recipe", ["powersgd", "topk", "scalecom", "adacomp"])
def test_the_first_step_may_be_bad(recipe, ranks_per_node):
    """Then a state that does not exist is restored, which is not zeros of each kind."""
    options = {"ranks_per_node": ranks_per_node} if ranks_per_node > 1 else {}
    cpu, gpu = (make_engines(on, recipe, 4, **options) for on in (None, Emulator()))
    rng = np.random.default_rng(20)
    for step in range(5):
        grads = random_grads(rng, 4)
        if step < 2:
            grads[1][step][0][5] = np.inf
        assert_same_step(cpu, gpu, grads)
    assert_same_account(cpu, gpu, 2)


@pytest.mark.parametrize("exchange", ["gather", "sharded"])
@pytest.mark.parametrize("recipe", ["hard_threshold", "strom"])
def test_residuals_of_a_step_that_sends_all_are_filtered_as_on_the_cpu(recipe, exchange):
    options = {"threshold": 1.5, "beta": 0.25, "exchange": exchange}
    cpu, gpu = make_engines(None, recipe, **options), make_engines(Emulator(), recipe, **options)
    rng = np.random.default_rng(21)
    for step in range(4):
        grads = random_grads(rng)
        if step == 2:
            for grad in (grad for rank in grads for bucket in rank for grad in bucket):
                grad += np.float32(1000) * np.sign(grad)
        assert_same_step(cpu, gpu, grads)
        for tensor in TENSORS:
            residuals = [engines[0].residual(tensor.name) for engines in (cpu, gpu)]
            np.testing.assert_array_equal(*residuals)
            assert residuals[0].any()


@pytest.mark.parametrize("bad", [False, True])
def test_what_belonged_to_other_nodes_arrives_when_a_step_counts(bad):
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
        states = [engine.state_dict()["state"]["residual"] for engine in new]
        for rank, state in enumerate(states):  # of its own parts alone
            plans = [node_plan(tensors, 2) for tensors in (TENSORS[:2], TENSORS[2:])]
            own = {t.name for plan in plans for t in plan.shares[rank % 2].tensors}
            assert set(state) == own
        found.append((sums, [{n: a.tobytes() for n, a in state.items()} for state in states]))
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
        assert_same_step(cpu, gpu, grads)
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.costs.similarity == theirs.costs.similarity
        assert (ours.costs.similarity is None) == (ranks == 1)


@pytest.mark.parametrize("warmup_steps", [0, 4])
def test_zeros_have_the_signs_of_the_cpus(warmup_steps):
    """Without momentum a gradient of -0 after one below 0 makes a velocity of -0."""
    options = {"density": 0.05, "momentum": 0.0, "bits": 32, "warmup_steps": warmup_steps}
    cpu, gpu = (make_engines(on, "dgc", **options) for on in (None, Emulator()))
    grads = random_grads(np.random.default_rng(22))
    assert_same_step(cpu, gpu, grads)
    for of_rank in grads:
        of_rank[0][0][:] = -0.0
    assert_same_step(cpu, gpu, grads)
    assert_same_account(cpu, gpu, 0)


def test_a_device_is_asked_about_warm_ups_of_recipes_that_it_computes():
    def names(**options):
        bucket, device = Bucket(TENSORS, make_policy("dgc", warmup_steps=9, **options)), Asked()
        return None if trusted(lambda: device, "a GPU", [bucket]) is None else device.names

    assert {"accumulate", "add_residual", "clip_factors"} <= names(density=0.05, max_norm=1.0)
    assert names(density=1.0) is None


def test_a_variable_keeps_a_device_from_being_asked(monkeypatch):
    bucket, device = Bucket(TENSORS, make_policy("topk")), Asked()
    assert trusted(lambda: device, "a GPU", [bucket]) is device
    monkeypatch.setenv("HOROVOD_FFTCOMP_GPU", "0")
    assert trusted(lambda: pytest.fail("asked"), "a GPU", [bucket]) is None
    monkeypatch.delenv("HOROVOD_FFTCOMP_GPU")
    with pytest.warns(RuntimeWarning, match=r"pip install .*HOROVOD_FFTCOMP_GPU=0"):
        assert trusted(lambda: {}["no driver"], "a GPU", [bucket]) is None


@pytest.mark.parametrize("recipe", sorted(HOST_ONLY))
def test_a_recipe_that_the_host_computes_asks_for_no_device(recipe):
    bucket = Bucket(TENSORS, make_policy(recipe, warmup_steps=9))
    assert trusted(lambda: pytest.fail("asked"), "a GPU", [bucket]) is None


def test_sums_may_be_taken_from_the_engine():
    [engine] = make_engines(Emulator(), "topk", 1, density=1.0, bits=32)
    [grads] = random_grads(np.random.default_rng(23), 1)
    exchange_once([engine], [grads], random.Random(0))
    for bucket in (0, 1):
        for total, grad in zip(engine.sums(bucket), grads[bucket], strict=True):
            assert total.tobytes() == grad.tobytes()
        engine.sums(bucket).clear()
    engine.settle()
    assert engine.step == 1


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
        # A fitted grid begins at a coefficient, of which the last bits may differ.
        assert_same_step(cpu, gpu, grads, TRANSFORMED)
        in_trial = step % options["every"] < TRIAL_STEPS
        for engine in gpu:
            for arrays in (engine.state[0]["residual"], engine.state[1]["residual"]):
                assert all(isinstance(a, DeviceArray) != in_trial for a in arrays.values())
    for ours, theirs in zip(gpu, cpu, strict=True):
        ours.read_device()
        assert ours.choices() == theirs.choices()
        assert {choice.words.split("(")[0] for choice in ours.choices().values()} > {"Identity"}
        assert ours.costs.skipped_steps == theirs.costs.skipped_steps == 1
        assert ours.costs.sent_nbytes == theirs.costs.sent_nbytes
        saved, wanted = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert {k: {*arrays} for k, arrays in saved.items()} == {k: {*a} for k, a in wanted.items()}
        for kind in ("choice", "share", "errors"):
            for name, array in wanted[kind].items():
                assert saved[kind][name].tobytes() == array.tobytes()


@pytest.mark.parametrize("recipe", RECIPES)
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
            rounds = [e.resume(bucket, g[bucket]) for e, g in zip(engines, grads, strict=True)]
            while isinstance(rounds[0], Round):
                data = [round_.data for round_ in rounds]
                gathers = rounds[0].collective == "allgather"
                output = np.concatenate(data) if gathers else data[0] + data[1]
                received += (copies := [device.upload(output) for _ in engines])
                rounds = [e.resume(bucket, c) for e, c in zip(engines, copies, strict=True)]
        sums = [np.array(total) for bucket in (0, 1) for total in engines[0].sums(bucket)]
        for ours, theirs in zip(sums, wanted, strict=True):
            assert ours.tobytes() == theirs.tobytes()
        for array in received:
            array.view(np.uint8).fill(0xFF)
        for engine in engines:
            engine.settle()
    engines[0].read_device()
    assert engines[0].costs.skipped_steps == 0


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("topk", {"density": 0.12, "bits": 6}),
        ("fft", {}),
        ("scalecom", {}),
        ("random_k", {}),
        ("onebit", {}),
        ("qsgd", {}),
        ("dgc", {"density": 0.05, "max_norm": 1.0}),
        ("dgc", {"density": 0.05, "max_norm": 1.0, "warmup_steps": 99}),
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
            drive(exchange_of(engine, bucket, grads[bucket]), lambda round_: round_.data)
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
        ("dgc", {"density": 0.05, "max_norm": 1.0, "warmup_steps": 5}, 0),
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


@pytest.mark.parametrize(("recipe", "options"), [("signsgd", {}), ("demo", {"sign": True})])
def test_signs_are_multiplied_by_the_loss_scale(recipe, options):
    grads = random_grads(np.random.default_rng(6))
    scaled = [[[g * np.float32(256) for g in bucket] for bucket in own] for own in grads]
    found = []
    for device, scale, given in ((Emulator(), 256.0, scaled), (None, 1.0, grads)):
        engines = make_engines(device, recipe, **options)
        for engine in engines:
            engine.follow_loss_scale(scale)
        found.append(run_step(engines, given))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, 256 * theirs)


class Asked(Emulator):
    """Notes which kernels are used."""

    names: frozenset = frozenset()

    def functions(self, source, names):
        self.names |= set(names)
        return super().functions(source, names)


@pytest.mark.more
def test_the_probe_finds_a_device_that_computes_wrong():
    schemes = [get_scheme(recipe) for recipe in RECIPES if recipe not in ("none", *HOST_ONLY)]
    device = Asked()
    probe(device, schemes)
    assert device.names <= set(cuda.NAMES)

    class Wrong(Emulator):
        def functions(self, source, names):
            found = super().functions(source, names)
            left_out = ["narrow<1, 1>", "narrow<2, 1>"]
            left_out += "choose<0> choose<1> choose<2> sum_raw take_shares".split()
            left_out += "write_signs write_levels write_coded write_halves orthonormalize".split()
            return found | {n: lambda *arguments: None for n in left_out if n in found}

    class Mute(Emulator):
        """Leaves one kernel out."""

        def __init__(self, name):
            super().__init__()
            self.name = name

        def functions(self, source, names):
            return super().functions(source, names) | {self.name: lambda *arguments: None}

    for scheme in schemes:  # the host reads lists itself
        with pytest.raises((UnsupportedError, PayloadError), match=r"a sum with|bits set below"):
            probe(Wrong(), [scheme])
    for name, recipe in (
        *(("majority_sign", "signsgd"), ("majority_sign", "signum")),
        *(("keep_factors", "powersgd"), ("subtract_products", "powersgd")),
    ):
        with pytest.raises(UnsupportedError, match="a sum with values"):
            probe(Mute(name), [get_scheme(recipe)])
    with pytest.raises(UnsupportedError, match="a sum with values"):
        probe(Mute("orthonormalize"), [get_scheme("powersgd", rank=128)])
    probe(Emulator(), [get_scheme("demo", sign=True)])
