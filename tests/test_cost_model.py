"""The time model: formulas at their limits, what hides behind what."""

from __future__ import annotations

import itertools
import math

import pytest

from horovod_fftcomp.tools.advise.cost_model import (
    CYCLE_S,
    Compute,
    Line,
    Message,
    Network,
    Transfer,
    fitted_network,
    given_network,
    speed,
    step_time,
)

ALPHA, BETA, N = 50e-6, 8e-9, 10_000_000
NETWORK = Network(Line(ALPHA, BETA), Line(ALPHA, BETA), overhead_s=0.0)
ENDLESS = Network(Line(0.0, 0.0), Line(0.0, 0.0), overhead_s=0.0)
RANKS = (2, 3, 4, 8, 64, 1024)


@pytest.mark.parametrize("p", RANKS)
def test_collectives_take_what_the_textbook_says(p):
    ring = 2 * (p - 1) * ALPHA + 2 * (p - 1) / p * N * BETA
    assert NETWORK.seconds(Message("allreduce", N), p) == pytest.approx(ring)
    gathered = (p - 1) * ALPHA + (p - 1) * N * BETA
    assert NETWORK.seconds(Message("allgather", N), p) == pytest.approx(gathered)
    divided = (p - 1) * ALPHA + (p - 1) / p * N * BETA
    assert NETWORK.seconds(Message("divided", N), p) == pytest.approx(divided)
    tree = math.ceil(math.log2(p)) * ALPHA + N * BETA
    assert NETWORK.seconds(Message("broadcast", N), p) == pytest.approx(tree)


def test_one_rank_exchanges_nothing_and_others_have_the_overhead():
    network = given_network(1.0, 0.0)
    assert network.seconds(Message("allreduce", N), 1) == 0
    assert network.seconds(Message("allgather", 0), 7) == CYCLE_S
    assert network.seconds(Message("broadcast", 125_000_000), 2) == pytest.approx(1 + CYCLE_S)


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "divided", "broadcast"])
def test_more_bytes_and_more_ranks_never_take_less(collective):
    for p, q in itertools.pairwise(RANKS):
        assert NETWORK.seconds(Message(collective, N), p) <= NETWORK.seconds(
            Message(collective, N), q
        )
        assert NETWORK.seconds(Message(collective, N), p) < NETWORK.seconds(
            Message(collective, N + 1), p
        )


@pytest.mark.parametrize("ratio", [1.6, 5, 16, 79])
def test_gathering_loses_beyond_twice_the_ratio_in_bandwidth(ratio):
    network = Network(Line(0.0, BETA), Line(0.0, BETA), overhead_s=0.0)
    payload, dense = Message("allgather", N), Message("allreduce", int(ratio * N))
    for p in range(2, 200):
        loses = network.seconds(payload, p) > network.seconds(dense, p)
        assert loses == (p > 2 * ratio)


@pytest.mark.parametrize("p", [2, 4, 16])
def test_a_fit_finds_the_network_that_made_the_times(p):
    truth = Network(Line(30e-6, 2e-9), Line(70e-6, 1e-9))
    messages = [Message(c, n) for c in ("allreduce", "allgather") for n in (4, 65_536, 10**7)]
    found = fitted_network([(m, truth.seconds(m, p)) for m in messages], p)
    for line, expected in ((found.reduce, truth.reduce), (found.gather, truth.gather)):
        assert line.alpha_s == pytest.approx(expected.alpha_s)
        assert line.beta_s == pytest.approx(expected.beta_s)


def test_where_times_were_measured_they_count():
    sizes = (4, 1000, 1_000_000)
    times = [
        (Message(c, n), 1e-3 + 1e-6 * n**1.2) for c in ("allreduce", "allgather") for n in sizes
    ]
    found = fitted_network(times, 4)
    for message, seconds in times:
        assert found.seconds(message, 4) == pytest.approx(seconds)
    middle = found.seconds(Message("allgather", 500_500), 4)
    assert middle == pytest.approx((times[4][1] + times[5][1]) / 2)
    assert found.seconds(Message("allgather", 3_000_000), 4) == pytest.approx(3 * times[5][1])
    assert found.seconds(Message("allgather", 0), 4) == pytest.approx(times[3][1])
    line = found.gather
    expected = CYCLE_S + 7 * (line.alpha_s + 1000 * line.beta_s)
    assert found.seconds(Message("allgather", 1000), 8) == pytest.approx(expected)


def test_a_fit_finds_the_inside_of_nodes():
    """Alltoalls between 4 of 8 ranks, on the lines of which no other size depends."""
    truth = Network(Line(30e-6, 2e-9), Line(70e-6, 1e-9), inside=Line(5e-6, 1e-10), node_size=4)
    kinds = (("allreduce", 8), ("allgather", 8), ("inside", 4))
    times = [(Message(c, n), truth.seconds(Message(c, n), p)) for c, p in kinds for n in (4, 10**7)]
    found = fitted_network(times, 8, node_size=4)
    assert found.inside.alpha_s == pytest.approx(5e-6)
    assert found.inside.beta_s == pytest.approx(1e-10)
    assert found.node_size == 4
    assert fitted_network(times, 8).inside is None


def test_a_fit_never_has_negative_times():
    messages = [Message(c, n) for c in ("allreduce", "allgather") for n in (4, 1000, 10**6)]
    falling = fitted_network([(m, 1e-2 - 1e-9 * m.nbytes) for m in messages], 2)
    assert falling.reduce.beta_s == 0
    assert falling.gather.alpha_s > 0
    steep = fitted_network([(m, 1e-9 * (m.nbytes + 1) ** 1.5) for m in messages], 2)
    assert steep.reduce.alpha_s == 0
    with pytest.raises(ValueError, match="two sizes"):
        fitted_network([(m, 1.0) for m in messages if m.collective == "allreduce"], 2)
    with pytest.raises(ValueError, match="at least two ranks"):
        fitted_network([(m, 1.0) for m in messages], 1)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_bad_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="alpha_s must be"):
        Line(bad, 0.0)
    with pytest.raises(ValueError, match="gbit_per_s"):
        given_network(-abs(bad), 0.0)
    with pytest.raises(ValueError, match="unknown collective"):
        NETWORK.seconds(Message("reducescatter", 1), 2)


def gathers(n_parts=10, nbytes=100_000, **times):
    return [
        Transfer((i + 1) / n_parts, (Message("allgather", nbytes),), **times)
        for i in range(n_parts)
    ]


def test_without_network_and_codec_a_step_is_its_computation():
    found = step_time(Compute(0.3), gathers(), ENDLESS, 4)
    assert found.total_s == found.compute_s == pytest.approx(0.3)
    assert found.exposed_s == pytest.approx(0)


def test_a_slow_network_hides_all_of_the_backward_pass_it_can():
    compute = Compute(0.3, backward=0.5)
    parts = gathers()
    found = step_time(compute, parts, NETWORK, 4)
    first_ready = 0.15 + 0.15 / 10
    assert found.exchange_s > 0.015  # never idle from then on, but for messages that wait
    assert found.total_s <= first_ready + found.exchange_s + 0.15
    slow = Network(Line(0.0, 1e-6), Line(0.0, 1e-6), 0.0)
    found = step_time(compute, parts, slow, 4)
    assert found.total_s == pytest.approx(first_ready + found.exchange_s)
    assert found.exchange_s == pytest.approx(3 * 10 * 100_000 * 1e-6)


def test_messages_that_wait_go_as_one():
    many = [Transfer(1.0, (Message("allreduce", 1000),)) for _ in range(50)]
    found = step_time(Compute(0.1), many, NETWORK, 2)
    assert found.exchange_s == pytest.approx(NETWORK.seconds(Message("allreduce", 50_000), 2))


def test_sums_of_another_dtype_have_times_of_their_own():
    times = [(Message(c, n), 1e-3) for c in ("allreduce", "allgather") for n in (4, 1000)]
    times += [(Message("allreduce", n, "float16"), 1e-2) for n in (4, 1000)]
    found = fitted_network(times, 2)
    assert found.seconds(Message("allreduce", 500), 2) == pytest.approx(1e-3)
    assert found.seconds(Message("allreduce", 500, "float16"), 2) == pytest.approx(1e-2)
    assert found.reduce.beta_s < 1e-9  # the others do not count
    parts = [Transfer(1.0, (Message("allreduce", 500, dtype),)) for dtype in ("float16", "float32")]
    assert step_time(Compute(0.1), parts, found, 2).exchange_s == pytest.approx(11e-3)


def test_encoding_hides_only_where_there_is_a_core_for_it():
    parts = gathers(encode_s=0.005)
    alone = step_time(Compute(0.3, spare_core=False), parts, ENDLESS, 4)
    assert alone.total_s == pytest.approx(0.3 + 10 * 0.005)
    assert alone.encode_s == pytest.approx(0.05)
    beside = step_time(Compute(0.3, spare_core=True), parts, ENDLESS, 4)
    assert beside.total_s == pytest.approx(0.305)  # the last gradient's is left


def test_codecs_take_longer_where_ranks_share_a_core():
    parts = gathers(encode_s=0.005, decode_s=0.001)
    shared = step_time(Compute(0.3, spare_core=False, sharing=2.0), parts, ENDLESS, 4)
    assert shared.encode_s == pytest.approx(0.1)
    assert shared.decode_s == pytest.approx(0.02)
    assert shared.total_s == pytest.approx(0.42)


def test_decoding_costs_for_each_rank_and_waits_for_the_backward_pass():
    parts = gathers(decode_s=0.001, decode_each_s=0.002)
    for p in (2, 8):
        found = step_time(Compute(0.3), parts, ENDLESS, p)
        assert found.decode_s == pytest.approx(10 * (0.001 + 0.002 * p))
        assert found.total_s == pytest.approx(0.3 + found.decode_s)


def test_encoding_that_is_divided_takes_a_share_of_each_rank():
    part = Transfer(1.0, (Message("allreduce", 4),), encode_s=0.001, divided_s=0.012)
    assert [part.on(p).encode_s for p in (2, 6)] == pytest.approx([0.007, 0.003])
    compute = Compute(0.3, spare_core=False)
    for p in (2, 6):
        assert step_time(compute, [part] * 10, ENDLESS, p).encode_s == pytest.approx(
            10 * (0.001 + 0.012 / p)
        )


@pytest.mark.parametrize("messages", [
    (Message("allgather", 1000),), (Message("allreduce", 500), Message("broadcast", 9)),
    (Message("alltoall", 1000), Message("divided", 1200)),
])  # fmt: skip
def test_nodes_exchange_as_ranks_do_and_divide_the_codec(messages):
    times = {"encode_s": 0.008, "decode_s": 0.004, "decode_each_s": 0.002, "divided_s": 0.006}
    flat = Transfer(1.0, messages, **times)
    nodes = Transfer(1.0, messages, **times, node_size=4, dense_nbytes=40_000)
    network = given_network(1.0, ALPHA, 0.0, inside_gbit_per_s=100.0, node_size=4)
    compute = Compute(0.1, spare_core=False)
    of_ranks = step_time(compute, [flat], given_network(1.0, ALPHA, 0.0), 3)
    found = step_time(compute, [nodes], network, 12)
    inside_s = 2 * 3 * (5e-6 + 10_000 * 8e-11)
    assert found.exchange_s == pytest.approx(of_ranks.exchange_s + inside_s)
    assert found.encode_s == pytest.approx(of_ranks.encode_s / 4)
    assert found.decode_s == pytest.approx(of_ranks.decode_s / 4)
    alone = step_time(compute, [nodes], network, 4)  # one node
    assert (alone.encode_s, alone.decode_s) == (0.0, 0.0)
    assert alone.exchange_s == pytest.approx(inside_s)


def test_nodes_pass_on_payloads_that_are_few_bytes():
    times = {"encode_s": 0.008, "decode_s": 0.004, "decode_each_s": 0.002}
    network = given_network(1.0, ALPHA, 0.0, inside_gbit_per_s=100.0, node_size=4)
    compute = Compute(0.1, spare_core=False)
    for nbytes, passed_on in ((3_000, 9_000), (5_000, None)):  # of three nodes, and a quarter
        nodes, few = (
            Transfer(1.0, (Message("allgather", nbytes),), **times, node_size=4,
                     dense_nbytes=40_000, sends_few=sends_few)
            for sends_few in (False, True)
        )  # fmt: skip
        dense, found = (step_time(compute, [one], network, 12) for one in (nodes, few))
        assert found.encode_s == dense.encode_s
        assert found.decode_s == pytest.approx(dense.decode_s * (4 if passed_on else 1))
        less_s = 3 * (40_000 - passed_on) / 4 * 8e-11 if passed_on else 0.0
        assert found.exchange_s == pytest.approx(dense.exchange_s - less_s)


def test_an_alltoall_of_all_ranks_passes_the_link_of_a_node_for_each_of_them():
    shared = given_network(1.0, 0.0, 0.0, node_size=4)
    for collective, times in (("alltoall", 16 / 7), ("allgather", 1), ("allreduce", 1)):
        part = Transfer(1.0, (Message(collective, 10**6),))
        one, each = (
            step_time(Compute(0.0), [part], network, 8).exchange_s
            for network in (shared, given_network(1.0, 0.0, 0.0))
        )
        assert one == pytest.approx(times * each, rel=1e-6)
        alone = step_time(Compute(0.0), [part], shared, 3).exchange_s  # fewer ranks than a node has
        assert 0 <= alone <= step_time(Compute(0.0), [part], shared, 8).exchange_s


def test_rounds_follow_one_another():
    part = Transfer(1.0, (Message("broadcast", 1000), Message("allreduce", 50_000)))
    found = step_time(Compute(0.1), [part], NETWORK, 4)
    expected = sum(NETWORK.seconds(message, 4) for message in part.messages)
    assert found.exchange_s == pytest.approx(expected)
    assert found.total_s == pytest.approx(0.1 + expected)


@pytest.mark.parametrize("spare_core", [False, True])
def test_the_parts_of_a_step_add_up_and_more_of_anything_takes_longer(spare_core):
    compute = Compute(0.2, spare_core)
    plain = gathers(encode_s=0.001, decode_s=0.001, decode_each_s=0.001)
    base = step_time(compute, plain, NETWORK, 4)
    parts = base.compute_s + base.encode_s + base.exposed_s + base.decode_s
    assert base.total_s == pytest.approx(parts)
    slow = Network(Line(ALPHA, 100 * BETA), Line(ALPHA, 100 * BETA))
    long_encoding = gathers(encode_s=0.05, decode_s=0.001, decode_each_s=0.001)
    long_decoding = gathers(encode_s=0.001, decode_s=0.003, decode_each_s=0.001)
    worse = [
        step_time(Compute(0.25, spare_core), plain, NETWORK, 4),
        step_time(compute, plain, NETWORK, 5),  # one payload more to decode
        step_time(compute, plain, slow, 4),
        step_time(compute, long_encoding, NETWORK, 4),
        step_time(compute, long_decoding, NETWORK, 4),
    ]
    assert min(found.total_s for found in worse) > base.total_s


@pytest.mark.parametrize(
    ("collective", "told"),
    [
        ("allgather", "1.2 Gbit/s received by a rank (20 ms for an allgather of 1 MB from each)"),
        ("allreduce", "0.6 Gbit/s received by a rank (20 ms for an allreduce of 1 MB)"),
    ],
)
def test_a_bandwidth_is_what_a_rank_receives(collective, told):
    """In a ring of four ranks; the network that was given is found again."""
    assert speed(collective, 10**6, 4, 0.02) == told
    seconds = given_network(1.0, 0.0, 0.0).seconds(Message(collective, 10**6), 4)
    assert speed(collective, 10**6, 4, seconds).startswith("1 Gbit/s")
