"""Engine: runs one rank's exchanges, keeps their state and commits or drops it each step.

The engine calls no network: it returns rounds, and its caller hands in their outputs. Schemes are
pure, so everything that lasts longer than a step is kept here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.buckets import Bucket, decided_states
from horovod_fftcomp.engine.device_commit import DeviceCommit
from horovod_fftcomp.engine.work import Costs, Work
from horovod_fftcomp.errors import warn
from horovod_fftcomp.kernels.cuda import Device, on_host
from horovod_fftcomp.kernels.ops import Into
from horovod_fftcomp.kernels.threads import get_own_cores
from horovod_fftcomp.monitor.not_finite import bad_tensors
from horovod_fftcomp.monitor.residual_alarm import DEFAULT_THRESHOLD, ResidualAlarm
from horovod_fftcomp.schemes import (
    GRADIENT_UNITS,
    MEASURE_EVERY,
    Context,
    Exchange,
    Grads,
    Measured,
    Outcome,
    Round,
    Scheme,
    State,
)
from horovod_fftcomp.schemes.hierarchical import Hierarchical
from horovod_fftcomp.schemes.parts import parts_in, rejoined
from horovod_fftcomp.schemes.shards import folded
from horovod_fftcomp.schemes.state import multiply, on_the_host
from horovod_fftcomp.types import Array, Choice, OldState, Tensor


class _Unread(NamedTuple):
    """Measurements of a step that are still on the device, by bucket.

    ``dropped`` waits for the decision on the step.
    """

    step: int
    dropped: Callable[[], Array]
    measured: dict[int, Callable[[], Measured]]
    loss_scale: float


class _Before(NamedTuple):
    """What a step replaces, for ``discard``; measurements only if it may have some itself."""

    step: int
    state: list[State]
    costs: Costs
    counts: tuple[list[int], list[int]]
    measured: tuple[Any, ...] | None


class Engine:
    """Exchanges, state and costs of all buckets of one compressor on one rank.

    A step is: ``resume`` each bucket with its gradients, then with each of its rounds' outputs, and
    read ``sums``. ``settle`` ends the step: it commits the new state if every part of the step was
    finite on every rank, and drops it otherwise, so that a step that an AMP scaler skips changes no
    residual. All ranks have the same information and decide alike without another message.

    With a ``device`` gradients may be device arrays. Schemes that cannot run on it run on the host;
    those that can are launched without waiting.

    One thread owns an engine. To compute in another thread, run the ``Work`` of ``prepare`` there
    and pass it to ``resume`` afterwards. Until all work of a step has been passed, call no method
    that changes step, state or buckets.
    """

    def __init__(
        self, buckets: Sequence[Bucket], rank: int, world_size: int, device: Device | None = None
    ) -> None:
        get_own_cores.cache_clear()
        self.device = device
        self._commit = None if device is None else DeviceCommit(device)
        self._there: set[int] = set()  # buckets that the device computes
        self.n_rounds = [0] * len(buckets)  # of each bucket's last exchange
        # Of each bucket, how many exchanges there were, and how many of them compressed.
        self.n_exchanges, self.n_compressed = [0] * len(buckets), [0] * len(buckets)
        self.momenta = [0.0] * len(buckets)  # of first moments, if these were exchanged last
        self._skipped_there = 0  # steps that the device is known to have skipped
        self._unread: list[_Unread] = []  # steps measured on the device
        self._dropped: Callable[[], Array] | None = None  # of the step that is being settled
        self.buckets = list(buckets)
        self.costs = Costs()
        self.alarm = ResidualAlarm()
        self.errors: dict[str, float] = {}  # relative ones, of tensors, as last measured
        self.rank = rank
        self.world_size = world_size
        self.step = 0
        self.loss_scale = 1.0
        self.state: list[State] = [{} for _ in self.buckets]
        self._running: dict[int, Exchange] = {}
        # Of a bucket's current round between nodes: how much of its output this rank has sent.
        self._own_nbytes: dict[int, int] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._sent: dict[int, list[Round]] = {}  # of running buckets
        self.bad: dict[str, bool] = {}  # of this step, see ``bad_tensors``
        self._before: _Before | None = None  # of this step or, until the next one, of the last
        self.in_place: float | None = None  # factor of sums written over gradients; None: none are
        self.is_used = False  # whether an optimizer has taken a step with the last sums
        self._is_kept = False  # whether the host has committed the last step
        self._finite = True  # as far as the host has seen this step
        self._observed = False

    def scheme(self, bucket: int) -> Scheme:
        """Return the scheme that a bucket runs in the current step."""
        return self.buckets[bucket].policy.at(self.step)

    def resume(self, bucket: int, data: Grads | Array | Work) -> Round | Outcome:
        """Begin a bucket's exchange in this step, or continue it after a round.

        ``data``: see ``prepare``, or the work that it returned, once it has run. Returns the next
        round, or the outcome when the sums are ready. Work that ends in a round counts as encoding,
        work that ends in an outcome as decoding.
        """
        work = data if isinstance(data, Work) else self.prepare(bucket, data).run()
        made = work.made
        if isinstance(made, Outcome):
            self.costs.decode_s += work.ended - work.began
            self._outcomes[bucket] = made
            del self._running[bucket]
            sent = self._sent.pop(bucket, [])
            if not made.flags.finite:
                self._finite = False
                self.bad |= bad_tensors(self.buckets[bucket].tensors, made.sums, sent)
            return made
        assert made is not None  # else the work has not run
        self.costs.encode_s += work.ended - work.began
        sent = self._sent.setdefault(bucket, [])
        if not sent or sent[-1].data.dtype == np.uint8:  # up to the first with values
            sent.append(made)
        self.costs.collectives += made.among != ()
        if made.inside:
            self._own_nbytes.pop(bucket, None)
            self.costs.inside_nbytes += made.data.nbytes
        else:
            self._own_nbytes[bucket] = made.own_nbytes(self.rank)
            self.costs.sent_nbytes += made.data.nbytes
            if made.divided:
                self.costs.sums_nbytes += made.data.nbytes
        return made

    def prepare(self, bucket: int, data: Grads | Array) -> Work:
        """Return the work of beginning or continuing a bucket's exchange; see ``resume``.

        ``data``: first the gradients, a sequence of one flat float32 array for each tensor, or None
        for a frozen one, which sends zeros and keeps its state; then the output of each round.
        """
        if not isinstance(data, Sequence):
            if bucket in self._own_nbytes:
                self.costs.received_nbytes += data.nbytes - self._own_nbytes[bucket]
            return Work(self._running[bucket], data)
        if bucket in self._running or bucket in self._outcomes:
            raise ValueError(f"bucket {bucket} has been started in this step already")
        self._mark()
        tensors, scheme, grads = self.buckets[bucket].tensors, self.scheme(bucket), data
        context = Context(self.step, self.rank, self.world_size, self.loss_scale, self.device)
        if self.device is not None and not scheme.runs_on_device(tensors):
            context, grads, self.state[bucket] = on_the_host(context, grads, self.state[bucket])
        if self.in_place is not None and all(grad is not None for grad in data):
            context = context._replace(into=Into(data, self.in_place))
        exchange = scheme.exchange(tensors, grads, self.state[bucket], context)
        self._running[bucket], traits = exchange, scheme.traits
        self.n_exchanges[bucket] += 1
        self.n_compressed[bucket] += traits.compresses
        self.momenta[bucket] = traits.momentum * traits.sends_moments
        self.n_rounds[bucket] = len(scheme.rounds)
        (self._there.discard if context.device is None else self._there.add)(bucket)
        return Work(exchange, None)

    def computes_on_device(self, bucket: int) -> bool:
        """Return whether the device computes a bucket's exchange; valid once it has begun."""
        return bucket in self._there

    def sums(self, bucket: int) -> list[Array]:
        """Return the sums over ranks of a bucket whose rounds are complete."""
        return self._outcomes[bucket].sums

    def observe(self, finite: bool) -> None:
        """Report whether a tensor that was exchanged outside the engine is finite."""
        self._mark()
        self._finite = self._finite and finite
        self._observed = True

    def observe_on_device(self, not_finite: Any) -> None:
        """Report the same by a device word that is nonzero if the tensor is not finite."""
        assert self._commit is not None
        self._mark()
        self._commit.observe(not_finite)
        self._observed = True

    def is_finite(self) -> bool:
        """Return whether all of this step is finite on every rank; waits for the device."""
        flags = [o.flags for o in self._outcomes.values() if o.flags.not_finite is not None]
        return self._finite and (self._commit is None or self._commit.is_finite(flags))

    def settle(self) -> None:
        """End the step: commit its new state if everything was finite, else drop it."""
        if self._running:
            raise ValueError(f"buckets {sorted(self._running)} are still under way")
        outcomes, finite = self._outcomes, self._finite
        if not outcomes and not self._observed:
            return
        self._dropped = None
        if self._commit is not None:
            finite = self._close_on_device(self._commit, outcomes, finite)
        self.abandon()
        step, self.step, self._is_kept = self.step, self.step + 1, finite
        if self.is_used:
            self._before = None
        if not finite:
            self.costs.skipped_steps += 1
            return
        for bucket, outcome in outcomes.items():
            self.state[bucket] = outcome.state
        for number, state in decided_states(self.buckets, step, self._state_on_host).items():
            self.state[number] = {kind: dict(arrays) for kind, arrays in state.items()}
        measured = {b: o.measured for b, o in outcomes.items() if o.measured is not None}
        if any(outcomes[bucket].flags.not_finite is not None for bucket in measured):
            self._read_measured()  # old enough to be read without waiting
            assert self._dropped is not None
            self._unread.append(_Unread(step, self._dropped, measured, self.loss_scale))
        elif measured:
            self._record({bucket: values() for bucket, values in measured.items()}, self.loss_scale)

    def _mark(self) -> None:
        """Remember, at the beginning of a step, what it replaces."""
        if self._before is not None and self._before.step == self.step:
            return
        measured = self._measurements() if self.step % MEASURE_EVERY == 0 else None
        counts = self.n_exchanges.copy(), self.n_compressed.copy()
        costs = dataclasses.replace(self.costs)
        self._before = _Before(self.step, self.state.copy(), costs, counts, measured)
        self.is_used = False

    def _measurements(self) -> tuple[Any, ...]:
        costs = self.costs
        errors = costs.relative_error, costs.total_error, costs.similarity
        return copy.deepcopy((self.alarm, self.errors, errors))

    def note_used(self) -> None:
        """Note that an optimizer takes a step with the last sums; frees what they replaced."""
        self.is_used = True
        if self._before is not None and self._before.step < self.step:
            self._before = None

    def keeps_last(self) -> bool:
        """Return whether the last step's state is kept; False if there is none. May wait."""
        if self._outcomes:
            return self.is_finite() and any(outcome.state for outcome in self._outcomes.values())
        dropped = self._dropped is not None and bool(self._dropped()[0])
        kept = (arrays for state in self.state for arrays in state.values())
        return self._is_kept and not dropped and any(kept)

    def is_discardable(self) -> bool:
        """Return whether ``discard`` can undo the last step."""
        before = self._before
        return before is not None and before.step < self.step and not self.is_used

    def discard(self) -> None:
        """Undo the last step, which is settled: state, step and counts become what they were."""
        before = self._before
        if before is None or not self.is_discardable():
            raise ValueError(
                "there is no exchange to discard: none was made since the last discard() or "
                "load_state_dict(), or an optimizer has taken a step with its averages"
            )
        self.read_device()
        before, costs = self._before or before, self.costs
        dropped = self._dropped is not None and bool(self._dropped()[0])
        skipped = costs.skipped_steps - (dropped or not self._is_kept)
        # Seconds were spent, and older steps may have been read meanwhile.
        kept = {"encode_s": costs.encode_s, "decode_s": costs.decode_s, "skipped_steps": skipped}
        vars(costs).update(vars(before.costs) | kept)  # others may hold the object
        self.n_exchanges, self.n_compressed = before.counts
        if before.measured is not None:
            self.alarm, self.errors, errors = before.measured
            costs.relative_error, costs.total_error, costs.similarity = errors
        self.step, self.state = before.step, before.state
        self._before, self._dropped, self._is_kept = None, None, False

    def read_device(self) -> None:
        """Wait for the device, and record its measurements and skipped steps."""
        if self._commit is not None:
            skipped = self._commit.skipped()
            self.costs.skipped_steps += skipped - self._skipped_there
            self._skipped_there = skipped
            self._read_measured()

    def _read_measured(self) -> None:
        unread, self._unread = self._unread, []
        for step, dropped, measured, loss_scale in unread:
            if not dropped()[0]:
                self._record({bucket: read() for bucket, read in measured.items()}, loss_scale)
                if self._before is not None and step < self._before.step:
                    self._before = self._before._replace(measured=self._measurements())

    def _record(self, measured: dict[int, Measured], loss_scale: float) -> None:
        self.costs.total_error += _missed(measured) / loss_scale**2
        self._measure(measured)  # last: its warnings may be errors to this rank's user

    def _close_on_device(
        self, commit: DeviceCommit, outcomes: dict[int, Outcome], finite: bool
    ) -> bool:
        """Commit the device's part of a step; return whether the host commits its part.

        If the host already knows that something was not finite, the device has nothing to decide.
        If the host has new state as well, it waits for the device's flags, so that both agree.
        """
        there = {b: o.flags for b, o in outcomes.items() if o.flags.not_finite is not None}
        flags = list(there.values())
        commit.inspect(flags)
        keeps_state = any(o.state for b, o in outcomes.items() if b not in there)
        if finite and keeps_state:
            finite = commit.is_finite(flags)
        if not finite:
            return False
        changes = (
            (self.state[bucket].get(kind, outcomes[bucket].first.get(kind, {})).get(name), array)
            for bucket in there
            for kind, arrays in outcomes[bucket].state.items()
            for name, array in arrays.items()
        )
        self._dropped = commit.close(flags, changes)
        return True

    def _measure(self, measured: dict[int, Measured]) -> None:
        """Record relative errors, and warn of residuals that keep growing."""
        wanted = left = 0.0
        similar = [m.similarity for m in measured.values() if m.similarity is not None]
        if chosen := sum(similarity.chosen for similarity in similar):
            self.costs.similarity = sum(similarity.common for similarity in similar) / chosen
        for bucket in sorted(measured):
            policy = self.buckets[bucket].policy
            growth, density = policy.at(self.step).traits.accumulation, policy.density(self.step)
            self.alarm.threshold = max(DEFAULT_THRESHOLD, growth / (density or 1.0))
            for name, energy in measured[bucket].energies.items():
                wanted += energy.wanted
                left += energy.left
                if energy.wanted > 0:
                    self.errors[name] = (energy.left / energy.wanted) ** 0.5
                warning = self.alarm.observe(name, energy.gradient**0.5, energy.left**0.5)
                if warning is not None:
                    warn(warning)
        if wanted > 0:
            self.costs.relative_error = (left / wanted) ** 0.5

    def abandon(self) -> None:
        """Discard the running step; its new state is dropped."""
        self._running, self._outcomes, self._sent, self.bad = {}, {}, {}, {}
        self._finite, self._observed = True, False
        if self._commit is not None:
            self._commit.forget()

    def follow_loss_scale(self, scale: float) -> None:
        """Rescale the state for gradients with loss scale ``scale``.

        State is in units of scaled gradients. If the ratio of the scales is a power of two, the
        change is exact.
        """
        if scale != self.loss_scale:
            factor = scale / self.loss_scale
            for state in self.state:
                for kind in GRADIENT_UNITS:
                    multiply(state.get(kind, {}).values(), factor, self.device)
            self.loss_scale = scale

    def tensor(self, name: str) -> tuple[int, Tensor]:
        """Return (bucket, tensor) of a name; ValueError if no bucket holds it."""
        for number, bucket in enumerate(self.buckets):
            for tensor in bucket.tensors:
                if tensor.name == name:
                    return number, tensor
        raise ValueError(f"no bucket holds a tensor named {name!r}; it is sent dense")

    def choices(self) -> dict[str, Choice]:
        """Return by name what is chosen for each tensor whose recipe chooses (auto)."""
        return {
            tensor.name: choice
            for number, (bucket, state) in enumerate(zip(self.buckets, self.state, strict=True))
            if (tuner := self.scheme(number).tuner) is not None
            for tensor in bucket.tensors
            if (choice := tuner.choice(state, tensor)) is not None
        }

    def share_nbytes(self, bucket: int, tensor: Tensor) -> float:
        """Return the bytes that a rank sends of a tensor in the present step; see ``Scheme``."""
        return self.scheme(bucket).share_nbytes(tensor, self.state[bucket], self.world_size)

    def residual(self, name: str) -> Array:
        """Return the last committed residual of a tensor, float32 in its shape."""
        bucket, tensor = self.tensor(name)
        return self.scheme(bucket).residual(self._state_on_host(bucket), tensor)

    def residual_norm(self) -> float:
        """Return the norm of the residuals of all tensors together."""
        names = [tensor.name for bucket in self.buckets for tensor in bucket.tensors]
        squares = [np.square(self.residual(name), dtype=np.float64).sum() for name in names]
        return float(np.sum(squares)) ** 0.5

    def state_dict(self, movable: bool = False) -> dict[str, Any]:
        """Settle the step and return this rank's state; see ``checkpoint`` for all ranks'.

        ``movable``: for any number of ranks, so without second residuals, which belong to pieces
        for this number: they are added to the first ones.
        """
        self.settle()
        merged: dict[str, dict[str, Array]] = {}
        for number, bucket in enumerate(self.buckets):
            state: OldState = self._state_on_host(number)
            if movable:
                tensors = [part.tensor for part in parts_in(state, bucket.tensors)]
                state = folded(self.scheme(number), tensors, state)
            for kind, arrays in state.items():
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
        """Return a bucket's state as NumPy arrays, without copies of those that are already."""
        return {
            kind: {name: on_host(array, self.device) for name, array in arrays.items()}
            for kind, arrays in self.state[bucket].items()
        }

    def _formats(self, step: int) -> dict[str, str]:
        return {
            tensor.name: bucket.policy.at(step).state_format(tensor)
            for bucket in self.buckets
            for tensor in bucket.tensors
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore this rank's state from its own or a gathered one; ValueError if unfit."""
        part = checkpoint.part_of(saved, self.rank, self.world_size)
        tensors = [tensor for bucket in self.buckets for tensor in bucket.tensors]
        known = {p.tensor.name: p.whole.name for p in parts_in(part["state"], tensors)}
        for kind, arrays in part["state"].items():
            foreign = sorted(set(arrays) - set(known))
            if foreign:
                raise ValueError(f"{kind} of unknown tensors {foreign}; was another model saved?")
        kept = set(known.values())
        for name, expected in self._formats(part["step"]).items():
            if name in kept and part["formats"][name] != expected:
                raise ValueError(
                    f"the state of {name!r} at step {part['step']} is a {part['formats'][name]}, "
                    f"expected a {expected}; load it with the recipe, block, model and number of "
                    "dense steps at the start (warmup_steps=0 before 0.2.1) that it was saved with"
                )
        states: list[State] = []
        for bucket in self.buckets:
            scheme = bucket.policy.at(part["step"])
            tensors = [each.tensor for each in parts_in(part["state"], bucket.tensors)]
            state: OldState = {
                kind: {t.name: arrays[t.name].copy() for t in tensors if t.name in arrays}
                for kind, arrays in part["state"].items()
            }
            if not scheme.is_sharded:  # it has no second residuals
                state = folded(scheme, tensors, state)
            for tensor in tensors:
                checkpoint.check_arrays(tensor, state, scheme)
            if not isinstance(scheme, Hierarchical):
                state = rejoined(scheme, bucket.tensors, state)
            state = scheme.owned(bucket.tensors, state, self.rank, self.world_size)
            states.append({kind: dict(arrays) for kind, arrays in state.items()})
        self.abandon()
        if self._commit is not None:
            self._commit.reset()
        self._unread, self._skipped_there = [], 0
        self._before, self._dropped, self._is_kept = None, None, False
        self.step = part["step"]
        self.loss_scale = part["loss_scale"]
        self.state = states


def _missed(measured: dict[int, Measured]) -> float:
    """Return the sum of squares of the unsent values.

    If a scheme measures only every ``MEASURE_EVERY`` steps, the value counts for each of them.
    """
    return sum(
        MEASURE_EVERY * sum(energy.left for energy in values.energies.values())
        if values.missed is None
        else values.missed
        for values in measured.values()
    )
