"""``Compression``: what a user of ``horovod.torch`` passes as ``compression=``.

Horovod calls ``compress`` with a gradient, reduces what that returns, and calls ``decompress``
with the outcome. For a compressed tensor it gets a probe, a single 1.0; the exchange itself runs
beside it, and the probe's reduced value carries Horovod's op and factors to our sum.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import horovod.torch as hvd
import numpy as np
import torch

import horovod_fftcomp
from horovod_fftcomp import handshake, wire
from horovod_fftcomp.buckets import BUCKET_NBYTES, MIN_NUMEL, is_compressed, make_buckets
from horovod_fftcomp.engine import Engine
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.recipes import RECIPES, get_scheme
from horovod_fftcomp.schemes import Round, Scheme, Tensor
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.torch.arrays import flat_float32, gradient_like, restored, sendable
from horovod_fftcomp.torch.rounds import PendingRound

# Every rank makes its compressors in the same order, so equal numbers mean the same one.
_numbers = itertools.count()


class _Place(NamedTuple):
    """Where a compressed parameter's gradient goes."""

    bucket: int
    index: int


class _Context(NamedTuple):
    """What ``decompress`` has to know of a gradient."""

    grad: torch.Tensor
    place: _Place | None  # None: exchanged densely, by Horovod


class Compressor:
    """One recipe bound to the parameters of one optimizer; made by ``Compression``.

    Tensors of fewer than ``min_numel`` elements and vectors travel dense. The others are
    exchanged in buckets of up to ``bucket_nbytes`` dense bytes. An exchange that gets no answer
    for ``timeout_s`` seconds ends the run with a message.
    """

    def __init__(
        self,
        recipe: str,
        parameters: torch.nn.Module | Iterable[Any],
        scheme: Scheme,
        min_numel: int = MIN_NUMEL,
        bucket_nbytes: int = BUCKET_NBYTES,
        timeout_s: float = 600.0,
    ) -> None:
        self._recipe = recipe
        self._scheme = scheme
        self._timeout_s = timeout_s
        self._number = next(_numbers)
        self._names, self._parameters = _named(parameters)
        tensors = [
            Tensor(name, tuple(parameter.shape))
            for name, parameter in zip(self._names, self._parameters, strict=True)
        ]
        if scheme == Dense("float32"):
            compressed = []
        else:
            compressed = [tensor for tensor in tensors if is_compressed(tensor, min_numel)]
        self._buckets = make_buckets(compressed, bucket_nbytes)
        places = {
            tensor.name: _Place(number, index)
            for number, bucket in enumerate(self._buckets)
            for index, tensor in enumerate(bucket)
        }
        self._places = [places.get(name) for name in self._names]
        self._engine = Engine(scheme, self._buckets, hvd.rank(), hvd.size())
        self._connected = False
        self._dense_nbytes = self._other_nbytes = 0
        self._wait_s = 0.0
        self._steps = 0
        self._seen: dict[int, None] = {}  # parameters in this step's order
        self._last_order: list[int] = []
        self._grads: list[list[np.ndarray | None]] = [[None] * len(b) for b in self._buckets]
        self._pending: dict[int, PendingRound] = {}
        self._finishing = False

    # Horovod calls these two.

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Context]:
        """Take a parameter's gradient; return what Horovod is to reduce, and a context."""
        if self._finishing:
            self._begin_step()
        if not self._connected:
            self._connect()
        number = self._find(tensor)
        self._seen[number] = None
        self._dense_nbytes += 4 * tensor.numel()
        place = self._places[number]
        if place is None:
            sent = sendable(tensor)
            self._other_nbytes += sent.numel() * sent.element_size()
            return sent, _Context(tensor, None)
        members = self._grads[place.bucket]
        members[place.index] = flat_float32(tensor)
        if all(grad is not None for grad in members):
            self._start(place.bucket)
        self._advance_done()
        probe = torch.ones(1)
        self._other_nbytes += probe.element_size()
        return probe, _Context(tensor, place)

    def decompress(self, tensor: torch.Tensor, ctx: _Context | None) -> torch.Tensor:
        """Return the reduced gradient; ``tensor`` is what Horovod made of ``compress``'s."""
        if ctx is None:  # a sparse gradient that Horovod gathered itself
            return tensor
        if not self._finishing:
            self._finish_step()
        if ctx.place is None:
            if self._buckets:
                self._engine.observe(bool(torch.isfinite(tensor).all()))
            return restored(tensor, ctx.grad)
        total = self._engine.sums(ctx.place.bucket)[ctx.place.index]
        return gradient_like(total, tensor / hvd.size(), ctx.grad)

    # For the user.

    def stats(self) -> dict[str, float]:
        """Return what this rank has sent and spent so far.

        ``dense_nbytes``: the gradients in float32; ``sent_nbytes``: what was handed to
        collectives, headers, padding and probes included; ``ratio``: their quotient. Seconds:
        ``encode_s``, ``wait_s`` (for other ranks and the network; dense tensors, which Horovod
        exchanges, excluded), ``decode_s``. ``relative_error``: norm of what the last measured
        step left unsent over the norm of what it was to send. ``skipped_steps``: steps with NaN
        or Inf somewhere, which left no trace in the residuals.
        """
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
            "relative_error": costs.relative_error,
            "skipped_steps": costs.skipped_steps,
            "collectives": costs.collectives,
        }

    def state_dict(self) -> dict:
        """Return this rank's residuals and step; every rank has others, so save all of them."""
        if self._finishing:
            self._begin_step()
        return self._engine.state_dict()

    def load_state_dict(self, saved: dict) -> None:
        """Restore what ``state_dict`` returned on the same rank."""
        self._engine.load_state_dict(saved)
        self._finishing, self._seen = False, {}

    def residual(self, name: str) -> torch.Tensor:
        """Return what is not sent yet of the parameter called ``name``, float32 in its shape."""
        if self._finishing:
            self._begin_step()
        return torch.from_numpy(self._engine.residual(name))

    def __repr__(self) -> str:
        return (
            f"Compression.{self._recipe}: {self._scheme!r}, {len(self._buckets)} buckets, "
            f"{sum(p is None for p in self._places)} of {len(self._names)} tensors dense"
        )

    # The course of a step.

    def _connect(self) -> None:
        """Compare configurations with the other ranks; raise if they differ."""
        layout = [
            (name, tuple(parameter.shape), str(parameter.dtype), place)
            for name, parameter, place in zip(
                self._names, self._parameters, self._places, strict=True
            )
        ]
        facts = {
            "horovod_fftcomp": horovod_fftcomp.__version__,
            "wire format": wire.VERSION,
            "recipe": self._recipe,
            "options": repr(self._scheme),
            "number of tensors": len(layout),
            "compressed tensors": sum(place is not None for place in self._places),
            "buckets": len(self._buckets),
            "names, shapes, dtypes and order of the tensors (hash)": f"{wire.fnv1a(str(layout)):x}",
        }
        message = Round("allgather", handshake.pack(facts))
        pending = PendingRound(message, f"fftcomp.{self._number}.handshake")
        handshake.compare(pending.wait(self._timeout_s))
        self._connected = True

    def _find(self, tensor: torch.Tensor) -> int:
        """Return the number of the parameter whose gradient ``tensor`` is."""
        position = len(self._seen)
        if position < len(self._last_order):  # hooks mostly fire in the order of the last step
            number = self._last_order[position]
            if self._parameters[number].grad is tensor and number not in self._seen:
                return number
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is tensor:
                if number in self._seen:
                    raise UnsupportedError(
                        f"gradient of {self._names[number]!r} came twice in one step; a "
                        "compressor serves one optimizer: make another for the second"
                    )
                return number
        return self._find_densified(tensor)

    def _find_densified(self, tensor: torch.Tensor) -> int:
        """Return the parameter whose sparse gradient Horovod made dense, if there is one."""
        for number, parameter in enumerate(self._parameters):
            if parameter is tensor:
                raise UnsupportedError(
                    "op=hvd.Adasum hands over parameters instead of gradients and cannot be "
                    "compressed; use op=hvd.Average or op=hvd.Sum"
                )
            grad = parameter.grad
            if (
                grad is not None
                and grad.is_sparse
                and grad.shape == tensor.shape
                and number not in self._seen
            ):
                return number
        raise UnsupportedError(
            f"a gradient of shape {tuple(tensor.shape)} belongs to none of the "
            f"{len(self._parameters)} parameters given to Compression.{self._recipe}; give it "
            "all parameters of the optimizer: the model, model.named_parameters() or a list"
        )

    def _start(self, bucket: int) -> None:
        grads = self._grads[bucket]
        filled = [
            np.zeros(math.prod(tensor.shape), np.float32) if grad is None else grad
            for grad, tensor in zip(grads, self._buckets[bucket], strict=True)
        ]
        self._submit(bucket, self._engine.start(bucket, filled), 0)
        self._grads[bucket] = [None] * len(filled)

    def _submit(self, bucket: int, round_: Round, number: int) -> None:
        name = f"fftcomp.{self._number}.{bucket}.{number}"
        self._pending[bucket] = PendingRound(round_, name)

    def _advance(self, bucket: int) -> None:
        """Wait for a bucket's round and start the next one, if there is one."""
        pending = self._pending.pop(bucket)
        begin = time.perf_counter()
        output = pending.wait(self._timeout_s)
        self._wait_s += time.perf_counter() - begin
        following = self._engine.advance(bucket, output)
        if following is not None:
            self._submit(bucket, following, int(pending.name.rpartition(".")[2]) + 1)

    def _advance_done(self) -> None:
        """Start the next round of every bucket whose current one is done; decoding can wait."""
        last = len(self._scheme.rounds) - 1
        for bucket, pending in list(self._pending.items()):
            if not pending.name.endswith(f".{last}") and pending.is_done():
                self._advance(bucket)

    def _finish_step(self) -> None:
        """Complete every bucket: Horovod has submitted all gradients of this step by now."""
        self._finishing = True
        for bucket, grads in enumerate(self._grads):
            if any(grad is not None for grad in grads):
                self._start(bucket)
        while self._pending:
            for bucket in sorted(self._pending):
                self._advance(bucket)

    def _begin_step(self) -> None:
        """Close the step that ``decompress`` has finished; what it changed is committed."""
        self._engine.settle()
        self._steps += 1
        self._last_order, self._seen = list(self._seen), {}
        self._finishing = False


def _named(
    parameters: torch.nn.Module | Iterable[Any],
) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Return names and trainable parameters of a model, of named parameters or of a list."""
    if isinstance(parameters, torch.nn.Module):
        parameters = parameters.named_parameters()
    items = list(parameters)
    pairs = [item if isinstance(item, tuple) else (f"{i}", item) for i, item in enumerate(items)]
    trainable = [(name, parameter) for name, parameter in pairs if parameter.requires_grad]
    if not trainable:
        raise ValueError(
            "model has no trainable parameters; pass the model whose gradients the optimizer "
            "exchanges, its named_parameters() or a list of parameters"
        )
    names, tensors = zip(*trainable, strict=True)
    return list(names), list(tensors)


class _Factories(type):
    def __getattr__(cls, recipe: str) -> Callable[..., Compressor]:
        if recipe not in RECIPES:
            raise AttributeError(f"unknown recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
        return _factory(recipe)

    def __dir__(cls) -> list[str]:
        return [*super().__dir__(), *RECIPES]


class Compression(metaclass=_Factories):
    """One factory for each recipe: ``Compression.fft(model, density=0.15)`` and so on.

    Each takes the model (or its ``named_parameters()``, or a list of parameters), the recipe's
    options (``horovod-fftcomp recipes`` lists them) and those of ``Compressor``.
    """


def _factory(recipe: str) -> Callable[..., Compressor]:
    def make(
        model: torch.nn.Module | Iterable[Any],
        *,
        min_numel: int = MIN_NUMEL,
        bucket_nbytes: int = BUCKET_NBYTES,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> Compressor:
        scheme = get_scheme(recipe, **options)
        return Compressor(recipe, model, scheme, min_numel, bucket_nbytes, timeout_s)

    make.__name__ = make.__qualname__ = recipe
    make.__doc__ = f"Return a compressor: {RECIPES[recipe].summary}; see ``Compressor``."
    return make
