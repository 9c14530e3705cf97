"""Ranks that differ are told apart by the same message on every rank."""

from __future__ import annotations

import json

import numpy as np
import pytest

from horovod_fftcomp import ConfigMismatchError, wire
from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.engine.policy import make_policy
from horovod_fftcomp.recipes import RECIPES, get_scheme


def test_equal_facts_pass():
    message = handshake.pack({"recipe": "fft", "buckets": 3})
    assert message.nbytes == handshake.MESSAGE_NBYTES
    handshake.compare(np.concatenate([message] * 4))


def test_differences_are_named_with_their_ranks():
    same = handshake.pack({"recipe": "fft", "options": "density=0.15", "buckets": 3})
    other = handshake.pack({"recipe": "fft", "options": "density=0.1"})
    with pytest.raises(ConfigMismatchError) as caught:
        handshake.compare(np.concatenate([same, same, other]))
    assert "options is density=0.15 on ranks 0, 1 but density=0.1 on rank 2" in str(caught.value)
    assert "buckets is 3 on ranks 0, 1 but absent on rank 2" in str(caught.value)
    assert "recipe" not in str(caught.value)


def test_many_ranks_are_not_all_listed():
    messages = [handshake.pack({"seed": rank % 2}) for rank in range(64)]
    with pytest.raises(ConfigMismatchError, match="0, 2, 4, 6, 8, 10, 12, 14 and more"):
        handshake.compare(np.concatenate(messages))


def test_long_facts_are_cut_and_still_compared():
    messages = [handshake.pack({"options": "x" * 3000 + end}) for end in ("a", "b")]
    with pytest.raises(ConfigMismatchError, match=r"options is xxx.*hash"):
        handshake.compare(np.concatenate(messages))
    with pytest.raises(ValueError, match=r"take .* bytes"):
        handshake.pack({str(i): "x" * 100 for i in range(50)})


def _difference(*policies):
    with pytest.raises(ConfigMismatchError) as caught:
        handshake.compare(np.concatenate([handshake.pack(policy.facts()) for policy in policies]))
    return str(caught.value).partition("differently: ")[2].partition(". Start every rank")[0]


def test_options_that_differ_are_named_alone_defaults_included():
    assert _difference(make_policy("fft"), make_policy("fft", density=0.2)) == (
        "density is 0.33 on rank 0 but 0.2 on rank 1"
    )
    two = make_policy("topk", bits=8, error_feedback=False), make_policy("topk", bits=4)
    assert _difference(*two) == (
        "bits is 8 on rank 0 but 4 on rank 1; error_feedback is False on rank 0 but True on rank 1"
    )
    nodes = make_policy("topk"), make_policy("topk", ranks_per_node=4, warmup_steps=5)
    assert _difference(*nodes) == (
        "warmup_steps is 0 on rank 0 but 5 on rank 1; ranks_per_node is 1 on rank 0 but 4 on rank 1"
    )


def test_of_other_recipes_no_options_are_listed_that_one_of_them_lacks():
    powersgd = make_policy("powersgd", rank=8)
    assert _difference(make_policy("fft"), powersgd) == (
        "recipe is fft on rank 0 but powersgd on rank 1"
    )


def test_a_schedule_is_named_by_what_was_given():
    scheduled = make_policy("topk", density_schedule={0: 0.5, 9: 0.1})
    text = _difference(scheduled, make_policy("topk", density=0.5))
    assert "density_schedule is Steps(densities=((0, 0.5), (9, 0.1))) on rank 0" in text
    # The same density, however it came about.
    changed = make_policy("topk").with_density(0.5)
    assert changed.facts() == make_policy("topk", density=0.5).facts()


@pytest.mark.parametrize("name", RECIPES)
def test_the_facts_of_a_policy_leave_room_in_the_message(name):
    options = {"density_schedule": {step: 0.1 for step in range(100)}}
    options = options if "density" in RECIPES[name].options else {}
    if not get_scheme(name).traits.sends_signs:
        options["warmup_steps"] = 10**6
    facts = make_policy(name, **options).facts()
    assert json.loads(json.dumps(facts)) == facts
    left = handshake.MESSAGE_NBYTES - len(handshake.pack(facts).tobytes().rstrip())
    assert left >= 1400


class _Set:
    """Process set of two ranks."""

    ranks = (0, 1)
    process_set_id = 0


def test_ranks_of_two_wire_versions_are_told_so(monkeypatch):
    messages, started, now = [], [], wire.VERSION

    def send(made, name, process_set):
        messages.append(made.data)
        return _Gathered(messages)

    for version in (now, now - 1):
        monkeypatch.setattr(wire, "VERSION", version)
        started.append(handshake.Handshake(send, {"recipe": "fft"}, "name", _Set(), None))
    for one in started:
        told = f"wire format is {now} on rank 0 but {now - 1} on rank 1"
        with pytest.raises(ConfigMismatchError, match=told):
            one.compare(1.0)


class _Gathered:
    """Allgather of what has been sent by the time that it is waited for."""

    def __init__(self, messages):
        self._messages = messages

    def wait(self, timeout_s):
        return np.concatenate(self._messages)


def _told(*counts):
    return handshake.differing_numbers([{"made": made, "number": n} for made, n in counts])


def test_different_numbers_of_compressors_are_named_with_their_ranks():
    assert _told((1, 0), (2, 1), (1, 0)) == (
        "the ranks made different numbers of compressors: ranks 0, 2 made 1 and use number 0, but "
        "rank 1 made 2 and uses number 1, counted from 0. Compressors of different numbers never "
        "exchange anything. Make the same compressors in the same order on every rank, those that "
        "are not used included."
    )


@pytest.mark.parametrize(
    "counts",
    [
        [(1, 0), (1, 0)],
        [(1, 0), (2, 0)],  # the second one is not used
        [(2, 0), (2, 1)],  # hooks of two optimizers in another order
    ],
)
def test_numbers_that_may_still_meet_are_no_difference(counts):
    assert _told(*counts) == ""
