"""Times and bytes of the steps of a script, from the compressors that ``run`` gave it."""

from __future__ import annotations

import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from horovod_fftcomp.tools.advise.cost_model import spread

# The first steps compile, allocate and make connections.
_WARM_UP = 3
# Blocks to pair with those of another job: long enough to leave single slow steps out of a median.
_BLOCK_STEPS, _MOST_BLOCKS = 5, 40
_SUMMED = ("steps", "dense_nbytes", "sent_nbytes", "encode_s", "wait_s", "decode_s")
_NOTHING = dict.fromkeys(_SUMMED, 0.0)


class _EndedTraining(NamedTuple):
    """Training that has ended, it seems: its figures, and what is needed to go on with it."""

    figures: dict[str, Any]
    timed: Callable[[], Any]
    compressors: Sequence[Callable[[], Any]]  # weak references
    closed_at: list[float]
    before: list[dict[str, float]]


class StepReport:
    """Observes compressors; calls ``ended`` when ``timed`` has closed ``n_steps`` steps.

    ``timed``: the compressor whose first step ends first; others may never take one. A compressor
    that is made after that is another training's, whose steps follow: it is timed from its first
    step on, and the steps before are counted and reported with theirs. If the former one then takes
    a step, too, they are one training's, as of a GAN.
    """

    def __init__(self, n_steps: int | None = None, ended: Callable[[], None] | None = None) -> None:
        self._n_steps = n_steps
        self._ended = ended
        self._compressors: list[Any] = []
        self.timed: Any = None
        self._closed_at: list[float] = []
        self._before: list[dict[str, float]] = [_NOTHING]  # sums before steps that count
        self._later: list[Any] = []  # compressors made since the timed one has taken steps
        self._earlier: list[_EndedTraining] = []

    def watch(self, compressor: Any) -> None:
        """Count the bytes of a compressor, and its steps if it is the first to take one."""
        compressor.on_step(lambda: self._step_ended(compressor))
        (self._later if self._closed_at else self._compressors).append(compressor)

    def disarm(self) -> None:
        """Stop calling ``ended``: the script has ended by itself."""
        self._ended = None

    def _step_ended(self, compressor: Any) -> None:
        if compressor in self._later:
            own = list(map(weakref.ref, self._compressors))
            timed, figures = weakref.ref(self.timed), self._figures()
            self._earlier.append(_EndedTraining(figures, timed, own, self._closed_at, self._before))
            self._compressors, self._later, self._closed_at = self._later, [], []
            self._before, self.timed = [_NOTHING], compressor
        elif compressor not in self._compressors:
            self._go_on_with(compressor)
        if self.timed is None:
            self.timed = compressor
        if compressor is not self.timed:
            return
        self._closed_at.append(time.perf_counter())
        if len(self._closed_at) in (self._n_dense(), self._n_dense() + _WARM_UP):
            self._before.append(self._so_far())
        n_steps = len(self._closed_at) + sum(one.figures["steps"] for one in self._earlier)
        if self._ended is not None and n_steps == self._n_steps:
            self._ended()

    def _go_on_with(self, compressor: Any) -> None:
        """Take back that the training of a compressor has ended."""
        [ended] = [one for one in self._earlier if compressor in [own() for own in one.compressors]]
        self._earlier.remove(ended)
        alive = [own() for own in ended.compressors]
        self._compressors = [own for own in alive if own is not None] + self._compressors
        self._closed_at, self._before = ended.closed_at, ended.before
        self.timed = ended.timed() or compressor

    def _bound(self) -> list[Any]:
        return [c for c in self._compressors if getattr(c, "is_bound", True)]

    def _so_far(self) -> dict[str, float]:
        """Return the sums of ``stats`` over all compressors; steps are those of the timed one."""
        stats = [compressor.stats() for compressor in self._bound()]
        found = {key: sum(one[key] for one in stats) for key in _SUMMED}
        return found | {"steps": self.timed.stats()["steps"] if self.timed is not None else 0}

    def values(self) -> dict[str, Any]:
        """Return the figures of this rank's steps, as JSON values.

        ``steps``: number of steps; if 0, there is no other key. All other figures leave the dense
        steps of the compressor's start out, and three more, if others follow. ``step_s``: median
        time from the end of one step to the end of the next; ``step_spread``: see
        ``cost_model.spread``; ``blocks_s``: medians of blocks of equally many steps in a row, at
        most 40. Bytes and seconds of ``stats``: means of a step, summed over all compressors.
        ``digest``: hash of the parameters. ``tensors``: names and shapes. ``earlier``: such figures
        of trainings before the last one.
        """
        earlier = [dict(one.figures) for one in self._earlier]
        return self._figures() | ({"earlier": earlier} if earlier else {})

    def _figures(self) -> dict[str, Any]:
        bound = self._bound()
        found = self._so_far() if bound else {"steps": 0}
        steps = int(found["steps"])
        if not steps:
            return {"steps": 0}
        before = [sums for sums in self._before if sums["steps"] < steps][-1]
        counted = steps - before["steps"]
        means = {key: (found[key] - before[key]) / counted for key in _SUMMED}
        times = self._times_s()
        return means | {
            "steps": steps,
            "warmup_steps": self._n_dense(),
            "step_s": statistics.median(times) if times else None,
            "step_spread": spread(times),
            "blocks_s": medians_of_blocks(times),
            "digest": " ".join(compressor.digest() for compressor in bound),
            **bound[0].place(),
            "tensors": [[t.name, list(t.shape)] for c in bound for t in c.tensors()],
        }

    def _times_s(self) -> list[float]:
        """Return the seconds of the steps that count; empty for fewer than two steps."""
        times = [end - begin for begin, end in itertools.pairwise(self._closed_at)]
        n_dense = self._n_dense()
        return times[n_dense + _WARM_UP - 1 :] or times[max(0, n_dense - 1) :] or times

    def _n_dense(self) -> int:
        """Return the number of dense steps of the warm-up."""
        return int(getattr(self.timed, "warmup_steps", 0))


def medians_of_blocks(times: Sequence[float]) -> list[float]:
    """Return the median time of each of some blocks of consecutive steps."""
    n = min(_MOST_BLOCKS, max(1, len(times) // _BLOCK_STEPS))
    ends = [len(times) * number // n for number in range(n + 1)]
    return [statistics.median(times[a:b]) for a, b in itertools.pairwise(ends) if b > a]
