"""The order in which ``torch_distributed`` sends rounds; ranks that differ in it hang."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from horovod_fftcomp.schemes import Round

pytest.importorskip("torch")
from horovod_fftcomp.torch_distributed.pipeline import OrderedPipeline

pytestmark = pytest.mark.torch


class Engine:
    """Engine whose buckets have so many rounds, without content."""

    def __init__(self, n_rounds):
        self.n_rounds, self.begun = n_rounds, [0] * len(n_rounds)

    def scheme(self, bucket):
        return SimpleNamespace(rounds=("allreduce",) * self.n_rounds[bucket])

    def resume(self, bucket, _):
        self.begun[bucket] += 1
        if self.begun[bucket] > self.n_rounds[bucket]:
            return SimpleNamespace(sums=[])
        return Round("allreduce", np.zeros(1, np.float32))


def order_of_rounds(n_rounds, seed):
    """Return the rounds of a step as (bucket, number); ``seed``: of what has arrived when."""
    arrivals, sent, done = random.Random(seed), [], []

    def send(round_, bucket, number):
        sent.append((bucket, number))
        is_done = lambda: arrivals.random() < 0.5  # noqa: E731
        return SimpleNamespace(is_done=is_done, wait=lambda timeout_s: None)

    pipeline = OrderedPipeline(Engine(n_rounds), send, lambda bucket, _: done.append(bucket), 1.0)
    for bucket in range(len(n_rounds)):
        pipeline.start(bucket, [])
        pipeline.poll()
    pipeline.finish()
    assert sorted(done) == list(range(len(n_rounds)))
    assert len(sent) == sum(n_rounds)
    return tuple(sent)


def test_the_order_does_not_depend_on_what_has_arrived():
    rng = random.Random(0)
    for _ in range(100):
        n_rounds = [rng.choice((1, 2, 3)) for _ in range(8)]
        assert len({order_of_rounds(n_rounds, seed) for seed in range(10)}) == 1, n_rounds


def test_two_later_buckets_start_before_a_second_round():
    sent = order_of_rounds([2, 2, 2, 2], seed=0)
    assert sent[:5] == ((0, 0), (1, 0), (2, 0), (0, 1), (3, 0))
