"""What the compressors of all frameworks have in common: report, density, state, going on.

No framework and no network here: an adapter carries out the steps, and says how ranks exchange
objects.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from horovod_fftcomp import wire
from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.adapter.connection import Connection
from horovod_fftcomp.adapter.replica_check import Replicas
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.watch import Watch
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.buckets import Bucket, make_buckets
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Slot
from horovod_fftcomp.engine.policy import Scheduled, check_rules, unmatched
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.monitor.density_recovery import Recovery
from horovod_fftcomp.monitor.gradient_recorder import Recorder
from horovod_fftcomp.monitor.step_log import AddScalar, LiveView
from horovod_fftcomp.schemes import Tensor

# Every rank makes its compressors in the same order, so equal numbers mean the same one.
_numbers = itertools.count()


class StepDriver(Protocol):
    """The course of an adapter's steps; what it has counted since the start."""

    count: int
    dense_nbytes: int
    other_nbytes: int

    def times(self) -> dict[str, float]:
        """Return the seconds of ``stats`` that the engine does not know."""
        ...

    def loss_scale(self) -> float:
        """Return what gradients are multiplied by at present."""
        ...

    def settle(self) -> None:
        """Close the last step for whoever looks between two; ValueError if one is under way."""
        ...

    def close_if_complete(self) -> None:
        """Close the last step if nothing of it is under way."""
        ...

    def abandon(self) -> None:
        """Forget a step that was broken off."""
        ...


class Compressor:
    """One policy bound to the parameters of one optimizer; an adapter's ``Compression`` makes it.

    An adapter sets ``_engine``, ``_connection``, ``_steps``, ``_parameters``, ``_tensors`` and
    ``_dtypes``, in the order of the parameters.
    """

    _engine: Engine
    _connection: Connection
    _steps: StepDriver
    _parameters: Replicas
    _tensors: Sequence[Tensor]
    _dtypes: Sequence[str]
    _IN_ELASTIC_JOBS = ""  # what takes a compressor there

    def __init__(self, policy: Scheduled, settings: Settings) -> None:
        self._policy = self._first_policy = policy
        self._settings = settings
        self._rules = check_rules(settings.rules, policy)
        self._set: Any = settings.process_set
        if settings.recover and policy.density(policy.warmup_steps) is None:
            raise ValueError(f"recover was given, but recipe {policy.recipe!r} has no density")
        self._recovery = Recovery(settings.recover) if settings.recover else None
        self._changed_density: float | None = None
        self._listeners: list[Callable[[], None]] = []
        self._told_of_momentum = False

    def check_differences(self) -> None:
        """Raise UnsupportedError unless differences of weights may be sent, as of local steps."""
        for bucket in self._buckets:
            bucket.policy.at(self._policy.warmup_steps).check_differences(repr(self))
        if self._settings.grad_scaler is not None:
            raise UnsupportedError("weights have no loss scale: leave grad_scaler out")

    def _warn_of_two_momenta(self, optimizer: str, momenta: Mapping[str, object]) -> None:
        """Warn once if the recipe keeps a momentum and the ``optimizer`` too: ``momenta``."""
        own = self._policy.at(self._policy.warmup_steps).own_momentum()
        if not own or not momenta or self._told_of_momentum:
            return
        self._told_of_momentum = True
        given = ", ".join(f"{option}={value}" for option, value in momenta.items())
        warnings.warn(
            f"recipe {self._policy.recipe!r} keeps a momentum of its own ({own}), and the "
            f"optimizer {optimizer} has one too ({given}): gradients are averaged over steps "
            "twice, which trains another way than either alone. Take an optimizer without "
            "momentum, such as SGD(momentum=0), or a recipe without",
            RuntimeWarning,
            stacklevel=3,
        )

    def tensors(self) -> list[Tensor]:
        """Return names and shapes of all parameters, dense ones included, in their order."""
        return list(self._tensors)

    def on_step(self, listener: Callable[[], None]) -> None:
        """Let ``listener()`` be called whenever a step has been closed: as the next one begins."""
        self._listeners.append(listener)

    def end_training(self, error: type[BaseException]) -> None:
        """Raise ``error`` in the thread that trains: now, and after each step if it is caught.

        For a listener of ``on_step``, on all ranks at the same step.
        """
        self._listeners.append(functools.partial(self._raise, error))
        self._raise(error)

    def _raise(self, error: type[BaseException]) -> None:
        raise error

    def digest(self) -> str:
        """Return a hash of this rank's present parameters: of equal bits on all ranks equal."""
        found = hashlib.sha256()
        for number in range(len(self._parameters.names)):
            found.update(self._parameters.read(number).tobytes())
        return found.hexdigest()

    def stats(self) -> dict[str, Any]:
        """Return what this rank has sent and spent so far.

        ``dense_nbytes``: the gradients in float32; ``sent_nbytes``: what was handed to
        collectives, headers, padding and probes included; ``ratio``: their quotient;
        ``received_nbytes``: what buckets' collectives gave back; of ``ranks_per_node`` these are
        bytes between nodes, and ``inside_nbytes`` what was handed to collectives of one. Seconds:
        ``encode_s``; ``encode_hidden_s``, those of them that passed before the step's last
        gradient came; ``encode_wait_s``, in which the training thread waited for an encoding;
        ``wait_s`` (for other ranks and the network; dense tensors, which Horovod exchanges,
        excluded), ``decode_s``, ``check_s`` (of parameters between ranks, and of a GPU
        by the CPU).
        ``relative_error``: norm of what the last measured step left unsent over the norm of what
        it was to send; ``total_error``: sum over all steps of the square of what each left unsent.
        ``similarity``: of the positions that other ranks chose for all in the
        last measured step, the share that this one would have chosen; None if there were none.
        ``skipped_steps``: steps with NaN or Inf somewhere, which left no trace in
        the residuals. ``density``: the present one. ``choices``: of ``auto``, what it has chosen
        for each tensor, in words.
        """
        self._steps.close_if_complete()
        self._engine.read_device()
        costs, times, shadow = self._engine.costs, self._steps.times(), self._engine.shadow
        sent = costs.sent_nbytes + self._steps.other_nbytes
        return {
            "steps": self._steps.count,
            "dense_nbytes": self._steps.dense_nbytes,
            "sent_nbytes": sent,
            "received_nbytes": costs.received_nbytes,
            "inside_nbytes": costs.inside_nbytes,
            "ratio": self._steps.dense_nbytes / sent if sent else math.nan,
            "encode_s": costs.encode_s,
            "encode_hidden_s": times["encode_hidden_s"],
            "encode_wait_s": times["encode_wait_s"],
            "wait_s": times["wait_s"],
            "decode_s": costs.decode_s,
            "check_s": times["check_s"] + (0.0 if shadow is None else shadow.seconds),
            "relative_error": costs.relative_error,
            "total_error": costs.total_error,
            "similarity": costs.similarity,
            "skipped_steps": costs.skipped_steps,
            "collectives": costs.collectives,
            "density": self._policy.density(self._engine.step),
            "choices": self._engine.choices(),
        }

    def residual(self, name: str) -> Any:
        """Return what is not sent yet of the parameter called ``name``, float32 in its shape."""
        self._steps.settle()
        return self._engine.residual(name)

    def residual_norm(self) -> float:
        """Return the norm of what this rank has not sent yet, of all parameters together."""
        self._steps.settle()
        return self._engine.residual_norm()

    def residual_ratios(self) -> dict[str, float]:
        """Return norm of residual over norm of gradient, as last measured, for each tensor."""
        self._engine.read_device()
        return self._engine.alarm.ratios()

    def set_density(self, density: float) -> None:
        """Compress with ``density`` from the next step on; every rank has to call it alike.

        Raises ConfigMismatchError on all ranks if they ask for different densities or stand at
        different steps, and ValueError for a recipe without density.
        """
        self._steps.settle()
        handshake.compare_facts(
            self._connection.gather(
                "set_density()", {"step": self._engine.step, "density": density}
            )
        )
        self._use_density(density)

    def report(self, metric: float) -> None:
        """Report a validation metric, on every rank; more density if the first rank's worsens.

        See ``Recover``, which has to be given as ``recover=``.
        """
        if self._recovery is None:
            raise ValueError("report() needs recover=Recover(...) when the compressor is made")
        self._steps.settle()
        first = self._connection.gather("report()", float(metric))[0]
        density, step = self._policy.density(self._engine.step), self._engine.step
        if density is None or step < self._policy.warmup_steps:
            return  # nothing is compressed yet that could be to blame
        if self._recovery.observe(first) and self._recovery.raised(density) > density:
            self._use_density(self._recovery.raised(density))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and step, for this rank of as many alone.

        Arrays are NumPy's, with PyTorch tensors: ``torch.save`` and its safe loader take it. Every
        rank has others: each has to save its own, or one of them what ``gathered_state_dict``
        returns.
        """
        return self._of_framework(self._state())

    def _of_framework(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with the framework's arrays in the place of NumPy's."""
        return state

    def _state(self) -> dict[str, Any]:
        """Return ``state_dict`` with NumPy arrays."""
        self._steps.settle()
        state = {**self._engine.state_dict(), "density": self._changed_density}
        state["recovery"] = self._recovery.state_dict() if self._recovery else None
        return state

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, on all ranks; all have to call it.

        It can be loaded by any number of ranks; the sum of the residuals stays what it was.
        """
        states = self._connection.gather("gathered_state_dict()", self._state())
        return self._of_framework(checkpoint.gathered(states))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned on the same rank, or a gathered state."""
        part = checkpoint.part_of(saved, **self.place())
        before = self._recovery.state_dict() if self._recovery else None
        if self._recovery and part["recovery"] is not None:
            self._recovery.load_state_dict(part["recovery"])
        try:
            self._engine.load_state_dict(part)
        except ValueError:
            if self._recovery and before is not None:
                self._recovery.load_state_dict(before)
            raise
        self._use_density(part["density"])
        self._steps.abandon()
        self._connection.reset()  # some ranks may have loaded nothing

    def place(self) -> dict[str, int]:
        """Return this rank's number and how many there are, as the state knows them."""
        return {"rank": self._engine.rank, "world_size": self._engine.world_size}

    def rejoin(self) -> list[int]:
        """Go on after an elastic reset, on all ranks; return the old ranks whose state is lost.

        Survivors keep their residuals and new ranks begin with none; all take step and density
        from the first survivor. A RuntimeWarning names lost ranks.
        """
        engine = self._engine
        state = self._state()
        kept = state.pop("state")
        state["common"] = checkpoint.common(kept)
        self._connection.recount()
        present = self._connection.gather("rejoin()", state)
        survivors = [old for old in present if old["step"] > 0]
        engine.rank, engine.world_size = self._set.rank(), self._set.size()
        first = (survivors or present)[0]
        kept = {**kept, **first["common"]}
        self.load_state_dict({**first, **self.place(), "state": kept})
        before = range(survivors[0]["world_size"]) if survivors else ()
        lost = sorted(set(before) - {old["rank"] for old in survivors})
        if lost:
            warnings.warn(
                f"the residuals of former ranks {lost} are lost with their hosts: what they had "
                "not sent yet is missing from the sum; the other ranks' are unchanged",
                RuntimeWarning,
                stacklevel=3,
            )
        return lost

    def __repr__(self) -> str:
        slots, density = self._slots, self._policy.density(self._engine.step)
        now = "" if density is None else f"density {density:g} now, "
        return (
            f"Compression.{self._policy.written()}: {now}{len(self._buckets)} buckets, "
            f"{sum(slot is None for slot in slots)} of {len(slots)} tensors dense"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a compressor is bound to this rank and cannot be pickled or broadcast; save its "
            "state_dict() on every rank, or on one of them gathered_state_dict(), which all have "
            f"to call, and load it into a new compressor{self._IN_ELASTIC_JOBS}"
        )

    @staticmethod
    def _new_name() -> str:
        """Return the name with which this compressor's operations begin; once, when it is whole."""
        return f"fftcomp.{next(_numbers)}"

    def _watch(self, name: str, shutdown: Callable[[], None]) -> Watch:
        """Return what watches over the steps; ``shutdown`` ends Horovod."""
        settings = self._settings
        ends = settings.on_timeout == "raise"
        return Watch(name, self._policy.recipe, settings.timeout_s, ends, shutdown)

    @property
    def _buckets(self) -> list[Bucket]:
        return self._engine.buckets

    @property
    def _slots(self) -> list[Slot | None]:
        return slots_in(self._buckets, [tensor.name for tensor in self._tensors])

    def _facts(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks, for the handshake."""
        slots = self._slots
        layout = list(zip(self._tensors, self._dtypes, slots, strict=True))
        ruled = [bucket.policy.facts() for bucket in self._buckets if bucket.ruled]
        return {
            **self._policy.facts(),
            "rules' policies (hash)": f"{wire.fnv1a(str(ruled)):x}",
            "number of tensors": len(layout),
            "compressed tensors": sum(slot is not None for slot in slots),
            "buckets": len(self._buckets),
            "names, shapes, dtypes and order of the tensors (hash)": f"{wire.fnv1a(str(layout)):x}",
            # Their sums may differ in the last bits, which ranks must not.
            "steps computed on": "the host" if self._engine.device is None else "the GPU",
            "replica_check": self._settings.replica_check,
            "shadow_check": self._settings.shadow_check,
            "grad_scaler": self._settings.grad_scaler is not None,
            "loss scale": self._steps.loss_scale(),
            "recover": repr(self._settings.recover),
            "step": self._engine.step,
        }

    def _use_density(self, density: float | None) -> None:
        """Change to a density, or back to what the compressor was made with."""
        first = self._first_policy
        changed = first if density is None else first.with_density(density)
        self._engine.buckets = [
            bucket if bucket.ruled else bucket._replace(policy=changed) for bucket in self._buckets
        ]
        self._policy, self._changed_density = changed, density

    def _buckets_of(self, tensors: Sequence[Tensor]) -> list[Bucket]:
        settings = self._settings
        for pattern in unmatched(self._rules, tensors):
            warnings.warn(f"rules: no parameter's name matches {pattern!r}", stacklevel=5)
        return make_buckets(
            tensors, self._policy, self._rules, settings.min_numel, settings.bucket_nbytes
        )

    def _recorder(self) -> Recorder | None:
        if self._settings.record is None or self._set.rank() != 0:
            return None
        return Recorder(self._settings.record, self._settings.record_every)

    def _closed(self) -> Callable[[], None]:
        """Return what has to be called after each step that is closed."""
        show = self._live_view()

        def closed() -> None:
            if show is not None:
                show()
            for listener in self._listeners:
                listener()

        return closed

    def _live_view(self) -> Callable[[], None] | None:
        """Return what shows a step to whoever looks; None if nobody does."""
        settings = self._settings
        if settings.live_view is None and settings.scalars is None:
            return None
        view = LiveView(settings.live_view, self._add_scalar())
        if self._set.rank() == 0:
            view.check()

        def show() -> None:
            # Whoever is first now: a job that loses the first rank's host goes on with another.
            if self._engine.rank == 0 and self._steps.count % settings.live_every == 0:
                view.show(self._engine.step, self.stats(), self._engine.alarm.ratios())

        return show

    def _add_scalar(self) -> AddScalar | None:
        """Return what writes a scalar, of what the user gave."""
        scalars = self._settings.scalars
        if scalars is not None and not hasattr(scalars, "add_scalar"):
            raise TypeError(
                "scalars must have add_scalar(name, value, step), as "
                "torch.utils.tensorboard.SummaryWriter has, or with TensorFlow be a writer of "
                f"tf.summary; got {type(scalars).__name__}"
            )
        return None if scalars is None else scalars.add_scalar


def slots_in(buckets: Sequence[Bucket], names: Sequence[str]) -> list[Slot | None]:
    """Return the place of each named tensor; None if it lies in no bucket."""
    slots: Mapping[str, Slot] = {
        tensor.name: Slot(number, index)
        for number, bucket in enumerate(buckets)
        for index, tensor in enumerate(bucket.tensors)
    }
    return [slots.get(name) for name in names]
