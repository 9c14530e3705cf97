"""Means and paired differences of repeated jobs, with 95 % confidence intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The 97.5 % quantile of Student's t for 1 to 4 degrees of freedom; an expansion serves for more.
_T = (12.706, 4.303, 3.182, 2.776)
Jobs = Mapping[int, Sequence[float]]  # of a compression: the values of a job's blocks, by its round
_MOST = 1000  # so many times the variance that blocks explain, rounds alone tell theirs


class Estimate(NamedTuple):
    """Mean of jobs; ``half``: half the width of its 95 % interval, None for a single job."""

    value: float
    half: float | None

    @property
    def holds_zero(self) -> bool:
        """Whether 0 lies in the interval."""
        return self.half is not None and abs(self.value) <= self.half


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of one value or more; NaN and infinite ones give NaN."""
    value, n = _mean(values), len(values)
    return Estimate(value, _half_of_rounds(_squares(values, value), n - 1, n) if n > 1 else None)


def difference(base: Jobs, jobs: Jobs, compressions: Sequence[Jobs] = ()) -> Estimate | None:
    """Return the mean of jobs - base over the rounds that both have; None if they have none.

    Blocks of the same number are a pair, so what a round or a place in the training has in common
    cancels; a round counts with the mean of the middle half of its pairs, which a burst of other
    work on the machine hardly moves. The interval is of rounds that vary as these means do, and as
    those between any two of all ``compressions``, which count half: their jobs may vary by less.
    Without blocks it is Student's. With them it depends, besides, on what a job has of its own.
    """
    own = [middle for middle, _ in _rounds(base, jobs)]
    if not own:
        return None
    value, (squares, freedom, known) = _mean(own), _variation([base, jobs])
    if not freedom:
        return Estimate(value, None)
    all_squares, all_freedom, found = _variation([group for group in compressions if group])
    if (more := all_freedom - freedom) > 0:
        known, share = found, min(0.5, 2 * freedom / more)  # of many not more than twice as much
        squares, freedom = squares + share * max(0, all_squares - squares), freedom + share * more
    within = _mean(known or [0.0])
    if squares < _MOST * within:
        return Estimate(value, _half_of_blocks(squares, freedom, len(own), within))
    return Estimate(value, _half_of_rounds(squares, freedom, len(own)))


def _variation(groups: Sequence[Jobs]) -> tuple[float, float, list[float]]:
    """Return squared deviations, degrees of freedom and variances of blocks between any two groups.

    As in an analysis of variance of rounds and compressions: of k groups there are k / 2 times as
    many squares as are independent of each other.
    """
    squares, freedom, known = 0.0, 0.0, []
    for one, other in itertools.combinations(groups, 2):
        rounds = _rounds(one, other)
        if means := [middle for middle, _ in rounds]:
            squares += 2 / len(groups) * _squares(means, _mean(means))
            freedom += 2 / len(groups) * (len(means) - 1)
        known += [variance for _, variance in rounds if variance]  # not of a single block
    return squares, freedom, known


def _rounds(base: Jobs, jobs: Jobs) -> list[tuple[float, float]]:
    """Return mean and variance of jobs - base in the rounds of both."""
    pairs = [(base[number], jobs[number]) for number in base if number in jobs]
    return [middle_of([b - a for a, b in zip(*pair, strict=False)]) for pair in pairs]


def _half_of_rounds(squares: float, freedom: float, n: int) -> float:
    """Return half the width of Student's interval of the mean of n."""
    return _t(max(1, round(freedom))) * math.sqrt(squares / freedom / n)


def _half_of_blocks(squares: float, freedom: float, n: int, within: float) -> float:
    """Return half the width of the interval of the mean of n rounds.

    Few rounds hardly show how much jobs vary by themselves. So the interval is a mean over that
    standard deviation: u times that of blocks, with prior density 1 / (u + 0.1), and the likelihood
    of the squared deviations. Alone, these would give Student's interval, and blocks that of the
    normal distribution; this one goes from the latter to the former as rounds vary by more than
    blocks.
    """
    mixture = []
    for u in (0.01 * 1.15**number for number in range(70)):
        variance = within * (1 + u * u)
        likelihood = (1 + u * u) ** (-freedom / 2) * math.exp(-squares / 2 / variance)
        mixture.append((u / (u + 0.1) * likelihood, math.sqrt(2 * variance / n)))
    low, high = 0.0, 4 * max(error for _, error in mixture)
    total = sum(weight for weight, _ in mixture)
    for _ in range(60):
        half = (low + high) / 2
        outside = sum(weight * math.erfc(half / error) for weight, error in mixture)
        low, high = (half, high) if outside > 0.05 * total else (low, half)
    return half


def _mean(values: Sequence[float]) -> float:
    """Return the mean, to the bit for equal values; infinite ones are no error."""
    return values[0] + sum(value - values[0] for value in values[1:]) / len(values)


def middle_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of all but the least and the largest quarter, and its variance.

    The variance is that of the values with those of the quarters moved to the ends of the middle
    (Tukey and McLaughlin 1963).
    """
    quarter = len(values) // 4
    middle = sorted(values)[quarter : len(values) - quarter]
    moved = [middle[0]] * quarter + middle + [middle[-1]] * quarter
    spread = _squares(moved, _mean(moved)) / max(1, len(middle) - 1) / len(middle)
    return _mean(middle), spread


def _squares(values: Sequence[float], center: float) -> float:
    # ``** 2`` of a float that is too large raises an error; a diverged job's loss may be so large.
    return sum((value - center) * (value - center) for value in values)


def _t(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return 1.960 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3  # within 0.003
