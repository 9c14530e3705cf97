"""What in the measurements of ``advise`` says that they are not to be trusted, in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from horovod_fftcomp.tools import environment
from horovod_fftcomp.tools.advise import advice
from horovod_fftcomp.tools.advise.advice import Forecast

# Below this share of the measured step time, computation is not told apart from the exchange.
_TOO_LITTLE = 0.01
_AGAIN = "measure again on idle machines, with more --steps and a larger --repeat"


class Steps(NamedTuple):
    """Measured steps of a script: median time, ``cost_model.spread``, medians of steps in a row."""

    step_s: float
    spread: float = 0.0
    blocks_s: Sequence[float] = ()

    @property
    def error(self) -> float:
        """Relative error of the median."""
        return max(advice.ACCURACY, self.spread)

    @property
    def halves(self) -> list[float]:
        """Median times of the first half of the steps and of the second; empty if they are few."""
        n = len(self.blocks_s) // 2
        return [statistics.median(half) for half in (self.blocks_s[:n], self.blocks_s[-n:]) if n]

    def __str__(self) -> str:
        return f"{1e3 * self.step_s:.1f} ms (±{100 * self.spread:.0f} %)"


def of_load(share: float) -> Iterator[str]:
    """Yield a doubt if other processes used too much of the cores."""
    if share > environment.MOST_LOAD:
        yield (
            f"other processes used {100 * share:.0f} % of the cores before the measurement, more "
            f"than {100 * environment.MOST_LOAD:.0f} %: end them, or measure on other machines"
        )


def of_steps(steps: Mapping[str, Steps], compute_s: float) -> Iterator[str]:
    """Yield doubts on the script's steps: ``none``, and ``random_block`` almost without exchange.

    ``compute_s``: the time for computing that the network's times leave.
    """
    none, bare = steps["none"], steps["random_block"]
    if bare.step_s * (1 - bare.spread) > none.step_s * (1 + none.spread):
        yield (
            f"a step that sends almost nothing took {bare}, longer than one that sends everything, "
            f"{none}: {_AGAIN}; if it stays so, the exchange is too short for compression to gain"
        )
    for what, one in (("without compression", none), ("without exchange", bare)):
        if one.halves and abs(one.halves[1] - one.halves[0]) > one.error * one.step_s:
            first, second = (f"{1e3 * half_s:.1f}" for half_s in one.halves)
            yield (
                f"a step {what} took {first} ms in the first half of the steps and {second} ms in "
                f"the second, which differ by more than {100 * one.error:.0f} %: {_AGAIN}"
            )
    if compute_s < _TOO_LITTLE * min(none.step_s, bare.step_s):
        yield (
            "the network alone was slower than in the script's steps, which leaves no time for "
            f"computing: {_AGAIN}"
        )


def of_forecasts(first: Sequence[Forecast], second: Sequence[Forecast]) -> Iterator[str]:
    """Yield doubts on forecasts of the same options from two measurements."""
    for one, other in zip(first, second, strict=True):
        once_s, again_s, error = one.time.total_s, other.time.total_s, max(one.error, other.error)
        if abs(again_s - once_s) > error * (once_s + again_s) / 2:
            yield (
                f"network and codec were measured twice, by which {one.option.label} takes "
                f"{1e3 * once_s:.1f} ms a step and {1e3 * again_s:.1f} ms, which differ by more "
                f"than {100 * error:.0f} %: {_AGAIN}"
            )


def of_dense(none: Forecast, measured: Steps) -> Iterator[str]:
    """Yield a doubt if no computation makes the model's step as short as the measured one."""
    if none.time.total_s > (1 + advice.ACCURACY) * measured.step_s:
        yield (
            f"a step without compression is forecast to take {1e3 * none.time.total_s:.1f} ms from "
            f"the network's times, and took {measured} in the script: {_AGAIN}"
        )
