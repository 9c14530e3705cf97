"""Messages and codec times of each recipe for a model, forecasts made of them, and the advice.

Codecs are timed by running the exchanges of a training in this process, without a network.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.codec.transforms import energy_of
from horovod_fftcomp.engine.buckets import Bucket, decided_states, make_buckets
from horovod_fftcomp.engine.checkpoint import common
from horovod_fftcomp.engine.drive import drive
from horovod_fftcomp.engine.policy import Scheduled, make_policy
from horovod_fftcomp.engine.recipe_text import RecipeChoice, parse_recipes
from horovod_fftcomp.recipes import RECIPES
from horovod_fftcomp.schemes import Context, Round, Tensor
from horovod_fftcomp.schemes.hierarchical import sends_few
from horovod_fftcomp.schemes.shards import SHARD_BEGIN, SHARD_RESIDUAL, folded
from horovod_fftcomp.tools import bench, gradient_files
from horovod_fftcomp.tools.advise.cost_model import (
    Compute,
    Message,
    Network,
    StepTime,
    Transfer,
    spread,
    step_time,
)
from horovod_fftcomp.tools.bench.sessions import of_usual_step
from horovod_fftcomp.types import Array, Arrays, OldState

_WORTH = 0.95  # a recipe is recommended if it takes less than this share of the dense time
# Relative error of a forecast: 32 of 35 had less, see forecast.py in benchmarks/README.md.
ACCURACY = 0.2
# Of a step of one gradient, and of the loss: what has more is not worth a few per cent of time.
_MOST_ERROR, _MOST_LOSS = 0.9, 0.05
# Losses of language models by recipe, as shares of that of uncompressed training with the same
# optimizer; of several trainings that of the largest change. Written by ``python
# benchmarks/language_model.py --report`` from benchmarks/results/language_model.md.
LOSSES = json.loads((Path(__file__).parent / "losses.json").read_text("utf-8"))
_FEW, _MORE = 2, 6  # numbers of ranks to decode, whose difference is the time for each rank
# A usual step: without a measurement or a trial, and led by the rank that is timed.
_USUAL_STEP = 6 * _FEW * _MORE
_PROBE_NBYTES = 4
_MOST_ALIKE = 3  # the noise of one bucket counts as often as there are alike ones
_CACHES_NBYTES = 1 << 25
_FIRST_DDP_NBYTES, _DDP_NBYTES = 1 << 20, 25 << 20  # DDP's buckets end with these or more


class Option(NamedTuple):
    """One way to exchange a model's gradients.

    ``sent_nbytes``: bytes that a rank hands to collectives in a step, not those inside nodes; of
    "divided" messages those of all ranks. ``relative_error``: norm of the error over norm of the
    gradient, without error feedback. ``compute``: computation of a step with this option, if it was
    measured by itself. ``spread``: of the codec's times, see ``cost_model.spread``. ``loss``:
    change of a language model's loss, as a share; None if none was trained with it.
    """

    label: str
    recipe: str
    options: Mapping[str, Any]
    parts: list[Transfer]
    sent_nbytes: int
    relative_error: float
    compute: Compute | None = None
    spread: float = 0.0
    loss: float | None = None

    @property
    def kind(self) -> str:
        """The collective of the largest message, "divided" ones left out.

        "alltoall" if buckets are sharded on many ranks.
        """
        if any(part.sharded for part in self.parts):
            return "alltoall"
        messages = [message for part in self.parts for message in part.messages]
        whole = [message for message in messages if message.collective != "divided"]
        return max(whole, key=lambda message: message.nbytes).collective


def dense(tensors: Sequence[Tensor], is_ddp: bool = False) -> Option:
    """Return the option ``none``: Horovod's or DDP's own dense allreduces."""
    ready = _ready(tensors, is_ddp)
    parts = [Transfer(ready[t.name], (Message("allreduce", _nbytes(t)),)) for t in tensors]
    return Option("none", "none", {}, parts, sum(map(_nbytes, tensors)), 0.0)


def compressed(
    choice: RecipeChoice, tensors: Sequence[Tensor], grads: Mapping[str, Array], repeat: int,
    is_ddp: bool = False,
) -> Option:  # fmt: skip
    """Return the option of a recipe; its codecs are timed ``repeat`` times.

    ``grads``: flat float32 by tensor name; tensors that are missing get synthetic gradients.
    ``is_ddp``: whether gradients come by DDP's buckets.
    """
    _, recipe, options = choice
    node_size = int(options.get("ranks_per_node", 1))
    policy = make_policy(recipe, **of_usual_step(recipe, options))
    buckets = make_buckets(tensors, policy)
    decides = policy if policy.in_force().get("exchange") == "auto" else None
    inside = {tensor.name for bucket in buckets for tensor in bucket.tensors}
    rest = sum(_nbytes(tensor) for tensor in tensors if tensor.name not in inside)
    # The roll call comes before the first bucket; probes go with the dense tensors, at the end.
    parts = [
        Transfer(0.0, (Message("allreduce", _PROBE_NBYTES),)),
        Transfer(1.0, (Message("allreduce", rest + _PROBE_NBYTES * len(inside)),)),
    ]
    bench.settle_malloc()
    ready, error, energy, spreads = _ready(tensors, is_ddp), 0.0, 0.0, [0.0]
    gradients = _gradients(buckets, grads)
    chosen = _chosen(buckets, gradients)
    # Of buckets that are alike one is timed.
    kinds = [
        (tuple(tensor.shape for tensor in bucket.tensors), *map(id, values), id(state or None))
        for bucket, values, state in zip(buckets, gradients, chosen, strict=True)
    ]
    found: dict[object, tuple[Transfer, float, float, float]] = {}
    for bucket, values, state, kind in zip(buckets, gradients, chosen, kinds, strict=True):
        if kind not in found:
            times = repeat * min(_MOST_ALIKE, kinds.count(kind))
            found[kind] = measured_transfer(bucket, values, state, decides, times)
        part, varies, lost, all_of_it = found[kind]
        at, nbytes = max(ready[t.name] for t in bucket.tensors), sum(map(_nbytes, bucket.tensors))
        part = replace(part, ready=at, node_size=node_size, dense_nbytes=nbytes)
        parts.append(replace(part, sends_few=sends_few(bucket.policy.after_warmup)))
        spreads.append(varies)
        error, energy = error + lost, energy + all_of_it
    sent = sum(message.nbytes / part.node_size for part in parts for message in part.messages)
    relative_error = math.sqrt(error / energy) if energy else 0.0
    loss = committed_loss(recipe, options)
    varies = max(spreads)
    return Option(*choice, parts, round(sent), relative_error, spread=varies, loss=loss)


def committed_loss(recipe: str, options: Mapping[str, Any]) -> float | None:
    """Return the change of the loss in ``LOSSES``; None if it has none with these options."""

    def whole(options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**RECIPES[recipe].options, **options, "ranks_per_node": 1}  # nodes are as ranks

    trained = zip(parse_recipes(",".join(LOSSES)), LOSSES.values(), strict=True)
    same = (
        change
        for choice, change in trained
        if choice.name == recipe and whole(choice.options) == whole(options)
    )
    return next(same, None)


def _sharded_from(policy: Scheduled, bucket: Bucket) -> int | None:
    """Return the number of ranks from which exchange "auto" shards a bucket; None if never."""

    def shards(ranks: int) -> bool:
        return policy.decided(bucket.tensors, ranks) == policy.with_exchange("sharded")

    return next((ranks for ranks in (*range(2, 33), 64, 128, 512) if shards(ranks)), None)


def _nbytes(tensor: Tensor) -> int:
    return 4 * math.prod(tensor.shape)


def _ready(tensors: Sequence[Tensor], is_ddp: bool) -> dict[str, float]:
    """Return the share of the backward pass after which each gradient is ready, last layer first.

    Every matrix or kernel is assumed to take the same share, and vectors none. DDP passes gradients
    on when those of a bucket are there.
    """
    heavy = [len(tensor.shape) > 1 for tensor in tensors]
    total, done = max(1, sum(heavy)), 0
    found, bucket, room = dict[str, float](), list[str](), _FIRST_DDP_NBYTES
    for tensor, is_heavy in zip(reversed(tensors), reversed(heavy), strict=True):
        done += is_heavy
        found[tensor.name] = min(1.0, done / total)
        bucket.append(tensor.name)
        room -= _nbytes(tensor)
        if is_ddp and (room <= 0 or tensor is tensors[0]):
            found |= dict.fromkeys(bucket, found[tensor.name])
            bucket, room = [], _DDP_NBYTES
    return found


def _gradients(buckets: Sequence[Bucket], grads: Mapping[str, Array]) -> list[list[Array]]:
    """Return the gradients of each bucket; synthetic ones of one size are the same array."""
    synthetic = functools.cache(lambda numel: gradient_files.synthetic(numel).steps[0])

    def gradient(tensor: Tensor) -> Array:
        known = grads.get(tensor.name)
        return synthetic(math.prod(tensor.shape)) if known is None else known

    return [[*map(gradient, bucket.tensors)] for bucket in buckets]


def _chosen(buckets: Sequence[Bucket], grads: Sequence[Sequence[Array]]) -> list[OldState]:
    """Return what the recipe chooses for each bucket after a first step; nothing if it does not."""
    chosen = decided_states(
        buckets, 0, lambda n: common(run_once(buckets[n], grads[n], {}, 0, 1, []).state)
    )
    return [chosen.get(number, {}) for number in range(len(buckets))]


def measured_transfer(
    bucket: Bucket, grads: Sequence[Array], chosen: OldState, decides: Scheduled | None, repeat: int
) -> tuple[Transfer, float, float, float]:
    """Return (messages and times of a bucket, their spread, and the results of ``_lost``).

    ``decides``: the policy if it decides between gathering and shards.
    """
    part, varies = timed_run(bucket, grads, chosen, repeat)
    if decides and (ranks := _sharded_from(decides, bucket)) is not None:
        shards = bucket._replace(policy=decides.with_exchange("sharded"))
        part = replace(
            part, sharded=timed_run(shards, grads, chosen, repeat)[0], sharded_from=ranks
        )
    return part, varies, *_lost(bucket, grads, chosen)


def timed_run(
    bucket: Bucket, grads: Sequence[Array], chosen: OldState, repeat: int
) -> tuple[Transfer, float]:
    """Return (messages and median times of a bucket in a usual step; their spread)."""
    scheme = bucket.policy.at(_USUAL_STEP)
    state = folded(scheme, bucket.tensors, run_once(bucket, grads, chosen, 0, 1, []).state)
    messages, few_s, decode_s, varies = _usual(bucket, grads, state, _FEW, repeat)
    _, more_s, decode_more_s, _ = _usual(bucket, grads, state, _MORE, repeat)
    encode_s, divided_s, each_s = (few_s + more_s) / 2, 0.0, 0.0
    if scheme.rounds[-2:-1] == ("alltoall",):
        divided_s = max(0.0, few_s - more_s) / (1 / _FEW - 1 / _MORE)
        encode_s = more_s - divided_s / _MORE
    elif messages[-1].collective == "allgather":  # else there is one sum, of however many
        each_s = max(0.0, decode_more_s - decode_s) / (_MORE - _FEW)
        decode_s -= _FEW * each_s
    times = (max(0.0, encode_s), max(0.0, decode_s), each_s, divided_s)
    return Transfer(1.0, messages, *times), varies


def _usual(
    bucket: Bucket, grads: Arrays, state: OldState, ranks: int, repeat: int
) -> tuple[tuple[Message, ...], float, float, float]:
    """Return (messages, median times to encode and to decode, spread) of usual steps.

    After a first one that is not counted; each has the second residual of the last.
    """
    others = _other_owners(bucket, grads, state, ranks)
    runs: list[_Run] = []
    for _ in range(repeat + 1):
        runs.append(run_once(bucket, grads, state, _USUAL_STEP, ranks, others))
        state = {**state, **runs[-1].state}
    encode_s = statistics.median(run.encode_s for run in runs[1:])
    decode_s = statistics.median(run.decode_s for run in runs[1:])
    varies = spread([run.encode_s + run.decode_s for run in runs[1:]])
    return runs[0].messages, encode_s, decode_s, varies


def _lost(bucket: Bucket, grads: Sequence[Array], chosen: OldState) -> tuple[float, float]:
    """Return the sums of squares of the error of a first exchange, and of the gradients."""
    sums = run_once(bucket, grads, chosen, 0, 1, []).sums
    errors = (grad - decoded for grad, decoded in zip(grads, sums, strict=True))
    return sum(map(energy_of, errors)), sum(map(energy_of, grads))


class _Run(NamedTuple):
    """One exchange: messages of this rank, times in seconds, sums and new state."""

    messages: tuple[Message, ...]
    encode_s: float
    decode_s: float
    sums: list[Array]
    state: OldState


def run_once(
    bucket: Bucket, grads: Arrays, state: OldState, step: int, ranks: int, others: list[Array]
) -> _Run:
    """Run one exchange in which all ranks send the payloads of ``grads``.

    ``others``: second messages of the other owners in a sharded exchange.
    The caches are overwritten before each part, as by the forward and backward pass of a training.
    """
    messages: list[Message] = []
    encode_s, begin = 0.0, 0.0

    def network(round_: Round) -> Array:
        nonlocal encode_s, begin
        encode_s += time.perf_counter() - begin
        messages.append(_message(round_, ranks, others))
        output = _output(round_, ranks, others)
        np.empty(_CACHES_NBYTES, np.uint8).fill(1)
        begin = time.perf_counter()
        return output

    np.empty(_CACHES_NBYTES, np.uint8).fill(1)
    scheme = bucket.policy.at(step)
    exchange = scheme.exchange(bucket.tensors, grads, state, Context(step, 0, ranks))
    begin = time.perf_counter()
    sums, kept = drive(exchange, network)[:2]
    decode_s = time.perf_counter() - begin
    if step:
        kept = {kind: kept.get(kind, {}) for kind in (SHARD_RESIDUAL, SHARD_BEGIN)}
    return _Run(tuple(messages), encode_s, decode_s, sums, kept)


def _other_owners(bucket: Bucket, grads: Arrays, state: OldState, ranks: int) -> list[Array]:
    """Return the second messages of all owners but the first; none unless sharded."""
    scheme = bucket.policy.at(_USUAL_STEP)
    messages: list[Array] = []
    for rank in range(1, ranks if scheme.rounds[-2:-1] == ("alltoall",) else 1):
        context = Context(_USUAL_STEP, rank, ranks)
        exchange = scheme.exchange(bucket.tensors, grads, state, context)
        round_ = next(exchange)
        while round_.collective != "alltoall":
            round_ = exchange.send(_output(round_, ranks))
        part = np.split(round_.data, np.cumsum(round_.splits)[:-1])[rank]
        messages.append(exchange.send(np.concatenate([part] * ranks)).data)
        exchange.close()
    return messages


def _message(round_: Round, ranks: int, others: Sequence[Array]) -> Message:
    if round_.divided:
        rest = [other.nbytes for other in others] or [round_.data.nbytes] * (ranks - 1)
        return Message("divided", round_.data.nbytes + sum(rest))
    dtype = round_.data.dtype.name if round_.collective == "allreduce" else "float32"
    return Message(round_.collective, round_.data.nbytes, dtype)


def _output(round_: Round, ranks: int, others: Sequence[Array] = ()) -> Array:
    if round_.collective == "alltoall":
        return np.concatenate([round_.data[: round_.splits[0]]] * ranks)
    if others and round_.collective == "allgather":
        return np.concatenate([round_.data, *others])
    if round_.divided:  # our part may be invalid as another rank's; zeros never are
        return np.concatenate([round_.data, np.zeros((ranks - 1) * round_.data.size, np.uint8)])
    if round_.collective == "allgather":
        return np.concatenate([round_.data] * ranks)
    return round_.data.copy()  # of a sum the values do not matter here, nor of one rank


class Forecast(NamedTuple):
    """Forecast time of a step with an option.

    ``error``: relative error of ``time.total_s``, in both directions.
    """

    option: Option
    time: StepTime
    error: float = ACCURACY

    def speed_up(self, none: Forecast) -> tuple[float, float, float]:
        """Return the speed-up over ``none``: (at least, expected, at most).

        Its relative error is the larger one of the two forecasts.
        """
        gain, error = none.time.total_s / self.time.total_s, max(self.error, none.error)
        return gain * max(0.0, 1 - error), gain, gain * (1 + error)

    def may_be_as_fast_as(self, other: Forecast) -> bool:
        """Return whether the ranges of the two times overlap, or this one's is below."""
        at_least_s = self.time.total_s * (1 - self.error)
        return at_least_s <= other.time.total_s * (1 + other.error)

    @property
    def is_poor(self) -> bool:
        """Whether its steps are known to be worth less than those of ``none``.

        By the loss or, where none was measured, by the error of a step: rounding without bias may
        have a large one, which the mean over steps and ranks takes away.
        """
        loss = self.option.loss
        return self.option.relative_error > _MOST_ERROR if loss is None else loss > _MOST_LOSS

    @property
    def quality(self) -> tuple[float, float]:
        """What decides between forecasts of equal time; the least is the best.

        The loss, and of equal ones the error. One that was not measured comes after those that are
        good, and before those that are not.
        """
        loss = self.option.loss
        return _MOST_LOSS if loss is None else loss, self.option.relative_error


class Measured(NamedTuple):
    """What forecasts are made of; the first of ``options`` is ``none``.

    ``step_spread`` and ``network_spread``: of measured times, see ``cost_model.spread``.
    """

    options: Sequence[Option]
    compute: Compute
    network: Network
    step_spread: float = 0.0
    network_spread: float = 0.0


def forecasts(
    options: Sequence[Option],
    compute: Compute,
    network: Network,
    ranks: int,
    step_spread: float = 0.0,
    network_spread: float = 0.0,
) -> list[Forecast]:
    """Return the forecast of each option.

    The relative error of a forecast is ``ACCURACY``, or more if the measured times vary more: those
    of the script's steps (``step_spread``), of the network and of the codec.
    """
    found = []
    for option in options:
        time = step_time(option.compute or compute, option.parts, network, ranks)
        varies_s = step_spread * time.compute_s + network_spread * time.exposed_s
        varies_s += option.spread * (time.encode_s + time.decode_s)
        found.append(Forecast(option, time, max(ACCURACY, varies_s / time.total_s)))
    return found


def mean_forecasts(measured: Sequence[Measured], ranks: int) -> list[Forecast]:
    """Return the means of the forecasts of several measurements, with the largest errors."""
    found = []
    for each in zip(*(forecasts(m[0], m[1], m[2], ranks, *m[3:]) for m in measured), strict=True):
        times = zip(*(forecast.time for forecast in each), strict=True)
        mean = StepTime(*map(statistics.fmean, times))
        found.append(Forecast(each[0].option, mean, max(forecast.error for forecast in each)))
    return found


class Advice(NamedTuple):
    """The recommended forecast (None if there is no clear gain) and the reason in words.

    ``unclear``: the fastest forecast, if it gains, but not in its whole range.
    """

    best: Forecast | None
    why: str
    unclear: Forecast | None = None


def advise(found: Sequence[Forecast]) -> Advice:
    """Return the advice on ``found``, whose first forecast is that of ``none``.

    A recipe qualifies if it saves 5 % of the time of ``none`` and gains even at the lower end of
    its range. Of those that may be as fast as the fastest, the one of the best quality is
    recommended; a poor one not if one that is not takes at most 5 % longer.
    """
    none, *others = found
    worth_s = _WORTH * none.time.total_s
    fast = [forecast for forecast in others if forecast.time.total_s < worth_s]
    clear = [forecast for forecast in fast if forecast.speed_up(none)[0] > 1]
    best = min(clear or fast or others or [none], key=lambda forecast: forecast.time.total_s)
    if not fast:
        return Advice(None, _no_gain(none, best))
    if clear:
        best = _best(clear, best)
    low, gain, high = best.speed_up(none)
    label, gains = best.option.label, f"{gain:.2f} times as fast ({low:.2f} to {high:.2f})"
    fp16 = next((forecast for forecast in others if forecast.option.label == "fp16"), best)
    if fp16 is not best:
        ratio = fp16.time.total_s / best.time.total_s
        gains += f", {ratio:.2f} times as fast as fp16 does"
    if clear:
        return Advice(best, f"{label} is expected to make a step {gains}")
    why = f"no clear gain: {label}, the fastest recipe, is forecast to make a step {gains}"
    return Advice(None, why, best)


def _best(clear: Sequence[Forecast], fastest: Forecast) -> Forecast:
    """Return the forecast to recommend of those that gain clearly."""
    near = [forecast for forecast in clear if forecast.may_be_as_fast_as(fastest)]
    best = min(near, key=lambda forecast: forecast.quality)
    if not best.is_poor:
        return best
    most_s = best.time.total_s / _WORTH
    better = [f for f in clear if f.time.total_s <= most_s and not f.is_poor]
    return min(better, key=lambda forecast: forecast.quality, default=best)


def _no_gain(none: Forecast, best: Forecast) -> str:
    own = none.time
    hidden_s = max(0.0, own.exchange_s - own.exposed_s)
    why = (
        f"no gain expected: the dense exchange takes {1e3 * own.exchange_s:.1f} ms, of which "
        f"{1e3 * hidden_s:.1f} ms hide behind the backward pass, so at most "
        f"{1e3 * own.exposed_s:.1f} of {1e3 * own.total_s:.1f} ms could be saved"
    )
    if best is not none:
        codec_s = best.time.encode_s + best.time.decode_s
        why += (
            f"; {best.option.label}, the fastest recipe, takes {1e3 * codec_s:.1f} ms to encode "
            f"and decode and leaves {1e3 * best.time.exposed_s:.1f} ms of exchange"
        )
    return why


def compute_of(
    step_s: float, option: Option, network: Network, ranks: int, rank: Compute
) -> Compute:
    """Return the computation with which ``option`` takes ``step_s`` in the model, by bisection.

    ``rank``: its other fields.
    """
    low, high = 0.0, step_s
    for _ in range(60):
        middle = (low + high) / 2
        compute = replace(rank, total_s=middle)
        longer = step_time(compute, option.parts, network, ranks).total_s > step_s
        low, high = (low, middle) if longer else (middle, high)
    return replace(rank, total_s=low)
