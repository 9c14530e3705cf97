"""Loops that run exchanges to their end over a network, which their caller supplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.schemes import Exchange, Grads, Outcome, Round
from horovod_fftcomp.types import Array

Key = TypeVar("Key")


def exchange_of(engine: Engine, bucket: int, grads: Grads) -> Exchange:
    """Return the exchange of a bucket in this step of ``engine``, which keeps its outcome."""
    made = engine.resume(bucket, grads)
    while isinstance(made, Round):
        made = engine.resume(bucket, (yield made))
    return made


def drive(exchange: Exchange, network: Callable[[Round], Array]) -> Outcome:
    """Run one rank's exchange; ``network`` returns the output of a round."""
    return drive_all({0: exchange}, lambda rounds: {0: network(rounds[0])})[0]


def drive_all(
    exchanges: Mapping[Key, Exchange], network: Callable[[dict[Key, Round]], Mapping[Key, Array]]
) -> dict[Key, Outcome]:
    """Run exchanges of several ranks or buckets, all up to a round, then all up to the next one.

    ``network``: returns the outputs of the rounds that the exchanges have reached, in the order in
    which these are resumed.
    """
    outcomes: dict[Key, Outcome] = {}
    rounds = {key: next(exchange) for key, exchange in exchanges.items()}
    while rounds:
        outputs, rounds = network(rounds), {}  # frees the memory of messages
        for key, output in outputs.items():
            try:
                rounds[key] = exchanges[key].send(output)
            except StopIteration as stop:
                outcomes[key] = stop.value
    return outcomes
