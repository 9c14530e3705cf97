"""SparCML: sums in pairs are Top-k's, on any number of ranks, and turn dense when that is less."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_codec, get_scheme, simulate, wire
from horovod_fftcomp.codec.quantizers import Float32
from horovod_fftcomp.schemes import Context, Tensor
from horovod_fftcomp.schemes.sparcml import SUMS, merge, merge_all
from horovod_fftcomp.types import Body
from horovod_fftcomp.wire.positions import Layout, first_ones
from tests.backends import BACKENDS, load_backend

TENSORS = [Tensor("w", (60, 100)), Tensor("v", (7, 11, 13)), Tensor("none", (0,))]
RANKS = range(1, 9)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def begun(ranks, density=0.05, seed=0, tensors=TENSORS):
    """Return every rank's (exchange, first round)."""
    scheme, found = get_scheme("sparcml", density=density), []
    for rank in range(ranks):
        grads = [normal(math.prod(t.shape), seed=seed + 31 * rank) for t in tensors]
        exchange = scheme.exchange(tensors, grads, {}, Context(1, rank, ranks))
        found.append((exchange, next(exchange)))
    return found


def outcome_of(exchange, arrived):
    with pytest.raises(StopIteration) as stop:
        exchange.send(arrived)
    return stop.value.value


def doubled(rounds):
    """Return each rank's result of recursive doubling, without a network."""
    size = len(rounds)
    pairs, data = 2 ** int(math.log2(size)), [round_.data for round_ in rounds]
    for late in range(pairs, size):
        data[late - pairs] = rounds[late - pairs].merge(data[late - pairs], data[late])
    distance = 1
    while distance < pairs:
        data[:pairs] = [
            rounds[rank].merge(*(data[r] for r in sorted((rank, rank ^ distance))))
            for rank in range(pairs)
        ]
        distance *= 2
    return [data[rank % pairs] for rank in range(size)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("density", [0.01, 0.2, 1.0])
def test_sums_are_those_of_gathered_topk_in_another_order(ranks, density):
    gradients = normal(4, ranks, 3000)
    ours = simulate("sparcml", gradients, density=density)
    topk = simulate("topk", gradients, density=density, bits=32)
    for step, expected in zip(ours, topk, strict=True):
        np.testing.assert_allclose(step.average, expected.average, rtol=0, atol=1e-6)
        assert step.residual.tobytes() == expected.residual.tobytes()
        assert step.sent_bytes == expected.sent_bytes
        if ranks < 3:
            assert step.average.tobytes() == expected.average.tobytes()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("density", [0.02, 0.5])
def test_doubling_and_gathering_end_in_the_same_bits_on_all_ranks(ranks, density):
    started = begun(ranks, density)
    rounds = [round_ for _, round_ in started]
    gathered = np.concatenate([round_.data for round_ in rounds])
    messages = doubled(rounds)
    assert len({message.tobytes() for message in messages}) == 1
    expected = outcome_of(started[0][0], gathered)
    for (exchange, _), message in zip(started[1:], messages[1:], strict=True):
        outcome = outcome_of(exchange, message)
        assert outcome.flags.finite
        for total, same in zip(outcome.sums, expected.sums, strict=True):
            assert total.tobytes() == same.tobytes()


def test_the_tree_is_that_of_recursive_doubling():
    def joined(a, b):
        return f"({a}{b})"

    trees = ["0", "(01)", "((02)1)", "((01)(23))", "(((04)1)(23))", "(((04)(15))(23))"]
    for ranks, tree in enumerate(trees, 1):
        assert merge_all([str(rank) for rank in range(ranks)], joined) == tree


def test_what_is_merged_does_not_depend_on_the_order():
    a, b = (round_ for _, round_ in begun(2))
    assert a.merge(a.data, b.data).tobytes() == b.merge(b.data, a.data).tobytes()


def test_a_union_that_fills_up_turns_dense():
    """Sums of 2 and 4 of the lists stay sparse; of all 8 it is the tensor, though 2 are missing."""
    tensors, wholes = [Tensor("w", (800,))], np.zeros((8, 800), np.float32)
    for rank, whole in enumerate(wholes):
        whole[rank::8] = 1 + normal(100, seed=rank) ** 2
    wholes[7, [6, 14]], wholes[7, [7, 15]] = wholes[7, [7, 15]], 0
    scheme, messages = get_scheme("sparcml", density=0.125), []
    for rank, whole in enumerate(wholes):
        exchange = scheme.exchange(tensors, [whole], {}, Context(1, rank, 8))
        messages.append(next(exchange).data)
    fold = functools.partial(merge, get_codec("topk", density=0.125, bits=32), tensors)
    sizes = []
    while len(messages) > 1:
        messages = [fold(a, b) for a, b in zip(messages[::2], messages[1::2], strict=True)]
        header = wire.read_header(messages[0])
        sizes.append((header.k, Layout(header.layout) is Layout.RAW))
        assert header.payload_nbytes <= 4 * 800 + 64
    assert sizes == [(200, False), (400, False), (800, True)]
    assert decoded(messages[0]).tobytes() == wholes.sum(0).tobytes()
    dense_again = fold(messages[0], messages[0])
    assert decoded(dense_again).tobytes() == (2 * wholes.sum(0)).tobytes()


def test_sums_that_cancel_keep_their_places():
    grad = np.zeros(500, np.float32)
    grad[[3, 77]] = [2.0, -1.0]
    tensors, codec = [Tensor("w", (500,))], get_codec("topk", density=0.004, bits=32)
    message = merge(codec, tensors, *(wire_message(codec, sign * grad) for sign in (1, -1)))
    assert wire.read_header(message).k == 2
    assert decoded(message).tobytes() == bytes(2000)


def decoded(message):
    [(_, payload)] = wire.split_payloads(message)
    return SUMS.decode(payload)


def wire_message(codec, values):
    payload = codec.encode(values)
    return np.pad(payload, (0, wire.align(payload.size) - payload.size))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_bad_value_on_any_rank_makes_the_step_vanish(bad, ranks):
    for bad_rank in range(ranks):
        gradients = normal(4, ranks, 1500)
        gradients[2, bad_rank, 1234] = bad
        steps = list(simulate("sparcml", gradients))
        assert np.isnan(steps[2].average).all()
        assert steps[2].residual.tobytes() == steps[1].residual.tobytes()
        assert np.isfinite(steps[3].average).all()


@pytest.mark.parametrize("density", [0.01, 1.0])
def test_a_sum_beyond_float32_makes_the_step_vanish(density):
    gradients = normal(3, 4, 1500)
    gradients[1, :, 5] = 3e38
    steps = list(simulate("sparcml", gradients, density=density))
    assert np.isnan(steps[1].average).all()
    assert steps[1].residual.tobytes() == steps[0].residual.tobytes()
    assert np.isfinite(steps[2].average).all()


def test_messages_that_cannot_be_are_refused():
    [(_, mine), (exchange, theirs)] = begun(2)
    with pytest.raises(PayloadError, match=r"bytes of payloads arrived, \d+ were expected"):
        exchange.send(theirs.data)
    fold, good = mine.merge, mine.data
    other = begun(1, density=0.2)[0][1].data
    with pytest.raises(PayloadError, match=r"tensor 'w': header field 'fingerprint'"):
        fold(good, other)
    with pytest.raises(PayloadError, match=r"1 payloads arrived, 3 were expected"):
        fold(good, begun(1, tensors=TENSORS[:1])[0][1].data)
    swapped = [TENSORS[1], TENSORS[0], TENSORS[2]]
    with pytest.raises(PayloadError, match=r"tensor 'w': header field 'shape' is \(7, 11, 13\)"):
        fold(good, begun(1, tensors=swapped)[0][1].data)
    with pytest.raises(PayloadError, match=r"cut short|bytes are left"):
        fold(good, good[:-40])
    merged = fold(good, good)
    for message in (good, merged):  # the last positions, the last values of a payload
        header = wire.read_header(message)
        plan = SUMS.plan(TENSORS[0].shape, header.k)
        for end, byte in ((plan.values_offset, 0xFF), (header.payload_nbytes, 0x7F)):
            bad = message.copy()
            bad[end - 12 : end] = byte
            with pytest.raises(PayloadError, match="tensor 'w': "):
                fold(good, bad)


def part_of(values, places, n):
    bitmap = load_backend("reference").bitmap_of(places, n)
    return Body(
        bitmap, values.view(np.uint8), Float32().coding(float(np.abs(values).max(initial=0)))
    )


@pytest.mark.parametrize("n", [1, 64, 65, 1000, 1 << 20])
@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.0, 0.3), (0.01, 0.02), (0.5, 0.9), (1.0, 0.1)])
def test_merged_values_are_those_of_the_definition(n, shares):
    rng, parts, whole = np.random.default_rng(n), [], np.zeros(n)
    for share in shares:
        places = np.flatnonzero(rng.random(n) < share)
        values = rng.standard_normal(places.size).astype(np.float32)
        values[::5] = -0.0
        parts.append(part_of(values, places, n))
        whole[places] += values
    found = [load_backend(name).sum_sparse(*parts).tobytes() for name in BACKENDS]
    assert found[0] == found[1]
    union = load_backend("cpu").positions_of(parts[0].bitmap | parts[1].bitmap)
    assert found[0] == whole[union].astype(np.float32).tobytes()
    backwards = load_backend("cpu").sum_sparse(*parts[::-1])
    assert backwards.tobytes() == found[0]


def test_values_of_whole_tensors_merge_as_well():
    everything = first_ones(130, 130)
    parts = [
        Body(everything, normal(130, seed=s).view(np.uint8), Float32().coding(9)) for s in (1, 2)
    ]
    for name in BACKENDS:
        merged = load_backend(name).sum_sparse(*parts)
        assert merged.tobytes() == (normal(130, seed=1) + normal(130, seed=2)).tobytes()


def test_mutated_messages_are_refused_or_have_a_sum():
    """Whatever stands in a body, no kernel reads or writes beyond its arrays."""
    tensors, codec = [Tensor("w", (40, 9))], get_codec("topk", density=0.1, bits=32)
    good = wire_message(codec, normal(40, 9))
    summed = merge(codec, tensors, good, wire_message(codec, normal(40, 9, seed=1)))
    rng, refused = np.random.default_rng(0), 0
    for number in range(4000):
        bad = (good, summed)[number % 2].copy()
        count = rng.integers(1, 5)
        if number % 3:
            bad[rng.integers(64, bad.size, count)] ^= np.uint8(1 << rng.integers(8))
        else:
            bad[rng.integers(bad.size, size=count)] = rng.integers(256)
        try:
            total = merge(codec, tensors, good, bad)
        except PayloadError:
            refused += 1
            continue
        assert np.isfinite(decoded(total)).all()
    assert 0 < refused < 4000
