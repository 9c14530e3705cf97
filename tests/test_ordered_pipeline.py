"""The order in which ``torch_distributed`` sends rounds; ranks that differ in it hang."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np

from horovod_fftcomp.engine.overlap import Pipeline
from horovod_fftcomp.engine.work import Work
from horovod_fftcomp.schemes import Outcome, Round


class Engine:
    """Engine whose buckets have so many rounds, without content."""

    device = None

    def __init__(self, n_rounds):
        self.buckets = [SimpleNamespace(tensors=()) for _ in n_rounds]
        self.n_rounds = n_rounds
        self.exchanges = [self.exchange(n) for n in n_rounds]

    def exchange(self, n_rounds):
        for _ in range(n_rounds):
            yield Round("allreduce", np.zeros(1, np.float32))
        return Outcome([], {})

    def prepare(self, bucket, output):
        return Work(self.exchanges[bucket], None)

    def resume(self, bucket, data):
        work = data if isinstance(data, Work) else self.prepare(bucket, data).run()
        return work.made


def order_of_rounds(n_rounds, seed):
    """Return the rounds of a step as (bucket, number); ``seed``: of what has arrived when."""
    arrivals, sent, done = random.Random(seed), [], []

    def send(round_, name, process_set):
        sent.append(tuple(map(int, name.split(".")[1:])))
        is_done = lambda: arrivals.random() < 0.5  # noqa: E731
        return SimpleNamespace(is_done=is_done, wait=lambda timeout_s: None)

    pipeline = Pipeline(
        Engine(n_rounds), send, "x", None, lambda bucket, _: done.append(bucket), 1.0, True
    )
    for bucket in range(len(n_rounds)):
        pipeline.start(bucket, {})
        pipeline.advance()
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


def test_a_bucket_with_more_rounds_to_come_goes_first():
    """So that the network has the next bucket's message before an earlier one is waited for."""
    sent = order_of_rounds([3, 3, 3, 3, 3], seed=0)
    assert sent[3:] == (
        *((0, 1), (3, 0), (1, 1), (4, 0), (2, 1), (0, 2)),  # two later buckets for each round
        *((3, 1), (4, 1), (1, 2), (2, 2), (3, 2), (4, 2)),
    )
    assert order_of_rounds([2, 4], seed=0)[2:] == ((1, 1), (1, 2), (0, 1), (1, 3))
