"""One compressor: how a step runs through Horovod's ``compress`` and ``decompress``.

Horovod calls ``compress`` with a gradient, reduces what that returns, and calls ``decompress``
with the outcome. For a compressed tensor it gets a probe, a single 1.0; the exchange itself runs
beside it, and the probe's reduced value carries Horovod's op and factors to our sum.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod_fftcomp import checkpoint, handshake, wire
from horovod_fftcomp.buckets import Bucket, make_buckets
from horovod_fftcomp.engine import Engine
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.policy import Scheduled, check_rules, unmatched
from horovod_fftcomp.recovery import Recovery
from horovod_fftcomp.schemes import Round, Tensor
from horovod_fftcomp.torch import agreement, arrays
from horovod_fftcomp.torch.parameters import Parameters
from horovod_fftcomp.torch.replicas import ReplicaCheck
from horovod_fftcomp.torch.rounds import PendingRound
from horovod_fftcomp.torch.settings import Settings

# Every rank makes its compressors in the same order, so equal numbers mean the same one.
_numbers = itertools.count()

# Compressors of this process whose handshake is not over. Hooks of several may come first in
# another order on another rank, so none of them may then wait for long; ranks that begin
# together answer in milliseconds.
_unconnected: weakref.WeakSet[Compressor] = weakref.WeakSet()
_GREETING_S = 2.0


class _Place(NamedTuple):
    """Where a compressed parameter's gradient goes."""

    bucket: int
    index: int


class _Context(NamedTuple):
    """What ``decompress`` has to know of a gradient."""

    grad: torch.Tensor
    place: _Place | None  # None: exchanged densely, by Horovod


class Compressor:
    """One policy bound to the parameters of one optimizer; made by ``Compression``."""

    def __init__(
        self,
        model: torch.nn.Module | Iterable[Any],
        policy: Scheduled,
        settings: Settings,
    ) -> None:
        self._policy = self._first_policy = policy
        self._settings = settings
        self._set = settings.process_set
        self._name = f"fftcomp.{next(_numbers)}"
        self._parameters = Parameters(model)
        buckets = _buckets_of(self._parameters.specs(), policy, settings)
        places = {
            tensor.name: _Place(number, index)
            for number, bucket in enumerate(buckets)
            for index, tensor in enumerate(bucket.tensors)
        }
        self._places = [places.get(name) for name in self._parameters.names]
        member = self._set.included()  # Horovod never calls the compressor of the others
        self._engine = Engine(buckets, self._set.rank() if member else 0, self._set.size())
        self._replicas = ReplicaCheck(
            self._parameters.names,
            self._parameters.tensors,
            settings.replica_check,
            self._set,
            self._name,
        )
        if settings.recover and policy.density(policy.warmup_steps) is None:
            raise ValueError(f"recover was given, but recipe {policy.recipe!r} has no density")
        self._recovery = Recovery(settings.recover) if settings.recover else None
        self._changed_density: float | None = None
        self._agreements = itertools.count()
        self._connected = self._finishing = False
        self._handshake: agreement.Handshake | None = None
        self._roll_call: PendingRound | None = None
        # A float16 or dense exchange goes through a join as it does in Horovod.
        self._gathers = settings.replica_check != "off" or any(
            "allgather" in bucket.policy.at(policy.warmup_steps).rounds for bucket in buckets
        )
        self._open = 0  # gradients that Horovod has taken and not given back
        self._steps = self._dense_nbytes = self._other_nbytes = 0
        self._wait_s = 0.0
        self._arrived: list[dict[int, np.ndarray | None]] = [{} for _ in buckets]
        self._pending: dict[int, PendingRound] = {}
        _unconnected.add(self)

    # Horovod calls these two.

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Context]:
        """Take a parameter's gradient; return what Horovod is to reduce, and a context."""
        if self._finishing:
            self._check_complete()
            self._end_step()
        begins = not self._parameters.seen
        if begins and self._set.size() != self._engine.world_size:
            self.rejoin()  # an elastic reset that removed ranks: Horovod then skips ``sync``
        if not self._connected:
            self._connect()
        number = self._parameters.take(tensor)
        if begins:
            self._begin_step()
        self._dense_nbytes += 4 * tensor.numel()
        place = self._places[number]
        self._open += 1
        if place is None:
            sent = arrays.sendable(tensor)
            self._other_nbytes += sent.numel() * sent.element_size()
            return sent, _Context(tensor, None)
        frozen = not self._parameters.tensors[number].requires_grad
        arrived = self._arrived[place.bucket]
        arrived[place.index] = None if frozen else arrays.flat_float32(tensor)
        if self._is_open():
            self._start_complete()
            self._advance_done()
        probe = torch.ones(1, device=tensor.device)
        self._other_nbytes += probe.element_size()
        return probe, _Context(tensor, place)

    def decompress(self, tensor: torch.Tensor, ctx: _Context | None) -> torch.Tensor:
        """Return the reduced gradient; ``tensor`` is what Horovod made of ``compress``'s."""
        if ctx is None:  # a sparse gradient that Horovod gathered itself
            values = tensor.coalesce().values() if tensor.is_sparse else tensor
            self._engine.observe(bool(torch.isfinite(values).all()))
            return tensor
        if not self._finishing:
            self._finish_step()
        self._open -= 1
        if ctx.place is None:
            self._engine.observe(not self._buckets or bool(torch.isfinite(tensor).all()))
            return arrays.restored(tensor, ctx.grad)
        total = self._engine.sums(ctx.place.bucket)[ctx.place.index]
        grad = arrays.gradient_like(total, tensor / self._engine.world_size, ctx.grad)
        if grad.dtype in (torch.float16, torch.bfloat16):  # a finite sum may overflow in these
            self._engine.observe(bool(torch.isfinite(grad).all()))
        return grad

    # For the user.

    def stats(self) -> dict[str, float | None]:
        """Return what this rank has sent and spent so far.

        ``dense_nbytes``: the gradients in float32; ``sent_nbytes``: what was handed to
        collectives, headers, padding and probes included; ``ratio``: their quotient. Seconds:
        ``encode_s``, ``wait_s`` (for other ranks and the network; dense tensors, which Horovod
        exchanges, excluded), ``decode_s``, ``check_s`` (of parameters between ranks).
        ``relative_error``: norm of what the last measured step left unsent over the norm of what
        it was to send. ``skipped_steps``: steps with NaN or Inf somewhere, which left no trace in
        the residuals. ``density``: the present one.
        """
        if self._finishing and not self._open:
            self._end_step()
        costs = self._engine.costs
        sent = costs.sent_nbytes + self._other_nbytes
        return {
            "steps": self._steps,
            "dense_nbytes": self._dense_nbytes,
            "sent_nbytes": sent,
            "ratio": self._dense_nbytes / sent if sent else math.nan,
            "encode_s": costs.encode_s,
            "wait_s": self._wait_s,
            "decode_s": costs.decode_s,
            "check_s": self._replicas.seconds,
            "relative_error": costs.relative_error,
            "skipped_steps": costs.skipped_steps,
            "collectives": costs.collectives,
            "density": self._policy.density(self._engine.step),
        }

    def residual(self, name: str) -> torch.Tensor:
        """Return what is not sent yet of the parameter called ``name``, float32 in its shape."""
        self._settle()
        return torch.from_numpy(self._engine.residual(name))

    def residual_ratios(self) -> dict[str, float]:
        """Return norm of residual over norm of gradient, as last measured, for each tensor."""
        return self._engine.alarm.ratios()

    def set_density(self, density: float) -> None:
        """Compress with ``density`` from the next step on; every rank has to call it alike.

        Raises ConfigMismatchError on all ranks if they ask for different densities or stand at
        different steps, and ValueError for a recipe without density.
        """
        self._settle()
        handshake.compare_facts(self._gather({"step": self._engine.step, "density": density}))
        self._use_density(density)

    def report(self, metric: float) -> None:
        """Report a validation metric, on every rank; more density if the first rank's worsens.

        See ``Recover``, which has to be given as ``recover=``.
        """
        if self._recovery is None:
            raise ValueError("report() needs recover=Recover(...) when the compressor is made")
        self._settle()
        first = self._gather(float(metric))[0]
        density, step = self._policy.density(self._engine.step), self._engine.step
        if density is None or step < self._policy.warmup_steps:
            return  # nothing is compressed yet that could be to blame
        if self._recovery.observe(first) and self._recovery.raised(density) > density:
            self._use_density(self._recovery.raised(density))

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and step, for this rank of as many alone.

        Every rank has others: each has to save its own, or one of them what
        ``gathered_state_dict`` returns. Tensors inside; ``torch.save`` and its safe loader take it.
        """
        self._settle()
        state = {**self._engine.state_dict(), "density": self._changed_density}
        state["recovery"] = self._recovery.state_dict() if self._recovery else None
        return arrays.to_torch(state)

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, on all ranks; all have to call it.

        It can be loaded by any number of ranks; the sum of the residuals stays what it was.
        """
        return checkpoint.gathered(self._gather(self.state_dict()))

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned on the same rank, or a gathered state."""
        part = checkpoint.part_of(arrays.to_numpy(saved), **self.place())
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
        self._parameters.begin_step()
        self._replicas.abandon()
        self._finishing, self._pending, self._open = False, {}, 0
        self._roll_call = None
        self._arrived = [{} for _ in self._buckets]
        self._connected, self._handshake = False, None  # some ranks may have loaded nothing
        _unconnected.add(self)

    def place(self) -> dict[str, int]:
        """Return this rank's number and how many there are, as the state knows them."""
        return {"rank": self._engine.rank, "world_size": self._engine.world_size}

    def rejoin(self) -> list[int]:
        """Go on after an elastic reset, on all ranks; return the old ranks whose state is lost.

        Survivors keep their residuals and new ranks begin with none; all take step and density
        from the first survivor. A RuntimeWarning names lost ranks.
        """
        engine = self._engine
        state = self.state_dict()
        kept = state.pop("state")
        self._agreements = itertools.count()  # new ranks count from the beginning
        present = self._gather(state)
        survivors = [old for old in present if old["step"] > 0]
        engine.rank, engine.world_size = self._set.rank(), self._set.size()
        self.load_state_dict({**(survivors or present)[0], **self.place(), "state": kept})
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
        return (
            f"Compression.{self._policy.recipe}: {self._policy!r}, {len(self._buckets)} buckets, "
            f"{sum(p is None for p in self._places)} of {len(self._parameters)} tensors dense"
        )

    # The course of a step.

    @property
    def _buckets(self) -> list[Bucket]:
        return self._engine.buckets

    def _loss_scale(self) -> float:
        scaler = self._settings.grad_scaler
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _connect(self) -> None:
        """Compare configurations with the other ranks; raise if they differ.

        The first gradient waits, so that ranks that differ stop before they exchange anything.
        """
        if self._handshake is None:
            self._handshake = self._greet()
            is_alone = len(_unconnected) <= 1
            patience_s = 0.0 if is_alone else _GREETING_S
        else:
            is_alone, patience_s = False, 0.0
        if is_alone or self._handshake.is_done(patience_s):
            self._hear()

    def _hear(self) -> None:
        assert self._handshake is not None
        self._handshake.compare(self._settings.timeout_s)
        self._connected, self._handshake = True, None
        _unconnected.discard(self)

    def _greet(self) -> agreement.Handshake:
        layout = [
            (tensor, str(parameter.dtype), place)
            for tensor, parameter, place in zip(
                self._parameters.specs(), self._parameters.tensors, self._places, strict=True
            )
        ]
        ruled = [bucket.policy.facts() for bucket in self._buckets]
        facts = {
            **self._policy.facts(),
            "rules' policies (hash)": f"{wire.fnv1a(str(ruled)):x}",
            "number of tensors": len(layout),
            "compressed tensors": sum(place is not None for place in self._places),
            "buckets": len(self._buckets),
            "names, shapes, dtypes and order of the tensors (hash)": f"{wire.fnv1a(str(layout)):x}",
            "replica_check": self._settings.replica_check,
            "grad_scaler": self._settings.grad_scaler is not None,
            "loss scale": self._loss_scale(),
            "recover": repr(self._settings.recover),
            "step": self._engine.step,
        }
        optimizers = agreement.process_set_of_optimizer(self)
        return agreement.Handshake(facts, f"{self._name}.handshake", self._set, optimizers)

    def _gather(self, thing: object) -> list[Any]:
        name = f"{self._name}.agreement.{next(self._agreements)}"
        return agreement.gather_objects(thing, name, self._set, self._settings.timeout_s)

    def _use_density(self, density: float | None) -> None:
        """Change to a density, or back to what the compressor was made with."""
        first = self._first_policy
        changed = first if density is None else first.with_density(density)
        self._engine.buckets = [
            bucket if bucket.ruled else bucket._replace(policy=changed) for bucket in self._buckets
        ]
        self._policy, self._changed_density = changed, density

    def _begin_step(self) -> None:
        """Do what comes before a step's first gradient."""
        self._engine.follow_loss_scale(self._loss_scale())
        if self._gathers:
            ones = Round("allreduce", np.ones(1, np.float32))
            self._roll_call = PendingRound(ones, f"{self._name}.present", self._set)

    def _is_open(self) -> bool:
        """Tell whether this step's exchanges may begin; open them if they may now."""
        if not self._connected:
            return False
        if self._roll_call is not None and not self._roll_call.is_done():
            return False
        self._open_step()
        return True

    def _open_step(self) -> None:
        """Wait until all ranks have begun this step: an allgather without one crashes Horovod.

        A rank that has left by ``hvd.join`` takes part in allreduces alone, with zeros.
        """
        if self._roll_call is None:
            return
        present = self._roll_call.wait(self._settings.timeout_s)
        self._roll_call = None
        if present[0] != self._set.size():
            raise UnsupportedError(
                "a rank has called hvd.join(), under which Horovod exchanges nothing but "
                "allreduces. Give all ranks the same number of batches (DistributedSampler with "
                "drop_last=True), or use Compression.none with replica_check='off'"
            )
        self._replicas.begin(self._engine.step)

    def _start_complete(self) -> None:
        """Start every bucket all of whose gradients have come."""
        for number, (bucket, arrived) in enumerate(zip(self._buckets, self._arrived, strict=True)):
            if len(arrived) == len(bucket.tensors):
                self._start(number)

    def _start(self, bucket: int) -> None:
        arrived, tensors = self._arrived[bucket], self._buckets[bucket].tensors
        grads = [
            arrived[index] if index in arrived else np.zeros(math.prod(tensor.shape), np.float32)
            for index, tensor in enumerate(tensors)
        ]
        self._submit(bucket, self._engine.start(bucket, grads), 0)
        self._arrived[bucket] = {}

    def _submit(self, bucket: int, round_: Round, number: int) -> None:
        self._pending[bucket] = PendingRound(round_, f"{self._name}.{bucket}.{number}", self._set)

    def _advance(self, bucket: int) -> None:
        """Wait for a bucket's round and start the next one, if there is one."""
        pending = self._pending.pop(bucket)
        begin = time.perf_counter()
        output = pending.wait(self._settings.timeout_s)
        self._wait_s += time.perf_counter() - begin
        following = self._engine.advance(bucket, output)
        if following is not None:
            self._submit(bucket, following, int(pending.name.rpartition(".")[2]) + 1)

    def _advance_done(self) -> None:
        """Start the next round of every bucket whose current one is done; decoding can wait."""
        for bucket, pending in list(self._pending.items()):
            last = len(self._engine.scheme(bucket).rounds) - 1
            if not pending.name.endswith(f".{last}") and pending.is_done():
                self._advance(bucket)

    def _finish_step(self) -> None:
        """Complete every bucket: Horovod has submitted all gradients of this step by now."""
        if not self._connected:
            self._hear()
        self._open_step()
        self._finishing = True
        for bucket, arrived in enumerate(self._arrived):
            if arrived:
                self._start(bucket)
        while self._pending:
            for bucket in sorted(self._pending):
                self._advance(bucket)
        self._replicas.finish(self._settings.timeout_s)

    def _check_complete(self) -> None:
        if self._open:
            self._open = 0
            raise UnsupportedError(
                "a new step begins before all gradients of the last one were taken back: this "
                "compressor serves two optimizers; make another for the second"
            )

    def _end_step(self) -> None:
        """Close the step that ``decompress`` has finished; what it changed is committed."""
        self._engine.settle()
        self._steps += 1
        self._parameters.begin_step()
        self._finishing = False

    def _settle(self) -> None:
        """Commit the last step for whoever looks between two steps."""
        if self._finishing:
            self._end_step()
        if self._parameters.seen:
            raise ValueError(
                "a step is under way: call this after optimizer.step() or synchronize(), "
                "before the next backward()"
            )


def _buckets_of(tensors: list[Tensor], policy: Scheduled, settings: Settings) -> list[Bucket]:
    rules = check_rules(settings.rules, policy)
    for pattern in unmatched(rules, tensors):
        warnings.warn(f"rules: no parameter's name matches {pattern!r}", stacklevel=5)
    return make_buckets(tensors, policy, rules, settings.min_numel, settings.bucket_nbytes)
