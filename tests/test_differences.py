"""Paired differences of repeated jobs: what noise alone does, and a delay that is there."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from horovod_fftcomp.tools.run.differences import Estimate, mean, middle_of
from horovod_fftcomp.tools.run.differences import difference as difference_of
from horovod_fftcomp.tools.run.step_report import medians_of_blocks

TRIALS = 300
CALM, DISTURBED = (150, 0.05, 0.02), (400, 0.12, 0.1)  # steps, and their noise: see step_times


def step_times(rng, n: int, noise: float, disturbances: float, of_jobs: float) -> np.ndarray:
    """Return the times of a job's steps.

    Neighbours vary alike (correlation 0.2), and by ``noise``. A share of ``disturbances`` begin a
    time of three steps that take half as long again. So the steps of ranks vary that share two
    cores with little else: they were recorded with correlation 0.23, and from the tenth to the
    ninetieth percentile by a factor of 2, of a job's steps, by 2 % of medians of jobs.
    ``of_jobs``: standard deviation of what all steps of a job have in common.
    """
    shocks = rng.normal(0, noise, n + 1)
    begins = rng.random(n) < disturbances
    disturbed = np.convolve(begins, np.ones(3))[:n] > 0
    own = 0.98 * shocks[1:] + 0.2 * shocks[:-1] + rng.normal(0, of_jobs)
    return np.exp(own) * np.where(disturbed, 1.5, 1.0)


def times_seen(
    seed: int, slower: float, of_jobs: float, steps: tuple, others: int = 0, last: float = 1.0
) -> int:
    """Return how often two jobs are told to differ of which one is ``slower`` by a factor.

    ``others``: so many more compressions in the comparison. ``last``: times ``of_jobs``, what jobs
    of the one that is slower have of their own.
    """
    rng, seen = np.random.default_rng(seed), 0
    for _ in range(TRIALS):
        groups: list[dict[int, list[float]]] = [{} for _ in range(2 + others)]
        for number in range(3):
            round_s = np.exp(rng.normal(-3, 0.1))  # the machine, from one round to the next
            for group in groups:
                is_last = group is groups[-1]
                own = step_times(rng, *steps, of_jobs * (last if is_last else 1.0))
                times = round_s * (slower if is_last else 1.0) * own
                group[number] = np.log(medians_of_blocks(times.tolist())).tolist()
        seen += not difference_of(groups[0], groups[-1], groups).holds_zero
    return seen


@pytest.mark.parametrize("of_steps", [CALM, DISTURBED])
@pytest.mark.parametrize("of_jobs", [0.0, 0.005, 0.01, 0.02, 0.05, 0.2])
@pytest.mark.parametrize("others", [0, 2])
def test_no_difference_is_seen_where_none_is(of_jobs, of_steps, others):
    """Also on a busy machine, where a job differs by a fifth from the next one."""
    assert times_seen(1, 1.0, of_jobs, of_steps, others) <= 0.1 * TRIALS


@pytest.mark.parametrize("of_jobs", [0.01, 0.05])
def test_a_compression_whose_jobs_vary_twice_as_much_is_seldom_different(of_jobs):
    found = [times_seen(seed, 1.0, of_jobs, CALM, others=2, last=2.0) for seed in range(5, 8)]
    assert sum(found) <= 0.1 * len(found) * TRIALS


@pytest.mark.parametrize(
    ("of_jobs", "of_steps"), [(0.0, CALM), (0.01, CALM), (0.0, DISTURBED), (0.005, DISTURBED)]
)
def test_a_delay_of_a_tenth_of_a_step_is_seen(of_jobs, of_steps):
    for slower in (1.1, 1 / 1.1):
        assert times_seen(2, slower, of_jobs, of_steps) >= 0.9 * TRIALS


def test_jobs_of_all_compressions_tell_how_much_jobs_vary():
    """Where jobs differ by 2 %, two compressions alone do not show a tenth of a step."""
    alone, of_four = (times_seen(2, 1.1, 0.02, CALM, others) for others in (0, 2))
    assert alone < 0.85 * TRIALS < 0.95 * TRIALS < of_four


def difference(rounds: list[tuple[list[float], list[float]]]) -> Estimate:
    """Return the difference of two compressions, each round of which has a job of both."""
    return difference_of(*({n: jobs[k] for n, jobs in enumerate(rounds)} for k in (0, 1)))


def test_rounds_that_differ_count_by_students_t():
    found = difference([([0.0], [1.0]), ([0.0], [2.0]), ([5.0], [8.0])])
    assert found.value == 2
    assert found.half == pytest.approx(4.303 / math.sqrt(3))
    # Their blocks differ by next to nothing, so what the rounds differ by is no noise of blocks.
    alike = difference([([0.0, 0.0], [x - 0.01, x + 0.01]) for x in (1.0, 2.0, 3.0)])
    assert alike == pytest.approx(found)


def test_the_interval_goes_from_that_of_blocks_to_that_of_rounds():
    def half(apart: float) -> float:
        """Of three rounds, ``apart`` times as far from each other as their blocks explain."""
        blocks = np.array([NormalDist().inv_cdf((n + 0.5) / 20) for n in range(20)])
        blocks /= math.sqrt(middle_of(blocks.tolist())[1])  # their middle half's mean: error 1
        return difference([([0.0] * 20, (blocks + apart * x).tolist()) for x in (-1, 0, 1)]).half

    of_blocks, of_rounds = 1.96 / math.sqrt(3), 4.303 / math.sqrt(3)
    assert of_blocks < half(0.0) < half(0.5) < half(1.0) < 2 * of_blocks
    assert half(1.0) < half(2.0) < half(5.0) < 5 * of_rounds
    for apart in (10, 20):
        assert half(apart) == pytest.approx(apart * of_rounds, rel=0.15)
    assert half(1000) == pytest.approx(1000 * of_rounds)


def test_a_burst_of_other_work_in_a_job_hardly_moves_its_difference():
    quiet = [0.01 * (n % 7) for n in range(20)]
    slow = [*quiet[:15], *(1.0 for _ in range(5))]
    one, other = ([(quiet, [x + 0.1 for x in own])] * 3 for own in (quiet, slow))
    assert difference(one).value == pytest.approx(0.1)
    assert difference(other).value == pytest.approx(0.1, abs=0.02)
    assert not difference(other).holds_zero


def test_one_job_has_no_interval_and_equal_ones_one_of_no_width():
    assert mean([7.0]) == (7.0, None)
    assert not difference([([1.0], [1.0])]).holds_zero  # nothing is known
    assert mean([0.7] * 3) == (0.7, 0.0)
    assert mean([1e200, -1e200]) == (0.0, math.inf)
    assert difference([([0.3], [0.3])] * 3).holds_zero


def test_rounds_count_that_both_have():
    assert difference_of({0: [1.0]}, {1: [2.0]}) is None
    found = difference_of({0: [1.0], 1: [3.0], 2: [9.0]}, {1: [4.0], 2: [12.0], 3: [7.0]})
    assert found == difference([([3.0], [4.0]), ([9.0], [12.0])])


def test_the_interval_is_that_of_an_analysis_of_variance():
    """Without blocks: Student's, with the other residuals of rounds and compressions by half."""
    values = np.random.default_rng(0).normal(size=(4, 5))
    values += 7 * np.arange(4)[:, None] + 3 * np.arange(5)
    groups = [{n: [value] for n, value in enumerate(row)} for row in values]
    residuals = values - values.mean(0) - values.mean(1)[:, None] + values.mean()
    own = values[3] - values[1]
    squares = ((own - own.mean()) ** 2).sum()  # of a difference, as twice those of residuals are
    squares += (2 * (residuals**2).sum() - squares) / 2
    expected = 2.306 * math.sqrt(squares / (4 + (12 - 4) / 2) / 5)
    assert difference_of(groups[1], groups[3], groups).half == pytest.approx(expected, rel=1e-3)
    del groups[2][4]  # a job that failed: about the same
    assert difference_of(groups[1], groups[3], groups).half == pytest.approx(expected, rel=0.2)
    groups.append({})  # a compression whose jobs all failed
    assert difference_of(groups[1], groups[3], groups).half == pytest.approx(expected, rel=0.2)
    # Many compressions count twice as much as the two at most.
    many = [{n: [value] for n, value in enumerate(row)} for row in np.tile(values, (5, 1))]
    assert difference_of(many[1], many[3], many).half < 2.2 * math.sqrt(squares / 8 / 5)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 11, 121])
def test_intervals_have_the_width_of_students_t(n):
    expected = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 11: 2.228, 121: 1.980}[n]
    values = [float(number) for number in range(n)]
    error = np.std(values, ddof=1) / math.sqrt(n)
    assert mean(values).half == pytest.approx(expected * error, rel=0.002)
