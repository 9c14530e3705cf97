"""An emulated GPU that computes wrongly is found out, one that does not is left alone."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from horovod_fftcomp import RECIPES, UnsupportedError, wire
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.engine.shadow_check import ShadowCheck
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.simulation import exchange_once
from tests.contracts import HOST_ONLY
from tests.gpu.emulator import Emulator
from tests.gpu.faults import Fault
from tests.gpu.steps import TENSORS, random_grads

pytestmark = pytest.mark.sampled


def engines_of(recipe, every=1, n_ranks=2, **options):
    """Return engines of emulated GPUs that are checked in every step, each tensor in turn."""
    policy = make_policy(recipe, **options)
    buckets = [Bucket(TENSORS[:2], policy), Bucket(TENSORS[2:], policy)]
    engines = [Engine(buckets, rank, n_ranks, Emulator()) for rank in range(n_ranks)]
    for engine in engines:
        engine.shadow = ShadowCheck(engine, every, None, "test", None, 10.0)
    return engines


def take_step(engines, grads, greetings=0, turns=None):
    """Take a step; return what all ranks hear when they have told each other, without a network.

    ``turns``: where to note the tensor of a check, by its step.
    """
    for engine in engines:
        engine.shadow.begin(greetings)
    if turns is not None and (turn := engines[0].shadow.turn) is not None:
        turns[engines[0].step] = engines[0].buckets[turn.bucket].tensors[turn.position].name
    exchange_once(engines, grads, random.Random(0))
    for engine in engines:
        engine.settle()
        if engine.shadow.turn is not None:
            engine.shadow.begin(greetings)  # as the next step does
    told = [engine.shadow.with_record(np.full(5, 9, np.uint8)) for engine in engines]
    heard = []
    for engine in engines:
        try:
            left = engine.shadow.without_record(np.concatenate(told))
            assert bytes(left) == b"\t" * 5 * len(engines)
            heard.append("")
        except UnsupportedError as error:
            heard.append(str(error))
    assert len(set(heard)) == 1
    return heard[0]


CASES = [
    *((name, {}) for name in RECIPES if name not in ("none", "hard_threshold", *HOST_ONLY)),
    ("hard_threshold", {"density": 0.05, "calibrate_steps": 2}),  # at first of the host, as `auto`
    ("hard_threshold", {"threshold": 1.5, "bits": 6}),
    ("topk", {"density": 0.05, "error_feedback": False}),
    ("topk", {"density": 0.05, "scope": "bucket"}),
    ("topk", {"density": 0.3, "bits": 32}),
    ("fft", {"density": 0.3, "block": 64, "bits": 16}),
    ("fft", {"density": 0.01, "block": 4096, "bits": 3}),
    ("fft", {"density": 0.1, "error_feedback": False}),
    ("dct", {"density": 1.0, "bits": 6}),
    ("fft", {"density": 0.1, "beta": 0.25}),
    ("dct", {"beta": 0.1}),
    ("auto", {"beta": 0.3}),
    ("topk", {"density": 0.05, "beta": 0.25}),
    ("random_k", {"density": 0.3, "exchange": "gather"}),
    ("dgc", {"density": 0.05, "max_norm": 140.0}),
    ("powersgd", {"rank": 12, "error_feedback": False}),
    ("qsgd", {"levels": 5, "bucket": 64, "norm": "l2", "error_feedback": True}),
]


@pytest.mark.parametrize(("recipe", "options"), CASES)
def test_a_gpu_that_computes_rightly_is_left_alone(recipe, options):
    engines = engines_of(recipe, **options)
    rng = np.random.default_rng(3)
    for step in range(7):
        grads = random_grads(rng)
        if step == 2:
            grads[1][0][1][5] = np.nan
        if step == 3:
            grads[0][0][1] = grads[1][0][1] = None
        assert not take_step(engines, grads)
    assert all(engine.shadow.seconds > 0 for engine in engines)


@pytest.mark.parametrize("magnitude", [1e-40, 1e30])
@pytest.mark.parametrize("recipe", ["fft", "dct", "demo", "powersgd", "topk", "fp16"])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_extreme_values_are_no_difference(recipe, magnitude):
    engines, rng = engines_of(recipe), np.random.default_rng(12)
    for _ in range(6):
        grads = random_grads(rng)
        for bucket in (bucket for rank in grads for bucket in rank):
            bucket[:] = [grad * np.float32(magnitude) for grad in bucket]
        assert not take_step(engines, grads)


@pytest.mark.parametrize("where", ["message", "sum", "state"])
@pytest.mark.parametrize(("recipe", "options"), CASES)
def test_a_flipped_bit_is_told_to_all_ranks(recipe, options, where, monkeypatch):
    engines = engines_of(recipe, 1000, **options)
    rng = np.random.default_rng(5)
    for _ in range(4):  # trials are the host's
        assert not take_step(engines, random_grads(rng))
    fault = Fault(engines[1].device, where)
    scheme = engines[0].scheme(0)
    kind = type(getattr(scheme, "scheme", scheme))
    monkeypatch.setattr(kind, "exchange", fault.around(kind.exchange))
    heard = take_step(engines, random_grads(rng), greetings=1)  # the ranks have met again
    if not fault.planted:
        assert where == "state"  # which this recipe has not
        assert not heard
        return
    whose = r"'(a|a' to 'b|bucket from a on)'"
    assert re.search(rf"rank 1, step 4, recipe '{recipe}', tensor {whose}: \w+ ", heard)
    assert re.search(r"\d+ (of|is) .*, the CPU's is |its payload cannot be read: ", heard)
    assert "HOROVOD_FFTCOMP_GPU=0" in heard
    if where == "sum":
        assert "element 7 of its sum is " in heard
    if where == "state":
        # Of a complex residual this is the imaginary part's.
        assert re.search(rf"element (11|22) of its ({'|'.join(fault.planted)}) is ", heard)


@pytest.mark.parametrize("recipe", ["topk", "scalecom"])
def test_a_leader_of_nodes_that_computes_wrongly_is_found_out(recipe, monkeypatch):
    rng = np.random.default_rng(6)
    engines = engines_of(recipe, n_ranks=5, ranks_per_node=2)
    for _ in range(4):
        assert not take_step(engines, random_grads(rng, 5))
    kind = type(engines[0].scheme(0).scheme)
    fault = Fault(None, "sum")
    monkeypatch.setattr(kind, "exchange", fault.around(kind.exchange))
    heard = [take_step(engines, random_grads(rng, 5)) for _ in range(3)]
    assert sum("element 7 of its sum" in text for text in heard) >= 1
    assert fault.planted


def doubled(message, codec):
    """Write twice the scale into a payload's header, which is else as it should be."""
    header = wire.read_header(np.array(message))
    plan = codec.plan(header.shape)
    head, scale = message[: plan.header_nbytes], 2 * header.scale
    wire.write_header(head, plan, header.fingerprint, header.dtype, scale, True, header.grid)


def damaged(message, codec):
    message[20] ^= 1


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (doubled, r"header field 'scale' is [\d.]+, the CPU's is [\d.]+\."),
        (damaged, "a message cannot be read: header field 'checksum' does not"),
    ],
)
@pytest.mark.parametrize("recipe", ["fft", "topk"])
def test_a_wrong_header_field_is_named(recipe, wrong, what, monkeypatch):
    engines, right = engines_of(recipe), Allgather.exchange

    def exchange(scheme, tensors, grads, state, context):
        made = right(scheme, tensors, grads, state, context)
        round_ = next(made)
        if context.device is engines[1].device and tensors[0].name == "a":
            wrong(round_.data, scheme.codec)
        try:
            made.send((yield round_))
        except StopIteration as stop:
            return stop.value

    monkeypatch.setattr(Allgather, "exchange", exchange)
    heard = take_step(engines, random_grads(np.random.default_rng(7)))
    assert re.search(rf"rank 1, step 0, recipe '{recipe}', tensor 'a': {what}", heard)


@pytest.mark.parametrize(
    ("recipe", "options", "expected"),
    [
        ("topk", {}, {0: "a", 4: "b", 8: "c", 12: "a"}),
        ("topk", {"warmup_steps": 6}, {6: "b", 8: "c", 12: "a"}),
        ("auto", {}, {0: "a", 1: "a", 2: "a", 3: "a", 4: "b", 8: "c", 12: "a"}),  # after its trials
        ("topk", {"scope": "model"}, {}),
    ],
)
def test_tensors_take_turns_from_the_first_compressed_step_on(recipe, options, expected):
    engines, rng, turns = engines_of(recipe, 4, **options), np.random.default_rng(8), {}
    for _ in range(13):
        assert not take_step(engines, random_grads(rng), turns=turns)
    assert turns == expected


def test_a_step_that_does_not_count_is_followed_by_another_check():
    engines, rng, turns = engines_of("topk", 1000), np.random.default_rng(9), {}
    bad = random_grads(rng)
    bad[1][0][0][5] = np.inf
    for grads in (bad, random_grads(rng), random_grads(rng)):
        assert not take_step(engines, grads, turns=turns)
    assert turns == {0: "a", 1: "a"}


@pytest.mark.more
def test_a_check_is_not_put_off_for_ever():
    engines, rng, turns = engines_of("topk", 1000), np.random.default_rng(9), {}
    bad = random_grads(rng)
    bad[1][0][0][5] = np.inf
    for _ in range(140):
        assert not take_step(engines, bad, turns=turns)
    assert list(turns) == list(range(129))


def test_ranks_that_meet_again_begin_with_a_check():
    engines, rng, turns = engines_of("topk", 1000), np.random.default_rng(11), {}
    for greetings in (1, 1, 1, 2, 2):
        assert not take_step(engines, random_grads(rng), greetings, turns)
    assert turns == {0: "a", 3: "a"}


def test_a_step_without_a_check_copies_nothing():
    engines, rng = engines_of("topk", 1000), np.random.default_rng(10)
    take_step(engines, random_grads(rng))
    scheme, shadow = engines[0].scheme(0), engines[0].shadow
    shadow.begin(0)
    assert shadow.followed(0, scheme) is scheme


@pytest.mark.parametrize(
    ("steps", "error"), [(-1, ValueError), (True, TypeError), (10.0, TypeError), ("10", TypeError)]
)
def test_other_numbers_of_steps_are_refused(steps, error):
    with pytest.raises(error, match=r"shadow_check must be a whole number"):
        Settings(shadow_check=steps)
