"""gTop-k: which places a tree of merges chooses, and that nothing is lost on its way."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_codec, get_scheme, simulate
from horovod_fftcomp.schemes import Context, Tensor
from horovod_fftcomp.schemes.gtopk import Entries, merge, merge_all
from horovod_fftcomp.wire.header import align


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def largest(values, k):
    order = np.lexsort((np.arange(values.size), -np.abs(values)))[:k]
    return np.sort(order)


def by_the_definition(wholes, k):
    """Return the places that a tree of merges of dense arrays with k elements each chooses."""
    lists = [np.where(np.isin(np.arange(w.size), largest(w, k)), w, np.float32(0)) for w in wholes]
    places = [set(largest(whole, k)) for whole in wholes]
    while len(lists) > 1:
        merged, merged_places = [], []
        for i in range(0, len(lists), 2):
            total, union = sum(lists[i : i + 2]), sorted(set().union(*places[i : i + 2]))
            keep = [union[j] for j in largest(total[union], k)]
            merged.append(np.where(np.isin(np.arange(total.size), keep), total, np.float32(0)))
            merged_places.append(set(keep))
        lists, places = merged, merged_places
    return sorted(places[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_places_are_those_of_the_definition(ranks):
    gradients = normal(4, ranks, 400)
    residual = np.zeros((ranks, 400), np.float32)
    for step, grads in zip(simulate("gtopk", gradients, density=0.03), gradients, strict=True):
        whole = grads + residual
        places = by_the_definition(list(whole), 12)
        expected = np.zeros(400)
        expected[places] = whole[:, places].astype(np.float64).mean(0)
        np.testing.assert_allclose(step.average, expected, atol=1e-6)
        residual = whole
        residual[:, places] = 0
        assert step.residual.tobytes() == residual.tobytes()


def test_what_a_merge_drops_is_not_lost():
    """k = 1, 4 ranks: the 3 is dropped for the 4, which the 5 at the same place as the 3 beats."""
    gradients = np.zeros((1, 4, 300), np.float32)
    gradients[0, :, :3] = [[3, 0, 0], [0, 4, 0], [5, 0, 0], [0, 0, 1]]
    [step] = simulate("gtopk", gradients, density=1 / 300)
    assert (4 * step.average[:3]).tolist() == [8, 0, 0]  # 3 and 5; the paper's tree sums 5 alone
    assert step.residual[:, :3].tolist() == [[0, 0, 0], [0, 4, 0], [0, 0, 0], [0, 0, 1]]
    assert not step.residual[:, 3:].any()


def test_one_rank_is_topk():
    gradients = normal(5, 1, 2000)
    for ours, topk in zip(
        simulate("gtopk", gradients, density=0.02),
        simulate("topk", gradients, density=0.02, bits=32),
        strict=True,
    ):
        assert ours.average.tobytes() == topk.average.tobytes()
        assert ours.residual.tobytes() == topk.residual.tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_exactly_k_elements_arrive(ranks):
    gradients = normal(3, ranks, 5000)
    for step in simulate("gtopk", gradients, density=0.01):
        assert np.count_nonzero(step.average) == 50
        assert step.sent_bytes == [get_scheme("gtopk").sent_nbytes(Tensor("w", (5000,)))] * ranks


def test_ties_are_won_by_the_lower_place():
    a = Entries(np.array([1, 5, 9]), np.array([2, -2, 1], np.float32))
    b = Entries(np.array([0, 5, 7]), np.array([-2, 4, 2], np.float32))
    found = merge(a, b, 3)
    assert found.places.tolist() == [0, 1, 5]
    assert found.values.tolist() == [-2, 2, 2]
    assert merge_all([a], 3) == a


@pytest.mark.parametrize("n", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_fewer_elements_than_k_travel_whole(n, ranks):
    gradients = normal(2, ranks, n)
    for step, grads in zip(simulate("gtopk", gradients, density=1.0), gradients, strict=True):
        np.testing.assert_allclose(step.average, grads.mean(0), atol=1e-6)
        assert not step.residual.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_a_bad_value_on_any_rank_makes_the_step_vanish(bad, bad_rank):
    gradients = normal(4, 3, 1500)
    gradients[2, bad_rank, 1234] = bad
    steps = list(simulate("gtopk", gradients))
    assert np.isnan(steps[2].average).all()
    assert steps[2].residual.tobytes() == steps[1].residual.tobytes()
    assert np.isfinite(steps[3].average).all()


def test_lists_that_cannot_be_are_refused():
    tensor = Tensor("w", (1003,))

    def started():
        exchange = get_scheme("gtopk").exchange([tensor], [normal(1003)], {}, Context(1, 0, 2))
        return exchange, next(exchange).data

    exchange, message = started()
    damaged = message.copy()
    damaged[get_scheme("gtopk").codec.payload_nbytes((1003,)) - 1] = 0x7E  # a huge value
    with pytest.raises(PayloadError, match="beyond the scale"):
        exchange.send(np.concatenate([message, damaged]))
    exchange, message = started()
    with pytest.raises(PayloadError, match="1 lists"):
        exchange.send(message)


def test_a_list_is_a_payload_of_topk():
    grad = normal(1000)
    exchange = get_scheme("gtopk", density=0.003).exchange(
        [Tensor("w", (1000,))], [grad], {}, Context(1, 0, 1)
    )
    payload = get_codec("topk", density=0.003, bits=32).encode(grad)
    message = next(exchange).data
    assert message[: payload.size].tobytes() == payload.tobytes()
    assert message.size == align(payload.size)
