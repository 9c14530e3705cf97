"""Cost model of a training step: alpha-beta times of collectives, and overlap with backward.

Times in seconds, sizes in bytes. alpha: latency of a message between two ranks; beta: seconds a
byte. The formulas are those of ring and tree collectives (Thakur, Rabenseifner and Gropp 2005).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from horovod_fftcomp.schemes import received
from horovod_fftcomp.schemes.hierarchical import FEWER

CYCLE_S = 1e-3  # Horovod's default cycle, in which it looks for work once
INSIDE_GBIT_PER_S = 2400.0  # NVLink: 300 GB/s of each GPU, in each direction
_INSIDE_LATENCY_S = 5e-6


class Message(NamedTuple):
    """One collective and the bytes that each rank hands in.

    "divided": an allgather whose bytes all ranks hand in together. "alltoall": each rank hands in
    the bytes for all; "inside": for all of its node. ``dtype``: that of a sum, which changes its
    time: Gloo adds float16 one by one.
    """

    collective: str
    nbytes: int
    dtype: str = "float32"


@dataclass(frozen=True)
class Line:
    """``alpha_s``: latency of a message; ``beta_s``: seconds a byte, of one rank's link."""

    alpha_s: float
    beta_s: float

    def __post_init__(self) -> None:
        for name, value in (("alpha_s", self.alpha_s), ("beta_s", self.beta_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a number of seconds from 0 up, got {value!r}")


@dataclass(frozen=True)
class Network:
    """Times of collectives: ``reduce`` for allreduces, ``gather`` for all others.

    They differ since summing costs more than copying. ``overhead_s``: added to every collective, on
    any number of ranks. ``times_s``: times measured on ``measured_ranks`` ranks, which are used for
    that number of ranks; the lines are used for all others. Large messages can take longer than a
    line says. ``inside``: between the ranks of a node; None if there are no nodes. ``node_size``:
    ranks that share the link of a node: an alltoall of all ranks passes it from each of them, a
    ring once.
    """

    reduce: Line
    gather: Line
    overhead_s: float = CYCLE_S
    times_s: tuple[tuple[Message, float], ...] = ()
    measured_ranks: int = 0
    inside: Line | None = None
    node_size: int = 1

    def seconds(self, message: Message, ranks: int) -> float:
        """Return the time of a collective on ``ranks`` ranks in seconds; 0 on one rank.

        Ring allreduce: 2 (p-1) alpha + 2 (p-1)/p n beta. Ring allgather: (p-1) (alpha + n beta), n
        of each rank; "divided" is one to which all ranks together bring n. Alltoall, also inside a
        node of p ranks: (p-1) (alpha + n/p beta). Broadcast by a tree: log2(p) alpha + n beta.
        Where times were measured, a straight line between the two nearest sizes.
        """
        p, (collective, nbytes, dtype) = ranks, message
        n = float(nbytes)
        if p < 2:
            return 0.0
        if collective == "inside":
            if self.inside is None:
                raise ValueError("the network has no nodes: its field inside is None")
            return self.overhead_s + (p - 1) * (self.inside.alpha_s + n / p * self.inside.beta_s)
        if collective in ("divided", "alltoall"):
            collective, n = "allgather", n / p
        same = [(m.nbytes, t) for m, t in self.times_s if m[::2] == (collective, dtype)]
        if (known := sorted(same)) and p == self.measured_ranks:
            return _between(known, n)
        if collective == "allreduce":
            time_s = 2 * (p - 1) * (self.reduce.alpha_s + n / p * self.reduce.beta_s)
        elif collective == "allgather":
            time_s = (p - 1) * (self.gather.alpha_s + n * self.gather.beta_s)
        elif collective == "broadcast":
            time_s = math.ceil(math.log2(p)) * self.gather.alpha_s + n * self.gather.beta_s
        else:
            raise ValueError(f"unknown collective {collective!r}")
        return self.overhead_s + time_s


def given_network(
    gbit_per_s: float,
    latency_s: float,
    cycle_s: float = CYCLE_S,
    inside_gbit_per_s: float = INSIDE_GBIT_PER_S,
    node_size: int = 1,
) -> Network:
    """Return a network of full-duplex links: of each node, and of each rank inside its node."""
    for name, speed in (("gbit_per_s", gbit_per_s), ("inside_gbit_per_s", inside_gbit_per_s)):
        if not speed > 0:
            raise ValueError(f"{name} must be above 0, got {speed!r}")
    line = Line(latency_s, 8e-9 / gbit_per_s)
    inside = Line(min(latency_s, _INSIDE_LATENCY_S), 8e-9 / inside_gbit_per_s)
    return Network(line, line, cycle_s, inside=inside, node_size=node_size)


def fitted_network(
    times_s: Sequence[tuple[Message, float]],
    ranks: int,
    cycle_s: float = CYCLE_S,
    node_size: int = 1,
) -> Network:
    """Return the network that fits measured times, by least squares of the relative errors.

    ``node_size``: ranks of a node; above 1 there are exchanges inside nodes. Of the time that does
    not depend on the bytes, one cycle of Horovod is overhead and the rest latency. Raises
    ValueError unless there are two sizes of each kind.
    """

    def line(collective: str, steps: float, bytes_per_byte: float) -> Line:
        found = [(m.nbytes, t) for m, t in times_s if m[::2] == (collective, "float32")]
        if len({nbytes for nbytes, _ in found}) < 2:
            raise ValueError(f"times of {collective} of at least two sizes are needed")
        fixed_s, slope = _fitted(found)
        return Line(max(0.0, fixed_s - cycle_s) / steps, slope / bytes_per_byte)

    p = ranks
    if p < 2:
        raise ValueError("a network has at least two ranks")
    reduce, g = line("allreduce", 2 * (p - 1), 2 * (p - 1) / p), node_size
    inside = line("inside", g - 1, (g - 1) / g) if g > 1 else None
    gather = line("allgather", p - 1, p - 1)
    return Network(reduce, gather, cycle_s, tuple(times_s), p, inside, node_size)


def speed(collective: str, nbytes: int, ranks: int, seconds: float) -> str:
    """Return a measured collective's bandwidth in words: bytes that a rank receives, over time."""
    gbit_per_s = 8e-9 * received(collective, nbytes, ranks) / seconds
    each = " from each" if collective == "allgather" else ""
    return (
        f"{gbit_per_s:.3g} Gbit/s received by a rank ({1e3 * seconds:.3g} ms for an {collective} "
        f"of {nbytes / 1e6:.3g} MB{each})"
    )


def _between(points: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Return the interpolated time; beyond the largest size it is proportional to ``nbytes``."""
    for (n, t), (larger, longer) in itertools.pairwise(points):
        if nbytes <= larger:
            return t + (longer - t) * max(0, nbytes - n) / (larger - n)
    n, t = points[-1]
    return t * max(1.0, nbytes / n)


def _fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a, b >= 0 that minimize the sum of squares of 1 - (a + b n) / t."""
    rows = [(1 / t, n / t) for n, t in points]
    uu, uv, vv = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    u, v = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = uu * vv - uv * uv
    a, b = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
    if b < 0:
        return u / uu, 0.0
    return (a, b) if a >= 0 else (0.0, v / vv)


@dataclass(frozen=True)
class Compute:
    """Computation of a step: ``total_s``, whose last share ``backward`` is the backward pass.

    ``spare_core``: whether a rank has a second core, on which encoding overlaps with the backward
    pass. Without it only the network overlaps. ``sharing``: ranks for each core, if they are more;
    codecs then take so many times as long as alone.
    """

    total_s: float
    spare_core: bool = True
    backward: float = 2 / 3  # a backward pass costs two forward ones
    sharing: float = 1.0


@dataclass(frozen=True)
class Transfer:
    """A bucket, or a tensor that Horovod exchanges itself.

    ``ready``: share of the backward pass after which its gradients are ready. ``encode_s``: time
    before the last message, and ``divided_s``, which the ranks divide among them; ``decode_s`` and,
    for each rank, ``decode_each_s``: after the last. ``sharded``: what replaces it on
    ``sharded_from`` ranks and more.

    ``node_size`` above 1: its ``dense_nbytes`` of gradients are summed inside nodes of so many
    ranks, and nodes exchange the sums as ranks would, each rank a share. ``sends_few``: see
    ``schemes.hierarchical``; if small, payloads are passed on inside nodes and summed by all ranks.
    """

    ready: float
    messages: tuple[Message, ...]
    encode_s: float = 0.0
    decode_s: float = 0.0
    decode_each_s: float = 0.0
    divided_s: float = 0.0
    sharded: Transfer | None = None
    sharded_from: int = 0
    node_size: int = 1
    dense_nbytes: int = 0
    sends_few: bool = False

    def on(self, ranks: int) -> OnRanks:
        """Return the transfer on this number of ranks."""
        g = min(self.node_size, ranks)
        p = math.ceil(ranks / g)  # nodes
        there = self.sharded if self.sharded and p >= self.sharded_from else self
        rounds = [(message, p) for message in there.messages]
        encode_s, decode_s = there.encode_s + there.divided_s / p, p * there.decode_each_s
        decode_s += there.decode_s
        if g > 1:
            share = 1 / g if p > 1 else 0.0  # on one node nothing is encoded
            within = last = Message("inside", self.dense_nbytes)
            passed_on = p * there.messages[-1].nbytes
            if p > 1 and there.sends_few and FEWER * passed_on <= self.dense_nbytes:
                last, decode_s = Message("inside", passed_on), g * decode_s
            rounds = [(within, g), *rounds, (last, g)]
            encode_s, decode_s = share * encode_s, share * decode_s
        return OnRanks(self.ready, rounds, encode_s, decode_s)


class OnRanks(NamedTuple):
    """A ``Transfer`` on a number of ranks; ``rounds``: messages, and how many ranks take part."""

    ready: float
    rounds: list[tuple[Message, int]]
    encode_s: float
    decode_s: float


class StepTime(NamedTuple):
    """Time of a step and its parts in seconds.

    ``encode_s``: encoding that delays the step. ``exposed_s``: exchange that overlaps with nothing.
    ``exchange_s``: all time of the network, hidden or not.
    """

    total_s: float
    compute_s: float
    encode_s: float
    exposed_s: float
    decode_s: float
    exchange_s: float


def step_time(
    compute: Compute, parts: Sequence[Transfer], network: Network, ranks: int
) -> StepTime:
    """Return the time of a step by simulating it.

    Gradients become ready evenly over the backward pass, in the order of ``ready``, and are encoded
    one part after the other. The network runs one collective at a time; waiting messages of one
    kind are fused, as by Horovod, which never fuses an alltoall. After the backward
    pass, received parts are decoded one after the other.
    """
    order = sorted((part.on(ranks) for part in parts), key=lambda part: part.ready)
    encoded, computed = _encoded(compute, order)
    network_free, exchange_s, arrived = 0.0, 0.0, [0.0] * len(order)
    waiting = [(at, number, 0) for number, at in enumerate(encoded)]  # (since, part, its round)
    while waiting:
        waiting.sort()
        begin = max(network_free, waiting[0][0])
        among = [order[number].rounds[round_] for _, number, round_ in waiting]
        first, n_ranks = among[0]
        same = [n == n_ranks and message[::2] == first[::2] for message, n in among]
        fused = [w for w, fits in zip(waiting, same, strict=True) if fits and w[0] <= begin]
        if first.collective in ("alltoall", "inside"):
            fused = waiting[:1]
        waiting = [w for w in waiting if w not in fused]
        nbytes = sum(order[number].rounds[round_][0].nbytes for _, number, round_ in fused)
        if first.collective == "alltoall" and n_ranks == ranks:
            g = min(network.node_size, ranks)
            nbytes = round(nbytes * g * (ranks - g) / max(1, ranks - 1))
        taken = network.seconds(first._replace(nbytes=nbytes), n_ranks)
        network_free = begin + taken
        exchange_s += taken
        for _, number, round_ in fused:
            if round_ + 1 < len(order[number].rounds):
                waiting.append((network_free, number, round_ + 1))
            else:
                arrived[number] = network_free
    now, decode_s = computed, 0.0
    for part, at in sorted(zip(order, arrived, strict=True), key=lambda pair: pair[1]):
        taken = compute.sharing * part.decode_s
        now = max(now, at) + taken
        decode_s += taken
    late_s = max(0.0, computed - compute.total_s)
    exposed_s = max(0.0, now - computed - decode_s)  # of what is 0, rounding leaves less
    return StepTime(now, compute.total_s, late_s, exposed_s, decode_s, exchange_s)


def _encoded(compute: Compute, order: Sequence[OnRanks]) -> tuple[list[float], float]:
    """Return (the time at which each part is encoded, the end of the backward pass)."""
    backward_s = compute.backward * compute.total_s
    forward_s = compute.total_s - backward_s
    ends, now, delay_s = [], 0.0, 0.0
    for part in order:
        ready, encode_s = forward_s + part.ready * backward_s, compute.sharing * part.encode_s
        if compute.spare_core:
            now = max(now, ready) + encode_s
        else:
            delay_s += encode_s
            now = ready + delay_s
        ends.append(now)
    return ends, compute.total_s + delay_s


def spread(times_s: Sequence[float]) -> float:
    """Return half the interquartile range over the median; 0 for fewer than three times."""
    if len(times_s) < 3:
        return 0.0
    low, median, high = statistics.quantiles(times_s, n=4, method="inclusive")
    return (high - low) / 2 / median
