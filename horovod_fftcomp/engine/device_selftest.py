"""GPU self-test: compares the GPU's sums of two tensors with the CPU's before training."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from horovod_fftcomp.codec.transforms import Identity
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.drive import drive_all
from horovod_fftcomp.errors import UnsupportedError, warn
from horovod_fftcomp.kernels.cuda import Device, on_host
from horovod_fftcomp.kernels.cuda.guarded import GuardedDevice
from horovod_fftcomp.schemes import Context, Round, Scheme
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.auto import Auto
from horovod_fftcomp.schemes.dense import Dense
from horovod_fftcomp.schemes.hard_threshold import HardThreshold
from horovod_fftcomp.schemes.powersgd import PowerSgd
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import Array, OldState, Tensor

# Tolerances as shares of the largest magnitude. A transform adds in another order than the CPU's;
# so does a matrix product, which users may let PyTorch compute in TF32, of 11 bits.
TRANSFORMED, MULTIPLIED = 1e-5, 0.01
_SMALL, _LARGE = Tensor("small", (37, 81)), Tensor("large", (280, 250))  # one tile, and 18
# Where coefficients differ by rounding, a few of many are also quantized to another level, or not
# chosen. So sums of the large tensor may differ by this share of their norm; a wrong tile is 24 %.
_REQUANTIZED = 0.05
_SWITCH = "HOROVOD_FFTCOMP_GPU"

AnyDevice = TypeVar("AnyDevice", bound=Device)


def trusted(
    make: Callable[[], AnyDevice], place: object, buckets: Sequence[Bucket]
) -> AnyDevice | None:
    """Return the device that ``make`` returns; None if gradients are to be compressed on the host.

    None if no bucket can run on a GPU, if HOROVOD_FFTCOMP_GPU=0 is set, or if the kernels fail to
    run or to pass ``probe``; then a RuntimeWarning names ``place`` and the reason. The host
    computes the same results, but slower.
    """
    schemes: dict[Scheme, None] = {}
    for bucket in buckets:
        after = bucket.policy.after_warmup
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
        warn(
            f"gradients on {place} are compressed on the host, because the GPU kernels do not run: "
            f"{error!r}. They need CuPy for the framework's CUDA version, 12 or 13: pip install "
            "'horovod_fftcomp[gpu]' or 'horovod_fftcomp[gpu13]'. If the framework itself fails "
            f"from here on, set {_SWITCH}=0, which skips this test of the GPU"
        )
        return None
    return device


def probe(device: Device, schemes: Iterable[Scheme]) -> None:
    """Raise UnsupportedError unless the device computes the CPU's sums with all ``schemes``.

    Sums must be equal to the last bit, unless a transform or a matrix product is involved. Arrays
    lie between guard bands, and kernels must not write there. The kernels of the schemes are
    compiled in passing.
    """
    for scheme, tensor in itertools.product(schemes, (_SMALL, _LARGE)):
        for asked, tolerance in _test_cases(scheme, tensor):
            _compare(device, asked, tensor, tolerance)


def _compare(device: Device, scheme: Scheme, tensor: Tensor, tolerance: float) -> None:
    """Raise UnsupportedError unless the device computes the CPU's sums of ``tensor``."""
    steps = np.arange(tensor.numel, dtype=np.float64)
    grad = (np.sin(0.37 * steps) * np.exp2(steps % 13)).astype(np.float32)
    guarded = GuardedDevice(device, band_nbytes=(4 * grad.size // 256 + 256) * 256)
    grads = [grad, -grad[::-1]]
    if scheme.traits.sends_signs:
        grads.append(np.roll(grad, 7))  # the sum of two votes is a vote already
    expected, total = (_exchanged(scheme, tensor, grads, on) for on in (None, guarded))
    peak = float(np.abs(expected).max())
    what = f"a sum with values up to {peak:.3g}"
    text = guarded.check()
    if tolerance and tensor is _LARGE:
        text = text or _difference_of_norms(what, total, expected, _REQUANTIZED)
    else:
        text = text or _difference(what, total, expected, tolerance * peak)
    if text:
        raise UnsupportedError(f"{text}: {scheme!r}")


def _difference(what: str, found: Array, expected: Array, limit: float) -> str:
    """Return the first difference of values of more than ``limit`` in words; "" without one.

    If both are not finite their values are not compared.
    """
    ours, theirs = np.isfinite(found).all(), np.isfinite(expected).all()
    if ours != theirs:
        words = [" is finite", " is not finite"]
        return f"{what}{words[not ours]}, the CPU's{words[not theirs]}"
    if not theirs or (close := np.abs(found - expected) <= limit).all():
        return ""
    place = int(close.argmin())
    return f"element {place} of {what} is {found[place]}, the CPU's is {expected[place]}"


def _difference_of_norms(what: str, found: Array, expected: Array, limit: float) -> str:
    """Return the same of norms; ``limit`` is a share of the norm of ``expected``."""
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    difference = float(np.linalg.norm(found.astype(np.float64) - expected))
    if difference <= limit * norm:
        return ""
    return f"{what} differs from the CPU's by {difference / (norm or 1):.3g} of its norm"


def _test_cases(scheme: Scheme, tensor: Tensor) -> Iterator[tuple[Scheme, float]]:
    """Yield (scheme to run, tolerance as a share of the peak) to test ``scheme``."""
    if isinstance(scheme, Wrapper):
        yield from _test_cases(scheme.scheme, tensor)
    elif isinstance(scheme, Auto):
        for codec in scheme.samples(tensor.shape):
            gathered = Allgather(codec, scheme.error_feedback, beta=scheme.beta)
            yield from _test_cases(gathered, tensor)
    elif isinstance(scheme, HardThreshold):
        yield replace(scheme, threshold=1.0), 0.0
    elif isinstance(scheme, Allgather) and not isinstance(scheme.codec.transform, Identity):
        yield replace(scheme, sign=False), TRANSFORMED  # a rounding might change a sign
    elif isinstance(scheme, PowerSgd):
        yield replace(scheme, rank=min(scheme.rank, 8)), MULTIPLIED
    else:
        yield scheme, 0.0


def _exchanged(
    scheme: Scheme, tensor: Tensor, grads: Sequence[Array], device: Device | None
) -> Array:
    """Return the sums of two consecutive steps, concatenated; ``grads``: of each rank."""
    n_ranks, sums = len(grads), []
    states: list[OldState] = [{}] * n_ranks
    for step in range(2):
        contexts = [Context(step, rank, n_ranks, device=device) for rank in range(n_ranks)]
        exchanges = {
            context.rank: scheme.exchange([tensor], [np.ascontiguousarray(grad)], state, context)
            for grad, state, context in zip(grads, states, contexts, strict=True)
        }
        outcomes = drive_all(exchanges, lambda rounds: _outputs(rounds, device))
        states = [outcomes[rank].state for rank in range(n_ranks)]
        sums.append(on_host(outcomes[0].sums[0], device))
    return np.concatenate(sums)


def _outputs(rounds: Mapping[int, Round], device: Device | None) -> dict[int, Array]:
    """Return the output of a collective of all ranks, by way of the host."""
    data = [on_host(round_.data, device) for round_ in rounds.values()]
    gathers = rounds[0].collective == "allgather"
    output = np.concatenate(data) if gathers else sum(data[1:], data[0])
    return {rank: output if device is None else device.upload(output) for rank in rounds}
