"""ScaleCom: who leads, what is chosen, what travels, what the low-pass filter leaves."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_scheme, simulate
from horovod_fftcomp.kernels.index_plan import ChunkSlices
from horovod_fftcomp.schemes import Context, Tensor
from horovod_fftcomp.schemes.clt_selection import ChunkWinners, Largest
from tests.loops import each

SELECTORS = ("chunk", "exact")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_chunks(x, chunk):
    """Return the positions of the largest of each chunk, with plain NumPy."""
    return [b + np.abs(x[b : b + chunk]).argmax() for b in range(0, x.size, chunk)]


def by_leaders(due, chunk, step):
    """Return the positions that ``due`` of all ranks leads to: each rank's in its part."""
    ranks, n = due.shape
    n_chunks = -(-n // chunk)
    own = [by_chunks(each, chunk) for each in due]
    part = -(-n_chunks // ranks)
    return [own[(c // part - step) % ranks][c] for c in range(n_chunks)]


def by_size(x, k):
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k]).tolist()


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_one_rank_that_chooses_exactly_is_topk(density):
    gradients = normal(6, 1, 5003)
    ours = simulate("scalecom", gradients, density=density, selector="exact", beta=1.0)
    for step, topk in zip(ours, simulate("topk", gradients, density=density, bits=32), strict=True):
        assert step.average.tobytes() == topk.average.tobytes()
        assert step.residual.tobytes() == topk.residual.tobytes()


@each("selector", SELECTORS)
@each("beta", [1.0, 0.1])
@each("ranks", [1, 2, 3, 5])
def test_every_step_is_that_of_the_formulas(selector, beta, ranks):
    """A float64 model of the whole method, from the definition."""
    gradients, n, density = normal(12, ranks, 1003), 1003, 0.02
    memory = np.zeros((ranks, n))
    steps = simulate("scalecom", gradients, density=density, beta=beta, selector=selector)
    for number, (grads, step) in enumerate(zip(gradients, steps, strict=True)):
        due = memory + grads
        leader = due[number % ranks].astype(np.float32)
        chosen = by_leaders(due, 50, number) if selector == "chunk" else by_size(leader, 20)
        expected = np.zeros(n)
        expected[chosen] = due[:, chosen].mean(0)
        np.testing.assert_allclose(step.average, expected, atol=1e-5)
        assert set(np.flatnonzero(step.average)) <= set(chosen)
        sent = np.zeros_like(due)
        sent[:, chosen] = due[:, chosen]
        memory = (1 - beta) * memory + beta * (due - sent)
        np.testing.assert_allclose(step.residual, memory, atol=1e-5)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("beta", [1.0, 0.3, 0.1])
def test_residual_is_beta_times_what_was_not_sent(selector, bits, beta):
    gradients = normal(30, 4, 2000)
    options = {"density": 0.02, "beta": beta, "bits": bits, "selector": selector}
    sent = np.zeros(2000)
    for step in simulate("scalecom", gradients, **options):
        sent += 4 * step.average.astype(np.float64)
    owed = beta * (gradients.astype(np.float64).sum((0, 1)) - sent)
    tolerance = 1e-4 if bits == 32 else 0.05  # what float16 rounds off in the sum is lost
    np.testing.assert_allclose(step.residual.astype(np.float64).sum(0), owed, atol=tolerance)


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_a_constant_gradient_arrives_whole_in_the_long_run(beta):
    """After sending, residual (1 - beta)(T - 1) c is left where each T-th step sends."""
    gradient = np.ones((1, 8), np.float32)
    steps = list(simulate("scalecom", (gradient for _ in range(400)), density=1 / 8, beta=beta))
    mean = sum(step.average.astype(np.float64) for step in steps[-160:]) / 160
    np.testing.assert_allclose(mean, 1, rtol=0.02)
    sent_last = steps[-1].average != 0
    np.testing.assert_allclose(steps[-1].residual[0, sent_last], (1 - beta) * 7, rtol=1e-3)


@pytest.mark.parametrize("selector", SELECTORS)
def test_equal_gradients_arrive_as_of_one_rank(selector):
    gradients = np.repeat(normal(3, 1, 999), 4, axis=1)
    options = {"density": 0.05, "selector": selector}
    for four, one in zip(
        simulate("scalecom", gradients, **options),
        simulate("scalecom", gradients[:, :1], **options),
        strict=True,
    ):
        np.testing.assert_allclose(four.average, one.average, rtol=1e-6)


@pytest.mark.parametrize("selector", SELECTORS)
def test_bytes_stay_where_those_of_topk_grow(selector):
    received, gathered = [], []
    most = get_scheme("scalecom", density=0.01, selector=selector).sent_nbytes(
        Tensor("gradient", (20_000,))
    )
    for ranks in (2, 8, 64):
        gradients = normal(2, ranks, 20_000)
        *_, ours = simulate("scalecom", gradients, density=0.01, selector=selector)
        *_, topk = simulate("topk", gradients, density=0.01)
        positions = 175 / ranks if selector == "chunk" else most - 800  # 200 times 7 bits
        assert {min(ours.sent_bytes)} == set(ours.sent_bytes)
        assert 0 <= ours.sent_bytes[0] - (800 + positions) < 4  # whole words
        received.append({nbytes - (4 * ranks) * (selector == "chunk")
                         for nbytes in ours.received_bytes})  # fmt: skip
        gathered.append(topk.received_bytes[0] / (ranks - 1))
    assert all(of_ranks <= set(range(most + 1)) for of_ranks in received)
    assert len(set(gathered)) == 1


@pytest.mark.parametrize(
    ("density", "chunk", "nbytes"), [(1.0, 1, 0), (0.5, 2, 63), (0.01, 100, 10), (1 / 256, 256, 4)]
)
def test_positions_take_the_bits_of_an_offset(density, chunk, nbytes):
    selector = ChunkWinners(density)
    assert selector.chunk == chunk
    assert selector.nbytes(1003) == nbytes
    assert selector.count(1003) == -(-1003 // chunk)


@each("ranks", [1, 2, 3, 7, 64])
@each("total", [0, 1, 6, 7, 8, 100, 129])
def test_each_chunk_has_one_leader_and_each_rank_its_turn(total, ranks):
    led = []
    for step in range(ranks):
        lead = ChunkSlices(max(1, -(-total // ranks)), step, ranks)
        parts = [range(*lead.chunks_of(rank, total)) for rank in range(ranks)]
        assert sorted(chunk for part in parts for chunk in part) == list(range(total))
        assert max(map(len, parts)) <= lead.size
        for rank, part in enumerate(parts):
            assert {lead.leader_of(chunk) for chunk in part} <= {rank}
        led.append([lead.leader_of(chunk) for chunk in range(total)])
    assert all(sorted(leaders) == list(range(ranks)) for leaders in zip(*led, strict=True))


@each("selector", [Largest(0.01), Largest(0.4), Largest(1)])
@each("n", [0, 1, 99, 100, 101, 9973])
def test_positions_that_are_chosen_arrive(selector, n):
    x, residual = normal(n), normal(n, seed=1)
    packed = selector.choose(x, residual)
    assert packed.size == selector.nbytes(n)
    positions = selector.positions(packed, n)
    assert positions.tolist() == by_size(x + residual, selector.count(n))


@pytest.mark.parametrize("selector", [Largest(0.01), Largest(0.4)])
def test_positions_that_cannot_be_are_refused(selector):
    packed = np.full(selector.nbytes(1003), 0xFF, np.uint8)
    with pytest.raises(ValueError, match="does not have"):
        selector.positions(packed, 1003)
    exchange = get_scheme("scalecom", density=selector.density, selector="exact").exchange(
        [Tensor("w", (1003,))], [normal(1003)], {}, Context(4, 0, 3)
    )
    message = next(exchange).data
    with pytest.raises(PayloadError, match="'w': rank 1's positions"):
        exchange.send(np.full(message.size, 0xFF, np.uint8))


def test_offsets_that_cannot_be_are_refused():
    def started():
        tensors = [Tensor("v", (500,)), Tensor("w", (1003,))]
        scheme = get_scheme("scalecom", density=0.01)
        exchange = scheme.exchange(tensors, [normal(500), normal(1003)], {}, Context(4, 0, 3))
        return exchange, np.tile(next(exchange).data, 3)

    exchange, gathered = started()  # 16 chunks: rank 2 leads in 6, rank 0 in 6, rank 1 in 4
    gathered[20:22] |= np.array([0xF8, 0xFF], np.uint8)  # of rank 2, in its sixth chunk
    with pytest.raises(PayloadError, match="'w': rank 2's positions: an offset lies beyond"):
        exchange.send(gathered)
    exchange, gathered = started()  # the last chunk has 3 elements, and is the fourth of rank 1
    gathered[10:12] = [0b1100000, 0]
    with pytest.raises(PayloadError, match="'w': rank 1's positions: an offset lies beyond"):
        exchange.send(gathered)
    exchange, gathered = started()
    with pytest.raises(PayloadError, match="16 bytes of positions"):
        exchange.send(gathered[:-8])


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize(("ranks", "n"), [(2, 50), (5, 150), (9, 350), (2, 0)])
def test_more_ranks_than_chunks(selector, ranks, n):
    """A rank may lead in nothing, or in everything: then there is no choice to be similar to."""
    gradients = normal(3, ranks, n)
    for step, grads in zip(
        simulate("scalecom", gradients, density=0.01, beta=1.0, selector=selector),
        gradients,
        strict=True,
    ):
        if selector == "chunk":
            assert np.count_nonzero(step.average) == -(-n // 100)
        assert step.average.shape == grads.shape[1:]


@each("selector", SELECTORS)
@each("bits", [16, 32])
@each("bad_rank", [0, 1, 2])
@each("bad", [np.nan, np.inf])
def test_a_bad_value_on_any_rank_makes_the_step_vanish(selector, bits, bad_rank, bad):
    gradients = normal(7, 3, 1500)
    gradients[4, bad_rank, 1499] = bad  # rank 1 leads
    options = {"density": 0.01, "selector": selector, "bits": bits}
    steps = list(simulate("scalecom", gradients, **options))
    assert np.isnan(steps[4].average).all()
    assert steps[4].residual.tobytes() == steps[3].residual.tobytes()
    assert np.isfinite(steps[5].average).all()


def test_float16_values_saturate_and_the_rest_is_carried_on():
    gradients = np.full((2, 4, 100), 1e5, np.float32)
    first, second = simulate("scalecom", gradients, density=1.0, bits=16, beta=1.0)
    np.testing.assert_array_equal(first.average, np.float32(16376))
    np.testing.assert_array_equal(first.residual, np.float32(1e5 - 16376))
    np.testing.assert_array_equal(second.residual, np.float32(2 * (1e5 - 16376)))


@pytest.mark.parametrize("selector", SELECTORS)
def test_similarity_is_the_share_of_positions_preferred_alike(selector):
    def followed(leader_grad, own_grad):
        scheme = get_scheme("scalecom", density=0.05, selector=selector)
        tensor = Tensor("w", (2000,))
        led = scheme.exchange([tensor], [leader_grad], {}, Context(0, 0, 2))
        own = scheme.exchange([tensor], [own_grad], {}, Context(0, 1, 2))
        chosen, mine = next(led).data, next(own).data
        if selector == "chunk":
            chosen = np.concatenate([chosen, mine])
        values = own.send(chosen).data
        with pytest.raises(StopIteration) as stopped:
            own.send(values)
        return stopped.value.value.measured().similarity

    x, other = normal(2000), normal(2000, seed=9)
    led = 50 if selector == "chunk" else 100
    assert followed(x, x) == (led, led)
    assert followed(x, other).common < led / 5
    halves = np.where(np.arange(2000) // 100 % 2, x, other)
    assert 0.4 * led <= followed(x, halves).common <= 0.65 * led


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector": "best"}, "selector must be one of chunk, exact"),
        ({"beta": 0}, r"beta must lie in \(0, 1\]"),
        ({"beta": 1.5}, r"beta must lie in \(0, 1\]"),
        ({"bits": 8}, "bits must be 16 or 32"),
        ({"density": 1e-6}, 'give selector="exact"'),
        ({"density": 0}, "density must lie in"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        get_scheme("scalecom", **options)
    with pytest.raises(TypeError, match="beta must"):
        get_scheme("scalecom", beta="1")
