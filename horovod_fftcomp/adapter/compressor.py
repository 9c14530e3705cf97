"""Base class of the compressors of all frameworks: statistics, density, state, elastic resets.

It uses neither a framework nor the network: the adapters' subclasses carry out the steps and
exchange objects between ranks.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod_fftcomp import wire
from horovod_fftcomp.adapter import handshake
from horovod_fftcomp.adapter.connection import Connection
from horovod_fftcomp.adapter.replica_check import ReplicaCheck, Replicas
from horovod_fftcomp.adapter.settings import Settings
from horovod_fftcomp.adapter.steps import Parts, StepDriver
from horovod_fftcomp.engine import checkpoint
from horovod_fftcomp.engine.buckets import Bucket, decided_anew, make_buckets, with_policy
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.overlap import Send, Slot
from horovod_fftcomp.engine.policy import Scheduled, check_rules, unmatched
from horovod_fftcomp.errors import UnsupportedError, warn
from horovod_fftcomp.kernels.cuda import Device
from horovod_fftcomp.monitor.density_recovery import Recovery
from horovod_fftcomp.monitor.gradient_recorder import Recorder
from horovod_fftcomp.monitor.step_log import AddScalar, LiveView
from horovod_fftcomp.recipes import SECOND
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.schemes.bucket_scope import BucketScope
from horovod_fftcomp.schemes.hierarchical import Ranks

# Of ``stats``, in their order.
FIGURES = (
    "steps dense_nbytes sent_nbytes received_nbytes inside_nbytes ratio ratio_with_warmup encode_s "
    "encode_hidden_s encode_wait_s wait_s decode_s check_s relative_error total_error similarity "
    "skipped_steps collectives density choices"
).split()


class Compressor:
    """Compressor of one optimizer's gradients; ``Compression.topk(model)``, for one, makes it.

    Subclasses set ``connection``, ``driver`` and ``_parameters``, and ``_tensors`` and ``_dtypes``
    in the order of the parameters. ``engine``: runs this rank's exchanges; ``driver``: carries out
    steps; ``policy``: recipe and schedule; ``listeners``: see ``on_step``; ``recorder``: see the
    setting ``record``.
    """

    engine: Engine
    connection: Connection
    driver: StepDriver
    _parameters: Replicas
    _tensors: Sequence[Tensor]
    _dtypes: Sequence[str]
    _slots: Sequence[Slot | None]  # each tensor's in the buckets; None if it is in none
    _shard = ""  # which part of the tensors this rank has: "shard 0 of 2"; "" if they are whole
    _IN_ELASTIC_JOBS = ""  # end of an error message: how to keep a compressor in an elastic job

    def __init__(self, policy: Scheduled, settings: Settings) -> None:
        self.policy = self._first_policy = policy
        self._settings = settings
        self._rules = check_rules(settings.rules, policy)
        self._set: Any = settings.process_set
        if settings.recover and policy.density(policy.warmup_steps) is None:
            raise ValueError(f"recover was given, but recipe {policy.recipe!r} has no density")
        self._recovery = Recovery(settings.recover) if settings.recover else None
        self._changed_density: float | None = None
        self.listeners: list[Callable[[], None]] = []  # shared with the step driver
        self.recorder: Recorder | None = None
        self._warned_of_momentum = self._warned_of_squares = False

    def _on_nodes(self, find: Callable[[], int]) -> Scheduled:
        """Return the policy, with ``find()`` ranks per node if that was "auto"."""
        self.policy = self._first_policy = self.policy.on_nodes(find)
        return self.policy

    def check_differences(self) -> None:
        """Raise UnsupportedError unless local steps (differences of weights) are supported."""
        for bucket in self._buckets:
            bucket.policy.after_warmup.check_differences(repr(self))
        if self._settings.grad_scaler is not None:
            raise UnsupportedError(
                "local steps exchange weights, which have no loss scale; make the compressor "
                "without grad_scaler"
            )

    def _warn_of_two_momenta(self, optimizer: str, momenta: Mapping[str, object]) -> None:
        """Warn once if recipe and ``optimizer`` both have momentum; ``momenta``: its options."""
        traits = self.policy.after_warmup.traits
        own = 0.0 if traits.sends_moments else traits.momentum
        if not own or not momenta or self._warned_of_momentum:
            return
        self._warned_of_momentum = True
        given = ", ".join(f"{option}={value}" for option, value in momenta.items())
        warn(
            f"recipe {self.policy.recipe!r} keeps a momentum of its own ({own}), and the "
            f"optimizer {optimizer} has one too ({given}): momentum is applied twice, which trains "
            "differently from either alone. Use an optimizer without momentum, such as "
            "SGD(momentum=0) or Adam(betas=(0.0, 0.99)), or a recipe without one"
        )

    def _warn_of_squares(self, optimizer: str, of_package: bool = False) -> None:
        """Warn once that ``optimizer``, with second moments, loses quality by the recipe.

        ``of_package``: it is one of this package, which loses by noise alone.
        """
        traits = self.policy.after_warmup.traits
        loses = traits.is_noisy or (traits.compresses and not of_package)
        if self._warned_of_squares or traits.momentum or not loses:
            return
        self._warned_of_squares = True
        how = "rounds coarsely" if traits.is_noisy else "sends late or rounds with a bias"
        others = "" if traits.is_noisy else ", or Adam or AdamW of this package"
        warn(
            f"{optimizer} divides by roots of squared gradients, in which what recipe "
            f"{self.policy.recipe!r} {how} counts squared: a GPT's loss was 4 to 65 % higher. Use "
            f'dither(ratio=20){others}: docs/training.md, "Adam and AdamW"'
        )

    @property
    def warmup_steps(self) -> int:
        """Number of dense steps at the start."""
        return self.policy.warmup_steps

    def tensors(self) -> list[Tensor]:
        """Return names and shapes of all parameters in their order, dense ones included."""
        return list(self._tensors)

    def on_step(self, listener: Callable[[], None]) -> None:
        """Call ``listener()`` each time a step is closed, which is when the next one begins."""
        self.listeners.append(listener)

    def end_training(self, error: type[BaseException]) -> None:
        """Raise ``error`` in the training thread now, and again after each step if it is caught.

        Call it from a listener of ``on_step``, at the same step on all ranks.
        """
        self.listeners.append(functools.partial(self._raise, error))
        self._raise(error)

    def _raise(self, error: type[BaseException]) -> None:
        raise error

    def digest(self) -> str:
        """Return a SHA-256 hash of this rank's parameters; bit-identical ranks have equal ones."""
        sha256 = hashlib.sha256()
        for number in range(len(self._parameters.names)):
            sha256.update(self._parameters.read(number).tobytes())
        return sha256.hexdigest()

    def stats(self) -> dict[str, Any]:
        """Return this rank's statistics since the start: bytes, seconds, errors.

        Bytes: ``dense_nbytes``, the size of all gradients in float32; ``sent_nbytes``, the size of
        what was passed to collectives, with headers, padding and probes; ``ratio``, dense bytes
        over sent bytes of the steps after a warm-up (in it, of its last step), with recipe ``auto``
        of its present choices; ``ratio_with_warmup``, that of all steps;
        ``received_nbytes``, the output of buckets' collectives without this rank's own messages.
        With ``ranks_per_node`` sent and received bytes are those between nodes, and
        ``inside_nbytes`` counts what was passed to collectives within a node.

        Seconds: ``encode_s``, encoding; ``encode_hidden_s``, the part of it that overlaps with the
        backward pass (before the step's last gradient); ``encode_wait_s``, waits of the training
        thread for an encoding; ``wait_s``, waits for other ranks and the network, without those for
        dense tensors, which Horovod exchanges; ``decode_s``, decoding; ``check_s``, comparing
        parameters between ranks.

        Errors: ``relative_error``, the norm of what the last measured step did not send over the
        norm of what it had to send; ``total_error``, the sum over steps of the squared norm of what
        was not sent; ``similarity``, in the last measured step, the share of the positions chosen
        by other ranks for all that this rank would also have chosen, None if there were none.
        ``skipped_steps``: number of steps with NaN or Inf on any rank, which do not change the
        residuals.

        ``density``: the present one. ``choices``: what recipe ``auto`` has chosen for each tensor,
        as text.
        """
        self.driver.close_if_complete()
        self.engine.read_device()
        steps, costs = self.driver, self.engine.costs
        dense, sent = steps.dense_nbytes, costs.sent_nbytes + steps.other_nbytes
        ratio = _ratio(dense - steps.of_warmup[0], sent - steps.of_warmup[1])
        choices = self.engine.choices()
        if choices:  # others were in force before
            numels = (math.prod(shape) for _, shape in self._tensors)
            ratio = _ratio(4 * sum(numels), sum(self._sent_nbytes()))
        known = vars(costs) | steps.times() | {"sent_nbytes": sent, "ratio": ratio}
        known |= {"ratio_with_warmup": _ratio(dense, sent)}
        known |= {"steps": steps.count, "dense_nbytes": dense}
        known["density"] = self.policy.density(self.engine.step)
        known["choices"] = {name: choice.words for name, choice in choices.items()}
        return {figure: known[figure] for figure in FIGURES}

    def residual(self, name: str) -> Any:
        """Return the residual of the parameter ``name``: float32, in the parameter's shape."""
        self.driver.settle()
        return self.engine.residual(name)

    def residual_norm(self) -> float:
        """Return the L2 norm of this rank's residuals, of all parameters together."""
        self.driver.settle()
        return self.engine.residual_norm()

    def residual_ratios(self) -> dict[str, float]:
        """Return for each tensor the residual's norm over the gradient's, as last measured."""
        self.engine.read_device()
        return self.engine.alarm.ratios()

    def summary(self) -> str:
        """Return a table as text, a row for each tensor: how it is sent, bytes, ratio and errors.

        The last rows are those of all compressed tensors, to which the ``ratio`` of recipe ``auto``
        refers, and of all. Bytes: what a rank sends in a step, in the mean over ranks. Error: norm
        of what was not sent over norm of what was to be sent; residual: its norm over the
        gradient's; both as last measured. "-" stands for what there is not, or not yet.
        """
        self.engine.read_device()
        residuals, errors, nbytes = self.residual_ratios(), self.engine.errors, self._sent_nbytes()
        rows = ["tensor recipe exchange density bytes ratio error residual".split()]
        for (name, shape), slot, sent in zip(self._tensors, self._slots, nbytes, strict=True):
            recipe, density, exchange = "dense", None, "allreduce"
            if slot is not None:
                scheme = self.engine.scheme(slot.bucket)
                exchange = "sharded" if scheme.is_sharded else scheme.rounds[-1]
                policy = self._buckets[slot.bucket].policy
                recipe, density = policy.recipe, policy.density(self.engine.step)
            figures = (density, errors.get(name), residuals.get(name))
            shown = ["-" if figure is None else f"{figure:.3g}" for figure in figures]
            rows.append([name, recipe, exchange, shown[0], *_bytes([(shape, sent)]), *shown[1:]])
        sizes = [(tensor.shape, sent) for tensor, sent in zip(self._tensors, nbytes, strict=True)]
        packed = [size for size, slot in zip(sizes, self._slots, strict=True) if slot is not None]
        for what, which in (("of what is compressed", packed), ("in all", sizes)):
            rows.append([what, "-", "-", "-", *_bytes(which), "-", "-"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = (map(str.ljust, row[:3], widths) for row in rows)
        numbers = (map(str.rjust, row[3:], widths[3:]) for row in rows)
        lines = ["  ".join([*a, *b]) for a, b in zip(text, numbers, strict=True)]
        if self.engine.world_size == 1:
            lines.append("nothing was sent: there is one rank, and bytes are what it would send")
        if self.engine.step < (n := self.policy.warmup_steps):
            lines.append(f"warm-up: the first {n} steps are dense (warmup_steps={n})")
        return "\n".join(lines)

    def _sent_nbytes(self) -> list[int]:
        """Return the bytes of each tensor that this rank sends in the present step."""
        found = []
        for (name, shape), slot in zip(self._tensors, self._slots, strict=True):
            sent: float = 4 * math.prod(shape)
            if slot is not None:
                bucket, scheme = self._buckets[slot.bucket], self.engine.scheme(slot.bucket)
                sent = self.engine.share_nbytes(slot.bucket, Tensor(name, shape))
                if isinstance(scheme, BucketScope):  # its share of what all send together
                    numel = sum(math.prod(t.shape) for t in bucket.tensors)
                    sent = scheme.sent_nbytes(Tensor("", (numel,))) * math.prod(shape) / numel
            found.append(round(sent))
        return found

    def set_density(self, density: float) -> None:
        """Compress with ``density`` from the next step on; call it on every rank.

        Raises ConfigMismatchError on all ranks if their densities or their steps differ, and
        ValueError for a recipe without density.
        """
        self.driver.settle()
        facts = {"step": self.engine.step, "density": density}
        handshake.compare_facts(self.connection.gather("set_density()", facts))
        self._use_density(density)

    def report(self, metric: float) -> None:
        """Report a validation metric; the density is raised if the first rank's gets worse.

        Call it on every rank. ValueError unless the compressor was made with ``recover=``, see
        ``Recover``.
        """
        if self._recovery is None:
            raise ValueError("report() needs a compressor that was made with recover=Recover(...)")
        self.driver.settle()
        first = self.connection.gather("report()", float(metric))[0]
        density, step = self.policy.density(self.engine.step), self.engine.step
        if density is None or step < self.policy.warmup_steps:
            return  # nothing is compressed yet, so compression cannot be the cause
        if self._recovery.observe(first) and self._recovery.raised(density) > density:
            self._use_density(self._recovery.raised(density))

    def discard(self) -> None:
        """Undo the last exchange, whose averages were not used; call it on every rank.

        Residuals, momenta, the step and all counts of ``stats`` but seconds become what they were
        before it. Call it after the backward pass (with Horovod after ``synchronize()``) and before
        the next one. Raises ConfigMismatchError on all ranks if they are not at the same step, and
        ValueError if there is no exchange, or an optimizer has taken a step with its averages.
        """
        self.driver.settle()
        facts = {"step": self.engine.step, "discardable": self.engine.is_discardable()}
        handshake.compare_facts(self.connection.gather("discard()", facts))
        self.driver.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and step.

        Arrays are NumPy arrays, or with PyTorch tensors, which ``torch.save`` and its safe loader
        accept. Residuals differ between ranks: save it on every rank, or save the result of
        ``gathered_state_dict`` on one. Only the same rank of as many ranks can load it.
        """
        return self._of_framework(self._state())

    def _of_framework(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` with its NumPy arrays converted to the framework's arrays."""
        return state

    def _state(self, movable: bool = False) -> dict[str, Any]:
        """Return the result of ``state_dict`` with NumPy arrays; see ``Engine.state_dict``."""
        self.driver.settle()
        state = {**self.engine.state_dict(movable), "density": self._changed_density}
        state["recovery"] = self._recovery.state_dict() if self._recovery else None
        if self._shard:
            state["shard"] = self._shard
        return state

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks; call it on every rank.

        Any number of ranks can load the result; the sum of the residuals over ranks is kept.
        """
        states = self.connection.gather("gathered_state_dict()", self._state(movable=True))
        return self._of_framework(checkpoint.gathered(states))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned on this rank, or a gathered one."""
        checkpoint.check_shard(saved, self._shard)
        part = checkpoint.part_of(saved, **self.place())
        recovery = copy.copy(self._recovery)
        if recovery and part["recovery"] is not None:
            recovery.load_state_dict(part["recovery"])
        self.engine.load_state_dict(part)  # last of what may raise an error: then nothing changes
        self._recovery = recovery
        self._use_density(part["density"])
        self.driver.abandon()
        self.connection.reset()  # some ranks may have loaded nothing

    def place(self) -> dict[str, int]:
        """Return this rank and the world size, as keys of a state."""
        return {"rank": self.engine.rank, "world_size": self.engine.world_size}

    def rejoin(self) -> list[int]:
        """Continue after an elastic reset; return the former ranks whose residuals are lost.

        Call it on every rank. Surviving ranks keep their residuals, new ranks start with none, and
        all take step and density from the first survivor. A RuntimeWarning names the lost ranks.
        """
        engine = self.engine
        state = self._state()
        arrays = state.pop("state")
        state["common"] = checkpoint.common(arrays)
        self.connection.recount()
        present = self.connection.gather("rejoin()", state)
        survivors = [old for old in present if old["step"] > 0]
        engine.rank, engine.world_size = self._set.rank(), self._set.size()
        engine.buckets = decided_anew(self._buckets, self._deciding_size())
        first = (survivors or present)[0]
        arrays = {**arrays, **first["common"]}
        self.load_state_dict({**first, **self.place(), "state": arrays})
        before = range(survivors[0]["world_size"]) if survivors else ()
        lost = sorted(set(before) - {old["rank"] for old in survivors})
        if lost:
            warn(
                f"the residuals of former ranks {lost} are lost with their hosts: the gradients in "
                "them will never be sent; the residuals of the other ranks are unchanged"
            )
        return lost

    def __repr__(self) -> str:
        slots, density = self._slots, self.policy.density(self.engine.step)
        now = "" if density is None else f"density {density:g} now, "
        return (
            f"Compression.{self.policy.written()}: {now}{len(self._buckets)} buckets, "
            f"{sum(slot is None for slot in slots)} of {len(slots)} tensors dense"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a compressor is bound to this rank and cannot be pickled or broadcast; save its "
            "state_dict() on every rank, or call gathered_state_dict() on every rank and save it "
            f"on one, and load that into a new compressor{self._IN_ELASTIC_JOBS}"
        )

    def _make_connection(
        self,
        send: Send,
        shutdown: Callable[[], None],
        groups: Callable[[], Mapping[Ranks, Any]] = dict,
        by_order: bool = False,
    ) -> None:
        """Open what steps are written to, then make the connection; arguments as ``Connection``'s.

        In this order: an error there, on the rank that writes, must not leave the ranks with
        different numbers of compressors.
        """
        settings, recipe = self._settings, self.policy.recipe
        if self._set.included():
            writes = self._writes(self._set.rank())
            if settings.live_view is not None or settings.scalars is not None:
                view = LiveView(settings.live_view, self._add_scalar())
                if writes:
                    view.check()
                self.on_step(functools.partial(self._show, view))
            if settings.record is not None and writes:
                self.recorder = Recorder(settings.record, settings.record_every)
        own = self._facts, settings, recipe, self._set
        self.connection = Connection(send, *own, shutdown, groups, by_order)

    def _make_parts(self, buckets: Sequence[Bucket], device: Device | None, send: Send) -> Parts:
        """Make the engine and what watches it, and return them for the step driver.

        ``send`` sends the hashes of the parameters.
        """
        rank = self._set.rank() if self._set.included() else 0
        self.engine = Engine(buckets, rank, self._set.size(), device)
        self._slots = slots_of(self._tensors, buckets)
        where, action = (send, self.connection), self._settings.replica_check
        check = ReplicaCheck(*where, self._parameters, action, device)
        parts = self.engine, self.connection, check, self.recorder, self.listeners
        return Parts(*parts, self._settings, self._slots)

    @property
    def _buckets(self) -> list[Bucket]:
        return self.engine.buckets

    def _facts(self) -> dict[str, Any]:
        """Return the configuration that the handshake compares between ranks."""
        slots = self._slots
        own = list(zip(self._tensors, self._dtypes, strict=True))
        ruled = [bucket.policy.facts() for bucket in self._buckets if bucket.ruled]
        return {
            **self.policy.facts(),
            "rules' policies (hash)": f"{wire.fnv1a(str(ruled)):x}",
            "number of tensors": len(own),
            "compressed tensors": sum(slot is not None for slot in slots),
            "buckets": len(self._buckets),
            "sharded buckets": _numbers_of_sharded(self._buckets),
            "names, shapes and dtypes of the tensors (hash)": f"{wire.fnv1a(str(sorted(own))):x}",
            "order of the tensors (hash)": f"{wire.fnv1a(str([t.name for t in self._tensors])):x}",
            "buckets of the tensors (hash)": f"{wire.fnv1a(str(slots)):x}",
            # Their sums may differ in the last bits, but ranks must have equal ones.
            "steps computed on": "the host" if self.engine.device is None else "the GPU",
            "replica_check": self._settings.replica_check,
            "grad_scaler": self._settings.grad_scaler is not None,
            "loss scale": self.driver.loss_scale(),
            "recover": repr(self._settings.recover),
            "step": self.engine.step,
        }

    def _use_density(self, density: float | None) -> None:
        """Set the density; None restores the policy with which the compressor was made."""
        first = self._first_policy
        changed = first if density is None else first.with_density(density)
        self.engine.buckets = with_policy(self._buckets, changed)
        self.policy, self._changed_density = changed, density

    def _buckets_of(self, tensors: Sequence[Tensor]) -> list[Bucket]:
        settings = self._settings
        for pattern in unmatched(self._rules, tensors):
            warn(f"rules: no parameter's name matches {pattern!r}", UserWarning)
        sizes, n_ranks = (settings.min_numel, settings.bucket_nbytes), self._deciding_size()
        buckets = make_buckets(tensors, self.policy, self._rules, *sizes, n_ranks)
        options = {name for b in buckets for name, _ in b.policy.options}
        if (unused := options & SECOND) and n_ranks > 1 and not _numbers_of_sharded(buckets):
            warn(
                f"{', '.join(sorted(unused))} has no effect, since no exchange here is sharded: "
                f'on {n_ranks} ranks exchange="auto" gathers these tensors, or "gather" is set',
                UserWarning,
            )
        return buckets

    def _deciding_size(self) -> int:
        """Return the number of ranks for which exchange "auto" is decided."""
        return self._set.size()

    def _writes(self, rank: int) -> bool:
        """Return whether this rank, ``rank`` of the set, writes what one rank writes for all."""
        return rank == 0

    def _show(self, view: LiveView) -> None:
        """Write a step's statistics; a listener."""
        # The present first rank: an elastic job may have lost the host of the former one.
        if self._writes(self.engine.rank) and self.driver.count % self._settings.live_every == 0:
            view.show(self.engine.step, self.stats(), self.engine.alarm.ratios())

    def _add_scalar(self) -> AddScalar | None:
        """Return the function of the setting ``scalars`` that writes a scalar; None without it."""
        scalars = self._settings.scalars
        if scalars is not None and not hasattr(scalars, "add_scalar"):
            raise TypeError(
                "scalars must have add_scalar(name, value, step), as "
                "torch.utils.tensorboard.SummaryWriter has, or with TensorFlow be a writer of "
                f"tf.summary; got {type(scalars).__name__}"
            )
        return None if scalars is None else scalars.add_scalar


def slots_of(tensors: Sequence[Tensor], buckets: Sequence[Bucket]) -> list[Slot | None]:
    """Return the slot of each of ``tensors`` in ``buckets``; None if it is in none."""
    slots = {
        tensor.name: Slot(number, index)
        for number, bucket in enumerate(buckets)
        for index, tensor in enumerate(bucket.tensors)
    }
    return [slots.get(tensor.name) for tensor in tensors]


def _numbers_of_sharded(buckets: Sequence[Bucket]) -> str:
    """Return the numbers of the buckets whose exchange is sharded."""
    schemes = (bucket.policy.after_warmup for bucket in buckets)
    return ", ".join(str(number) for number, scheme in enumerate(schemes) if scheme.is_sharded)


def _ratio(dense_nbytes: int, sent_nbytes: int) -> float:
    return dense_nbytes / sent_nbytes if sent_nbytes > 0 else math.nan


def _bytes(sizes: Sequence[tuple[tuple[int, ...], int]]) -> tuple[str, str]:
    """Return bytes and ratio, as text, of tensors: shapes and bytes sent."""
    sent = sum(nbytes for _, nbytes in sizes)
    dense = 4 * sum(math.prod(shape) for shape, _ in sizes)
    return f"{sent:,}", f"{dense / sent:.1f}" if sent else "-"
