"""Measurements of compressors: times relative to a memcpy, bytes and errors.

Gradients come from ``tools.gradient_files``; the tables are made in ``cli.bench_report``.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_fftcomp.codec.transforms import energy_of
from horovod_fftcomp.kernels import threads
from horovod_fftcomp.tools.bench.measurement import Measurement, Samples, added, entropy_bits  # noqa: F401
from horovod_fftcomp.tools.bench.sessions import RecipeSession, Session  # noqa: F401
from horovod_fftcomp.tools.gradient_files import History
from horovod_fftcomp.types import Array
from horovod_fftcomp.wire.header import Plan

# 2**18 elements, 1 MiB: a smaller part of a memcpy is copied before a second thread has started.
_LEAST_COPIED = 1 << 18
# Once a block of this size has been freed, glibc's malloc keeps blocks up to it for reuse.
_LARGEST_KEPT_NBYTES = (32 << 20) - (1 << 16)
_MOST_IN_A_ROW = 3


def measure(
    history: History, sessions: Sequence[Session], repeat: int, tick: Callable[[], None]
) -> list[Measurement]:
    """Return the measurement of each session on the steps of ``history``, in order.

    The first step makes a residual and is not measured, unless it is the only one. Each other step
    is timed so often that every median is of at least ``repeat`` times. Sessions take turns, so
    that a drift of the clock affects all of them. In a turn a session runs once, to replace what
    the other sessions have left in memory, and then is timed a few times, each after a memcpy.
    ``tick`` is called after each turn and once for each first step.
    """
    grads = [grad.reshape(-1) for grad in history.steps]
    measured = grads[1:] or grads
    settle_malloc()
    for session in sessions:
        session.advance(grads[0])
        tick()
    samples: list[Samples] = [{} for _ in sessions]
    errors: list[list[dict[str, float]]] = [[] for _ in sessions]
    copied = np.empty_like(grads[0])
    for grad in measured:
        rounds, in_a_row = schedule(history, repeat)
        for _ in range(rounds):
            for session, taken in zip(sessions, samples, strict=True):
                _time_once(session, grad)
                for _ in range(in_a_row):
                    seconds, _ = _seconds(memcpy, copied, grad)
                    for what, time_s in {"memcpy": seconds, **_time_once(session, grad)}.items():
                        taken.setdefault(what, []).append(time_s)
                tick()
        for session, found in zip(sessions, errors, strict=True):
            found.append(_errors(session, grad))
    memcpy_s = statistics.median(itertools.chain(*(taken["memcpy"] for taken in samples)))
    return [
        _measurement(session, grads[0].size, memcpy_s, found, taken)
        for session, found, taken in zip(sessions, errors, samples, strict=True)
    ]


def schedule(history: History, repeat: int) -> tuple[int, int]:
    """Return (turns of a session, timings in a turn) for each measured step."""
    times = -(-repeat // max(1, len(history.steps) - 1))
    in_a_row = min(times, _MOST_IN_A_ROW)
    return -(-times // in_a_row), in_a_row


def n_ticks(history: History, n_sessions: int, repeat: int) -> int:
    """Return how often ``measure`` calls ``tick``."""
    n_measured = max(1, len(history.steps) - 1)
    return n_sessions * (1 + n_measured * schedule(history, repeat)[0])


def settle_malloc() -> None:
    """Free a large block, after which glibc's malloc keeps such blocks for reuse, as in a training.

    Otherwise it returns each block of some megabytes to the system, and the page faults of the next
    one can double a time.
    """
    np.empty(_LARGEST_KEPT_NBYTES, np.uint8)


def _time_once(session: Session, grad: Array) -> dict[str, float]:
    """Return the seconds of an encoding, of one with feedback if it has any, and of a decoding."""
    times = {}
    times["encode"], message = _seconds(session.encode, grad, False)
    if session.has_feedback:
        del message  # so that both encodings find the same memory
        times["feedback"], message = _seconds(session.encode, grad, True)
    received = session.collect(message)
    times["decode"], _ = _seconds(session.decode, received)
    return times


def _seconds(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - begin, result


def memcpy(target: Array, source: Array) -> None:
    """Copy ``source`` into ``target`` with as many threads as the kernels have."""
    parts = threads.ranges(source.size, _LEAST_COPIED)
    threads.each(np.copyto, [(target[begin:end], source[begin:end]) for begin, end in parts])


def _errors(session: Session, grad: Array) -> dict[str, float]:
    """Return the energies of a step that ``Measurement`` has sums of; advances the session."""
    decoded = session.alone(grad)
    found = {
        "energy": energy_of(grad),
        "decoded_energy": energy_of(decoded),
        "error_energy": energy_of(grad - decoded),
    }
    if session.has_feedback:
        found["feedback_energy"] = energy_of(grad + session.residual())
        session.advance(grad)
        found["feedback_error_energy"] = energy_of(session.residual())
    return found


def _measurement(
    session: Session,
    numel: int,
    memcpy_s: float,
    errors: Sequence[Mapping[str, float]],
    samples: Samples,
) -> Measurement:
    found: dict[str, Any] = {f"{what}_s": statistics.median(own) for what, own in samples.items()}
    found |= {name: sum(one[name] for one in errors) for name in errors[0]}
    found |= {"memcpy_s": memcpy_s, "samples_s": samples}
    plan: Plan | None = getattr(session, "plan", None)
    if plan is not None and plan.positions.nbytes > 0:
        found |= {"k": plan.k, "positions_nbytes": plan.positions.nbytes}
        found["entropy_bits"] = entropy_bits(plan.n_bins, plan.k)
    return Measurement(label=session.label, numel=numel, sent_nbytes=session.sent_nbytes, **found)
