"""One rank's exchanges, step by step: state that commits or vanishes, and what it all cost.

The engine runs the schemes' rounds for whoever owns a network; it never calls one. Schemes are
pure, so everything that lasts longer than a step lies here.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.kernels.cuda import Device, on_host
from horovod_fftcomp.monitor.not_finite import bad_tensors
from horovod_fftcomp.monitor.residual_alarm import DEFAULT_THRESHOLD, ResidualAlarm
from horovod_fftcomp.schemes import (
    GRADIENT_UNITS,
    MEASURE_EVERY,
    Context,
    Exchange,
    Outcome,
    Round,
    Scheme,
    State,
    Tensor,
)
from horovod_fftcomp.types import Array

if TYPE_CHECKING:
    from horovod_fftcomp.engine.device_commit import Verdicts
    from horovod_fftcomp.engine.shadow_check import ShadowCheck


@dataclass
class Costs:
    """Sums since the start, on this rank."""

    sent_nbytes: int = 0
    received_nbytes: int = 0
    inside_nbytes: int = 0  # handed to rounds within a node, which the others do not count
    collectives: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    skipped_steps: int = 0
    relative_error: float = 0.0
    total_error: float = 0.0
    similarity: float | None = None


class Result(NamedTuple):
    """What a ``Work`` has made: the next round, or the outcome after the last.

    ``began``, ``ended``: ``time.perf_counter()``, the same clock in all threads.
    """

    bucket: int
    made: Round | Outcome
    began: float
    ended: float


# What a bucket computes before its first round, between two, or after its last. Any thread may call
# it, once: it runs its own bucket's exchange and touches nothing else of the engine. It reads
# gradients and state, which must not change meanwhile.
Work = Callable[[], Result]


def _run(bucket: int, exchange: Exchange, output: Array | None) -> Result:
    began = time.perf_counter()
    made: Round | Outcome
    try:
        made = next(exchange) if output is None else exchange.send(output)
    except StopIteration as stop:
        made = stop.value
    return Result(bucket, made, began, time.perf_counter())


_TAKEN = np.empty(0, np.float32)  # in the place of a sum


def _verdicts_of(device: Device) -> Verdicts:
    from horovod_fftcomp.engine.device_commit import Verdicts  # not for whoever has no GPU

    return Verdicts(device)


class Engine:
    """All buckets of one compressor on one rank.

    A step is: ``start`` each bucket, ``advance`` it with the output of each of its rounds, read
    ``sums``. The new state waits until ``settle``: it is committed if every part of the step was
    finite on every rank, and dropped otherwise, so a step that an AMP scaler skips leaves no
    trace. All ranks see the same facts and decide alike without another message.

    With a ``device`` gradients may be its arrays. What it cannot compute is computed on the host;
    what it can is launched, and never waited for.

    One thread owns an engine. Whoever wants to compute in another takes apart what ``start`` and
    ``advance`` do: ``begin`` or ``proceed``, the ``Work`` that they return, and ``accept``. Until
    all work of a step is accepted, call no method that changes step, state or buckets.
    """

    def __init__(
        self, buckets: Sequence[Bucket], rank: int, world_size: int, device: Device | None = None
    ) -> None:
        self.device = device
        self._verdicts = None if device is None else _verdicts_of(device)
        self.shadow: ShadowCheck | None = None  # of what the device computes
        self._there: frozenset[int] = frozenset()  # the buckets that it computes
        self._skipped_there = 0  # steps that the device is known to have skipped
        # Of steps that were measured there: what waits for the verdict, outcomes, loss scale.
        self._unread: list[tuple[Callable[[], Array], dict[int, Outcome], float]] = []
        self._verdict: Callable[[], Array] | None = None  # of the step that is being settled
        self.buckets = list(buckets)
        self.costs = Costs()
        self.alarm = ResidualAlarm()
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.loss_scale = 1.0
        self._state: list[State] = [{} for _ in self.buckets]
        self._running: dict[int, Exchange] = {}
        self._inside: set[int] = set()  # buckets whose present round stays within a node
        self._outcomes: dict[int, Outcome] = {}
        self._sent: dict[int, list[Round]] = {}  # of buckets under way
        self.bad: dict[str, bool] = {}  # of this step, see ``bad_tensors``
        self._finite = True
        self._observed = False

    def scheme(self, bucket: int) -> Scheme:
        """Return the scheme that a bucket runs in the present step."""
        return self.buckets[bucket].policy.at(self.step)

    def start(self, bucket: int, grads: Sequence[Array | None]) -> Round:
        """Begin this step's exchange of a bucket; see ``begin``."""
        first = self.accept(self.begin(bucket, grads)())
        assert first is not None  # a scheme has one round at least
        return first

    def advance(self, bucket: int, output: Array) -> Round | None:
        """Hand over a round's output; return the next round, or None when the sums are ready."""
        return self.accept(self.proceed(bucket, output)())

    def begin(self, bucket: int, grads: Sequence[Array | None]) -> Work:
        """Return the work that makes a bucket's first round of this step.

        ``grads``: flat float32, one for each tensor; None for a frozen one, which sends zeros and
        keeps its state.
        """
        if bucket in self._running or bucket in self._outcomes:
            raise ValueError(f"bucket {bucket} has been started in this step already")
        tensors, scheme, device = self.buckets[bucket].tensors, self.scheme(bucket), self.device
        if device is not None and not scheme.runs_on_device(tensors):
            grads = [None if grad is None else on_host(grad, device) for grad in grads]
            self._state[bucket] = self._state_on_host(bucket)
            device = None
        if self.shadow is not None and device is not None:
            scheme = self.shadow.followed(bucket, scheme)
        context = Context(self.step, self.rank, self.world_size, self.loss_scale, device)
        exchange = scheme.exchange(tensors, grads, self._state[bucket], context)
        self._running[bucket] = exchange
        self._there = self._there - {bucket} if device is None else self._there | {bucket}
        return partial(_run, bucket, exchange, None)

    def computes_on_device(self, bucket: int) -> bool:
        """Tell whether a bucket's exchange, once begun, is computed by the device."""
        return bucket in self._there

    def proceed(self, bucket: int, output: Array) -> Work:
        """Return the work that goes on with a round's output."""
        if bucket not in self._inside:
            self.costs.received_nbytes += output.nbytes
        return partial(_run, bucket, self._running[bucket], output)

    def accept(self, result: Result) -> Round | None:
        """Enter what a work has made; return the next round, or None when the sums are ready.

        What ends in a round counts as encoding, what ends in sums as decoding.
        """
        seconds = result.ended - result.began
        if isinstance(result.made, Outcome):
            self.costs.decode_s += seconds
            self._outcomes[result.bucket] = result.made
            del self._running[result.bucket]
            sent = self._sent.pop(result.bucket, [])
            if not result.made.finite:
                tensors = self.buckets[result.bucket].tensors
                self.bad |= bad_tensors(tensors, result.made.sums, sent)
            return None
        self.costs.encode_s += seconds
        round_ = result.made
        sent = self._sent.setdefault(result.bucket, [])
        if not sent or sent[-1].data.dtype == np.uint8:  # no values yet; more is not looked at
            sent.append(round_)
        self.costs.collectives += round_.among != ()
        if round_.inside:
            self._inside.add(result.bucket)
            self.costs.inside_nbytes += round_.data.nbytes
        else:
            self._inside.discard(result.bucket)
            self.costs.sent_nbytes += round_.data.nbytes
        return round_

    def sums(self, bucket: int) -> list[Array]:
        """Return the sums over ranks of a bucket whose rounds are done."""
        return self._outcomes[bucket].sums

    def take_sum(self, bucket: int, position: int) -> Array:
        """Return one of ``sums``, once: its memory is the caller's, and free when he lets it go."""
        sums = self._outcomes[bucket].sums
        total, sums[position] = sums[position], _TAKEN
        return total

    def observe(self, finite: bool) -> None:
        """Report whether a tensor that was exchanged elsewhere came out finite."""
        self._finite = self._finite and finite
        self._observed = True

    def observe_on_device(self, not_finite: Any) -> None:
        """Report the same by a word of the device, not 0 if the tensor is not finite."""
        assert self._verdicts is not None
        self._verdicts.observe(not_finite)
        self._observed = True

    def settle(self) -> None:
        """End the step: commit its new state if all of it was finite, else drop it."""
        if self._running:
            raise ValueError(f"buckets {sorted(self._running)} are still under way")
        outcomes, finite = self._outcomes, self._finite
        if not outcomes and not self._observed:
            return
        finite = finite and all(outcome.finite for outcome in outcomes.values())
        if self._verdicts is not None:
            finite = self._close_on_device(self._verdicts, outcomes, finite)
        self.abandon()
        self.step += 1
        if not finite:
            self.costs.skipped_steps += 1
            return
        for bucket, outcome in outcomes.items():
            self._state[bucket] = outcome.state
        if any(o.on_device and o.on_device.measured for o in outcomes.values()):
            self._read_measured()  # measured so many steps ago that nobody waits
            assert self._verdict is not None
            light = {bucket: outcome.measured_alone() for bucket, outcome in outcomes.items()}
            self._unread.append((self._verdict, light, self.loss_scale))
        else:
            self._take_down(outcomes, self.loss_scale)

    def read_device(self) -> None:
        """Wait for the device, and take down what it has measured and skipped."""
        if self._verdicts is not None:
            skipped = self._verdicts.skipped()
            self.costs.skipped_steps += skipped - self._skipped_there
            self._skipped_there = skipped
            self._read_measured()

    def _read_measured(self) -> None:
        unread, self._unread = self._unread, []
        for verdict, outcomes, loss_scale in unread:
            if verdict()[0]:
                continue  # the step did not count
            for bucket, outcome in outcomes.items():
                if outcome.on_device is not None and outcome.on_device.measured is not None:
                    outcomes[bucket] = outcome._replace(**outcome.on_device.measured())
            self._take_down(outcomes, loss_scale)

    def _take_down(self, outcomes: dict[int, Outcome], loss_scale: float) -> None:
        self.costs.total_error += self._missed(outcomes) / loss_scale**2
        self._measure(outcomes)  # last: its warnings may be errors to this rank's user

    def _close_on_device(
        self, verdicts: Verdicts, outcomes: dict[int, Outcome], finite: bool
    ) -> bool:
        """Close the device's part of a step; return whether the step counts, for all one knows.

        Where the host alone knows that it does not, nothing is left for the device to decide; and
        where the host keeps state as well, both have to know.
        """
        there = {b: o.on_device for b, o in outcomes.items() if o.on_device is not None}
        verdicts.inspect(list(there.values()))
        keeps_state = any(o.state for b, o in outcomes.items() if b not in there)
        if finite and keeps_state:
            finite = verdicts.is_finite(list(there.values()))
        if not finite:
            return False
        self._verdict = verdicts.close(list(there.values()))
        return True

    def _missed(self, outcomes: dict[int, Outcome]) -> float:
        """Return the sum of squares of what is left unsent.

        Where it is measured seldom, each step until the next time is taken to leave as much.
        """
        return sum(
            MEASURE_EVERY * sum(energy.left for energy in outcome.energies.values())
            if outcome.missed is None
            else outcome.missed
            for outcome in outcomes.values()
        )

    def _measure(self, outcomes: dict[int, Outcome]) -> None:
        """Take down relative errors, and warn of residuals that keep growing."""
        wanted = left = 0.0
        similar = [o.similarity for o in outcomes.values() if o.similarity is not None]
        if chosen := sum(similarity.chosen for similarity in similar):
            self.costs.similarity = sum(similarity.common for similarity in similar) / chosen
        for bucket, outcome in sorted(outcomes.items(), key=lambda item: item[0]):
            policy = self.buckets[bucket].policy
            density, growth = policy.density(self.step) or 1.0, policy.at(self.step).accumulation()
            self.alarm.threshold = max(DEFAULT_THRESHOLD, growth / density)
            for name, energy in outcome.energies.items():
                wanted += energy.wanted
                left += energy.left
                warning = self.alarm.observe(name, energy.gradient**0.5, energy.left**0.5)
                if warning is not None:
                    warnings.warn(warning, RuntimeWarning, stacklevel=2)
        if wanted > 0:
            self.costs.relative_error = (left / wanted) ** 0.5

    def abandon(self) -> None:
        """Forget a step that was broken off; its new state vanishes."""
        self._running, self._outcomes, self._sent, self.bad = {}, {}, {}, {}
        self._finite, self._observed = True, False
        if self._verdicts is not None:
            self._verdicts.forget()

    def follow_loss_scale(self, scale: float) -> None:
        """Bring the state to gradients that are multiplied by ``scale`` from now on.

        What is carried over was measured in the old units; a power of two changes it exactly.
        """
        if scale != self.loss_scale:
            factor = np.float32(scale / self.loss_scale)
            for state in self._state:
                for kind in GRADIENT_UNITS:
                    for array in state.get(kind, {}).values():
                        if isinstance(array, np.ndarray) or self.device is None:
                            array *= factor
                        else:
                            self.device.scale(array, factor)
            self.loss_scale = scale

    def tensor(self, name: str) -> tuple[int, Tensor]:
        """Return (bucket, tensor) of a name; ValueError if no bucket holds it."""
        for number, bucket in enumerate(self.buckets):
            for tensor in bucket.tensors:
                if tensor.name == name:
                    return number, tensor
        raise ValueError(f"no bucket holds a tensor named {name!r}; it travels dense")

    def choices(self) -> dict[str, str]:
        """Return what is chosen for each tensor whose recipe chooses, in words."""
        return {
            tensor.name: choice
            for number, (bucket, state) in enumerate(zip(self.buckets, self._state, strict=True))
            for tensor in bucket.tensors
            if (choice := self.scheme(number).choice_of(state, tensor)) is not None
        }

    def residual(self, name: str) -> Array:
        """Return what is not sent yet of a tensor, float32 in its shape, as last committed."""
        bucket, tensor = self.tensor(name)
        return self.scheme(bucket).residual(self._state_on_host(bucket), tensor)

    def residual_norm(self) -> float:
        """Return the norm of what is not sent yet, of all tensors together."""
        names = [tensor.name for bucket in self.buckets for tensor in bucket.tensors]
        squares = [np.square(self.residual(name), dtype=np.float64).sum() for name in names]
        return float(np.sum(squares)) ** 0.5

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, settled; see ``checkpoint`` for that of all ranks."""
        self.settle()
        merged: dict[str, dict[str, Array]] = {}
        for bucket in range(len(self._state)):
            for kind, arrays in self._state_on_host(bucket).items():
                copies = {name: array.copy() for name, array in arrays.items()}
                merged.setdefault(kind, {}).update(copies)
        return {
            "version": checkpoint.FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": self.step,
            "loss_scale": self.loss_scale,
            "formats": self._formats(self.step),
            "state": merged,
        }

    def _state_on_host(self, bucket: int) -> State:
        """Return a bucket's state as NumPy arrays; itself, not a copy, where it is that."""
        return {
            kind: {name: on_host(array, self.device) for name, array in arrays.items()}
            for kind, arrays in self._state[bucket].items()
        }

    def _formats(self, step: int) -> dict[str, str]:
        return {
            tensor.name: bucket.policy.at(step).state_format(tensor)
            for bucket in self.buckets
            for tensor in bucket.tensors
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore one rank's state or its part of all ranks'; ValueError if it cannot fit."""
        part = checkpoint.part_of(saved, self.rank, self.world_size)
        names = {tensor.name for bucket in self.buckets for tensor in bucket.tensors}
        for kind, arrays in part["state"].items():
            foreign = sorted(set(arrays) - names)
            if foreign:
                raise ValueError(f"{kind} of unknown tensors {foreign}; is this another model?")
        states: list[State] = [
            {
                kind: {t.name: arrays[t.name].copy() for t in bucket.tensors if t.name in arrays}
                for kind, arrays in part["state"].items()
            }
            for bucket in self.buckets
        ]
        kept = {name for arrays in part["state"].values() for name in arrays}
        for name, expected in self._formats(part["step"]).items():
            if name in kept and part["formats"][name] != expected:
                raise ValueError(
                    f"the state of {name!r} is a {part['formats'][name]}, expected a {expected}; "
                    "load it with the recipe, block and model that it was saved with"
                )
        for bucket, state in zip(self.buckets, states, strict=True):
            scheme = bucket.policy.at(part["step"])
            for tensor in bucket.tensors:
                _check_arrays(tensor, state, scheme.state_arrays(tensor, state))
        self.abandon()
        if self._verdicts is not None:
            self._verdicts.reset()
        self._unread, self._skipped_there = [], 0
        self.step = part["step"]
        self.loss_scale = part["loss_scale"]
        self._state = states


def _check_arrays(
    tensor: Tensor, state: State, expected: Mapping[str, tuple[np.dtype, int]]
) -> None:
    """Raise ValueError if an array of a tensor's state is not what its scheme takes."""
    for kind, arrays in state.items():
        if tensor.name not in arrays:
            continue
        array = arrays[tensor.name]
        if kind not in expected:
            raise ValueError(f"the {kind} of {tensor.name!r} is of no use to its recipe")
        dtype, size = expected[kind]
        if (array.dtype, array.shape) != (dtype, (size,)):
            raise ValueError(
                f"the {kind} of {tensor.name!r} is {array.dtype} of shape {list(array.shape)}, "
                f"expected {dtype} of [{size}]; was the file cut or converted?"
            )
