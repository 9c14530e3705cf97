"""One compressor: what Horovod and the user call.

Horovod calls ``compress`` with a gradient, reduces what that returns, and calls ``decompress``
with the outcome. For a compressed tensor it gets a probe, a single 1.0; the exchange itself runs
beside it, and the probe's reduced value carries Horovod's op and factors to our sum.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from horovod_fftcomp import checkpoint, handshake, wire
from horovod_fftcomp.buckets import Bucket, make_buckets
from horovod_fftcomp.engine import Engine
from horovod_fftcomp.exchanges import Place
from horovod_fftcomp.policy import Scheduled, check_rules, unmatched
from horovod_fftcomp.record import Recorder
from horovod_fftcomp.recovery import Recovery
from horovod_fftcomp.schemes import Tensor
from horovod_fftcomp.torch import arrays
from horovod_fftcomp.torch.connection import Connection
from horovod_fftcomp.torch.device import device_of
from horovod_fftcomp.torch.parameters import Parameters
from horovod_fftcomp.torch.replicas import ReplicaCheck
from horovod_fftcomp.torch.settings import Settings
from horovod_fftcomp.torch.steps import GradientContext, Steps

# Every rank makes its compressors in the same order, so equal numbers mean the same one.
_numbers = itertools.count()


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
        self._parameters = Parameters(model)
        buckets = _buckets_of(self._parameters.specs(), policy, settings)
        self._places = _places_in(buckets, self._parameters.names)
        if settings.recover and policy.density(policy.warmup_steps) is None:
            raise ValueError(f"recover was given, but recipe {policy.recipe!r} has no density")
        self._recovery = Recovery(settings.recover) if settings.recover else None
        self._changed_density: float | None = None
        member = self._set.included()  # Horovod never calls the compressor of the others
        device = device_of(self._parameters.tensors, buckets) if member else None
        rank = self._set.rank() if member else 0
        self._engine = Engine(buckets, rank, self._set.size(), device)
        recorder = _recorder_of(settings) if member else None
        name = f"fftcomp.{next(_numbers)}"
        self._connection = Connection(name, self._set, settings.timeout_s)
        self._replicas = ReplicaCheck(
            self._parameters.names,
            self._parameters.tensors,
            settings.replica_check,
            self._set,
            name,
        )
        self._steps = Steps(
            self._parameters,
            self._places,
            self._engine,
            self._connection,
            self._replicas,
            recorder,
            settings,
            name,
        )

    # Horovod calls these two.

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, GradientContext]:
        """Take a parameter's gradient; return what Horovod is to reduce, and a context."""
        self._steps.close_finished()
        if not self._steps.under_way and self._set.size() != self._engine.world_size:
            self.rejoin()  # an elastic reset that removed ranks: Horovod then skips ``sync``
        if not self._connection.is_up:
            self._connection.connect(self._facts, self)
        return self._steps.take(tensor)

    def decompress(self, tensor: torch.Tensor, ctx: GradientContext | None) -> torch.Tensor:
        """Return the reduced gradient; ``tensor`` is what Horovod made of ``compress``'s."""
        return self._steps.give_back(tensor, ctx)

    # For the user.

    def stats(self) -> dict[str, Any]:
        """Return what this rank has sent and spent so far.

        ``dense_nbytes``: the gradients in float32; ``sent_nbytes``: what was handed to
        collectives, headers, padding and probes included; ``ratio``: their quotient;
        ``received_nbytes``: what buckets' collectives gave back. Seconds:
        ``encode_s``; ``encode_hidden_s``, those of them that passed before the step's last
        gradient came; ``encode_wait_s``, in which the training thread waited for an encoding;
        ``wait_s`` (for other ranks and the network; dense tensors, which Horovod exchanges,
        excluded), ``decode_s``, ``check_s`` (of parameters between ranks).
        ``relative_error``: norm of what the last measured step left unsent over the norm of what
        it was to send; ``total_error``: sum over all steps of the square of what each left unsent.
        ``similarity``: of the positions that another rank chose for all in the
        last measured step, the share that this one would have chosen; None if there were none.
        ``skipped_steps``: steps with NaN or Inf somewhere, which left no trace in
        the residuals. ``density``: the present one. ``choices``: of ``auto``, what it has chosen
        for each tensor, in words.
        """
        self._steps.close_if_complete()
        self._engine.read_device()
        costs, exchanges = self._engine.costs, self._steps.exchanges
        sent = costs.sent_nbytes + self._steps.other_nbytes
        return {
            "steps": self._steps.count,
            "dense_nbytes": self._steps.dense_nbytes,
            "sent_nbytes": sent,
            "received_nbytes": costs.received_nbytes,
            "ratio": self._steps.dense_nbytes / sent if sent else math.nan,
            "encode_s": costs.encode_s,
            "encode_hidden_s": exchanges.encode_hidden_s,
            "encode_wait_s": exchanges.encode_wait_s,
            "wait_s": exchanges.wait_s,
            "decode_s": costs.decode_s,
            "check_s": self._replicas.seconds,
            "relative_error": costs.relative_error,
            "total_error": costs.total_error,
            "similarity": costs.similarity,
            "skipped_steps": costs.skipped_steps,
            "collectives": costs.collectives,
            "density": self._policy.density(self._engine.step),
            "choices": self._engine.choices(),
        }

    def residual(self, name: str) -> torch.Tensor:
        """Return what is not sent yet of the parameter called ``name``, float32 in its shape."""
        self._steps.settle()
        return torch.from_numpy(self._engine.residual(name))

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
            self._connection.gather({"step": self._engine.step, "density": density})
        )
        self._use_density(density)

    def report(self, metric: float) -> None:
        """Report a validation metric, on every rank; more density if the first rank's worsens.

        See ``Recover``, which has to be given as ``recover=``.
        """
        if self._recovery is None:
            raise ValueError("report() needs recover=Recover(...) when the compressor is made")
        self._steps.settle()
        first = self._connection.gather(float(metric))[0]
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
        self._steps.settle()
        state = {**self._engine.state_dict(), "density": self._changed_density}
        state["recovery"] = self._recovery.state_dict() if self._recovery else None
        return arrays.to_torch(state)

    def gathered_state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, on all ranks; all have to call it.

        It can be loaded by any number of ranks; the sum of the residuals stays what it was.
        """
        return checkpoint.gathered(self._connection.gather(self.state_dict()))

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
        state = self.state_dict()
        kept = state.pop("state")
        state["common"] = checkpoint.common(kept)
        self._connection.recount()
        present = self._connection.gather(state)
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
        return (
            f"Compression.{self._policy.recipe}: {self._policy!r}, {len(self._buckets)} buckets, "
            f"{sum(p is None for p in self._places)} of {len(self._parameters)} tensors dense"
        )

    @property
    def _buckets(self) -> list[Bucket]:
        return self._engine.buckets

    def _facts(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks, for the handshake."""
        layout = [
            (tensor, str(parameter.dtype), place)
            for tensor, parameter, place in zip(
                self._parameters.specs(), self._parameters.tensors, self._places, strict=True
            )
        ]
        ruled = [bucket.policy.facts() for bucket in self._buckets]
        return {
            **self._policy.facts(),
            "rules' policies (hash)": f"{wire.fnv1a(str(ruled)):x}",
            "number of tensors": len(layout),
            "compressed tensors": sum(place is not None for place in self._places),
            "buckets": len(self._buckets),
            "names, shapes, dtypes and order of the tensors (hash)": f"{wire.fnv1a(str(layout)):x}",
            # Their sums may differ in the last bits, which ranks must not.
            "steps computed on": "the host" if self._engine.device is None else "the GPU",
            "replica_check": self._settings.replica_check,
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


def _recorder_of(settings: Settings) -> Recorder | None:
    if settings.record is None or settings.process_set.rank() != 0:
        return None
    return Recorder(settings.record, settings.every)


def _buckets_of(tensors: list[Tensor], policy: Scheduled, settings: Settings) -> list[Bucket]:
    rules = check_rules(settings.rules, policy)
    for pattern in unmatched(rules, tensors):
        warnings.warn(f"rules: no parameter's name matches {pattern!r}", stacklevel=5)
    return make_buckets(tensors, policy, rules, settings.min_numel, settings.bucket_nbytes)


def _places_in(buckets: list[Bucket], names: list[str]) -> list[Place | None]:
    """Return the place of each named tensor; None if it lies in no bucket."""
    places = {
        tensor.name: Place(number, index)
        for number, bucket in enumerate(buckets)
        for index, tensor in enumerate(bucket.tensors)
    }
    return [places.get(name) for name in names]
