"""A GPU's answer to a small question, before a training trusts it."""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.engine import differences
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.errors import UnsupportedError
from horovod_fftcomp.kernels.cuda import Device, on_host
from horovod_fftcomp.schemes import Context, Exchange, OldState, Outcome, Scheme, Tensor
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.auto import Auto
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.schemes.hard_threshold import HardThreshold
from horovod_fftcomp.schemes.powersgd import PowerSgd
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import Array

_TENSOR = Tensor("probe", (160, 125))  # a few tiles
_SWITCH = "HOROVOD_FFTCOMP_GPU"

AnyDevice = TypeVar("AnyDevice", bound=Device)


def trusted(
    make: Callable[[], AnyDevice], place: object, buckets: Sequence[Bucket]
) -> AnyDevice | None:
    """Return the GPU that ``make`` returns if it can compute a bucket and its kernels run.

    Otherwise gradients on it are compressed on the host: by the same rules, but slower. A warning
    names ``place`` and tells why if that is because of the kernels. HOROVOD_FFTCOMP_GPU=0 in the
    environment says so without a question.
    """
    schemes: dict[Scheme, None] = {}
    for bucket in buckets:
        after = bucket.policy.at(getattr(bucket.policy, "warmup_steps", 0))
        if after != Dense() and after.runs_on_device(bucket.tensors):
            schemes[after] = None
            if (first := bucket.policy.at(0)) != Dense() and first.runs_on_device(bucket.tensors):
                schemes[first] = None
    if not schemes or os.environ.get(_SWITCH) == "0":
        return None
    try:
        device = make()
        probe(device, schemes)
    except Exception as error:  # whatever an import, a compiler or a driver may raise
        warnings.warn(
            f"gradients on {place} are compressed on the host, since the GPU's own kernels do not "
            f"run: {error!r}. They need CuPy for CUDA 12 or 13, as the framework: pip install "
            "'horovod_fftcomp[gpu]' or 'horovod_fftcomp[gpu13]'. If the framework itself fails "
            f"from here on, set {_SWITCH}=0: then nothing is asked of the GPU",
            RuntimeWarning,
            stacklevel=6,
        )
        return None
    return device


def probe(device: Device, schemes: Iterable[Scheme]) -> None:
    """Raise UnsupportedError unless the device makes the CPU's sums by all ``schemes``.

    Those without a transform or a product of matrices to the last bit. It also compiles what they
    need.
    """
    steps = np.arange(math.prod(_TENSOR.shape), dtype=np.float64)
    grad = (np.sin(0.37 * steps) * np.exp2(steps % 13)).astype(np.float32)
    for asked, tolerance in itertools.chain.from_iterable(map(_questions, schemes)):
        expected, total = (_exchanged(asked, (grad, -grad[::-1]), on) for on in (None, device))
        peak = differences.peak_of(expected)
        what = f"a sum with values up to {peak:.3g}"
        if text := differences.of_finite(what, total, expected, tolerance * peak):
            raise UnsupportedError(f"{text}: {asked!r}")


def _questions(scheme: Scheme) -> Iterator[tuple[Scheme, float]]:
    """Yield what is asked for a scheme, and by how much of the peak the answer may differ."""
    if isinstance(scheme, Wrapper):
        yield from _questions(scheme.scheme)
    elif isinstance(scheme, Auto):
        for codec in scheme.samples(_TENSOR.shape):
            yield from _questions(Allgather(codec, scheme.error_feedback))
    elif isinstance(scheme, HardThreshold):
        yield replace(scheme, threshold=1.0), 0.0
    elif isinstance(scheme, Allgather) and not isinstance(scheme.codec.transform, Identity):
        yield replace(scheme, sign=False), differences.TRANSFORMED  # a rounding might change a sign
    elif isinstance(scheme, PowerSgd):
        yield replace(scheme, rank=min(scheme.rank, 8)), differences.MULTIPLIED
    else:
        yield scheme, 0.0


def _exchanged(scheme: Scheme, grads: Sequence[Array], device: Device | None) -> Array:
    """Return the sums of two steps of two ranks, the second of which has what the first left."""
    states: list[OldState] = [{}, {}]
    sums = []
    for step in range(2):
        contexts = [Context(step, rank, 2, device=device) for rank in range(2)]
        ranks = [
            scheme.exchange([_TENSOR], [np.ascontiguousarray(grad)], state, context)
            for grad, state, context in zip(grads, states, contexts, strict=True)
        ]
        outcomes = _driven(ranks, device)
        for outcome in outcomes:
            if outcome.on_device is not None and device is not None:
                outcome.on_device.restore(device.zeros(1, np.uint32))
        states = [outcome.state for outcome in outcomes]
        sums.append(on_host(outcomes[0].sums[0], device))
    return np.concatenate(sums)


def _driven(ranks: Sequence[Exchange], device: Device | None) -> list[Outcome]:
    """Return the outcomes of exchanges whose rounds go through the host."""
    outcomes: list[Outcome] = []
    sent = [next(exchange) for exchange in ranks]
    while sent:
        data = [on_host(round_.data, device) for round_ in sent]
        gathers = sent[0].collective == "allgather"
        output = np.concatenate(data) if gathers else data[0] + data[1]
        sent = []
        for exchange in ranks:
            try:
                sent.append(exchange.send(output if device is None else device.upload(output)))
            except StopIteration as stop:
                outcomes.append(stop.value)
    return outcomes
