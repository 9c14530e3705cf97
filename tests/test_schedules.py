"""Densities over the steps: their formulas, ends and bounds, and what is refused."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_fftcomp import schedules
from horovod_fftcomp.schedules import (
    Constant,
    Cosine,
    Exponential,
    InverseSqrt,
    Linear,
    Steps,
    as_schedule,
)
from tests.loops import each

RAMPS = [Linear, Cosine, Exponential]
EXAMPLES = [
    Constant(0.15),
    Steps({0: 1.0, 10: 0.5, 20: 0.01}),
    Linear(1.0, 0.1, 90),
    Cosine(0.5, 0.01, 40),
    Exponential(1.0, 0.001, 30),
    InverseSqrt(0.15, 100),
    InverseSqrt(0.15, 100, end=0.5),
]

densities = st.floats(0.0, 1.0, exclude_min=True)
counts = st.integers(1, 10**7)
steps = st.integers(0, 10**8)
any_schedule = st.one_of(
    st.builds(Constant, densities),
    st.builds(Steps, st.dictionaries(steps, densities).map(lambda later: {0: 1.0, **later})),
    *(st.builds(ramp, densities, densities, counts) for ramp in RAMPS),
    st.builds(InverseSqrt, densities, counts, densities),
)


@pytest.mark.parametrize("step", [0, 1, 10**9])
def test_a_constant_stays(step):
    assert Constant(0.15).at(step) == 0.15


@pytest.mark.parametrize(
    ("step", "density"),
    [(0, 1.0), (9, 1.0), (10, 0.5), (19, 0.5), (20, 0.01), (21, 0.01), (10**9, 0.01)],
)
def test_steps_hold_from_their_first_step_on(step, density):
    assert Steps({20: 0.01, 0: 1.0, 10: 0.5}).at(step) == density


@pytest.mark.parametrize(
    ("step", "density"),
    [(0, 1.0), (1, 0.99), (45, 0.55), (89, 0.11), (90, 0.1), (91, 0.1), (10**9, 0.1)],
)
def test_linear_follows_a_line(step, density):
    assert Linear(1.0, 0.1, 90).at(step) == density


@pytest.mark.parametrize(
    ("step", "density"),
    [
        (0, 1.0),
        (20, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        (40, 0.6),
        (60, 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2),
        (80, 0.2),
        (10**9, 0.2),
    ],
)
def test_cosine_follows_half_a_wave(step, density):
    assert Cosine(1.0, 0.2, 80).at(step) == pytest.approx(density, rel=1e-6)


@pytest.mark.parametrize(
    ("step", "density"),
    [(0, 1.0), (1, 0.1), (2, 0.01), (3, 0.001), (4, 0.001), (10**9, 0.001)],
)
def test_exponential_changes_by_an_equal_factor(step, density):
    assert Exponential(1.0, 0.001, 3).at(step) == density


@pytest.mark.parametrize(
    ("step", "density"), [(0, 0.2), (300, 0.6), (1500, 0.8), (6300, 0.9), (10**16, 1.0)]
)
def test_the_drop_ratio_falls_with_the_inverse_root(step, density):
    assert InverseSqrt(0.2, 100).at(step) == density


@pytest.mark.parametrize(("step", "density"), [(0, 0.1), (300, 0.3), (1500, 0.4), (10**16, 0.5)])
def test_an_inverse_root_may_end_below_one(step, density):
    assert InverseSqrt(0.1, 100, end=0.5).at(step) == density


def test_a_hundredfold_time_divides_the_drop_ratio_by_ten():
    schedule = InverseSqrt(0.15, 50)
    early, late = (1 - schedule.at(step) for step in (10**5, 10**7))
    assert early / late == pytest.approx(10, rel=5e-3)


@given(any_schedule, steps)
def test_every_density_is_legal(schedule, step):
    assert 0.0 < schedule.at(step) <= 1.0


@given(any_schedule, steps)
def test_every_density_has_six_digits_at_most(schedule, step):
    density = schedule.at(step)
    assert density == float(f"{density:.6g}")


@given(st.sampled_from([*RAMPS, InverseSqrt]), densities, densities, counts, steps)
def test_ramps_begin_at_start_and_never_leave_their_ends(kind, start, end, count, step):
    schedule = InverseSqrt(start, count, end) if kind is InverseSqrt else kind(start, end, count)
    low, high = sorted((Constant(start).at(0), Constant(end).at(0)))
    assert schedule.at(0) == Constant(start).at(0)
    assert low <= schedule.at(step) <= high
    if kind is not InverseSqrt:
        assert schedule.at(count) == schedule.at(count + step) == Constant(end).at(0)


@each("start, end", [(0.01, 1.0), (1.0, 0.01), (0.3, 0.300001), (0.7, 0.7)])
@each("kind", [*RAMPS, InverseSqrt])
def test_ramps_are_monotonic(kind, start, end):
    schedule = InverseSqrt(start, 500, end) if kind is InverseSqrt else kind(start, end, 500)
    values = [schedule.at(step) for step in range(600)]
    assert values == sorted(values, reverse=end < start)


@given(any_schedule)
def test_repr_rebuilds_the_schedule(schedule):
    again = eval(repr(schedule), vars(schedules))
    assert again == schedule
    assert hash(again) == hash(schedule)


def test_numpy_numbers_become_built_in_ones():
    schedule = Linear(np.float64(0.5), np.float32(0.25), np.int64(10))
    assert repr(schedule) == "Linear(start=0.5, end=0.25, steps=10)"
    assert repr(Steps({np.int64(0): np.float64(0.5)})) == "Steps(densities=((0, 0.5),))"
    assert type(schedule.at(np.int64(5))) is float


@pytest.mark.parametrize("schedule", EXAMPLES)
def test_a_schedule_stands_for_itself(schedule):
    assert as_schedule(schedule) is schedule


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), Fraction(1, 2)])
def test_a_number_stands_for_a_constant(value):
    assert as_schedule(value) == Constant(0.5)
    assert as_schedule(1) == Constant(1.0)


def test_a_mapping_stands_for_steps():
    assert as_schedule({10: 0.5, 0: 1.0}) == Steps(((0, 1.0), (10, 0.5)))


@pytest.mark.parametrize("value", [None, "0.1", True, [0.1], ((0, 1.0),), Linear, 1j])
def test_nothing_else_is_a_schedule(value):
    with pytest.raises(TypeError, match=re.escape(f"Linear(1.0, 0.1, 500), got {value!r}")):
        as_schedule(value)


@pytest.mark.parametrize("value", [0, -0.5, 1.5, math.nan, math.inf])
def test_a_number_out_of_range_is_no_schedule(value):
    message = rf"^Constant.density must lie in \(0, 1\], got {value!r}; 0.01 keeps 1 %"
    with pytest.raises(ValueError, match=message):
        as_schedule(value)


@pytest.mark.parametrize(
    "wrong", [0.0, -0.1, 1.0000001, math.nan, math.inf, "0.1", None, True, Fraction(1, 10**400)]
)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Constant.density", Constant),
        ("Linear.start", lambda wrong: Linear(wrong, 0.1, 10)),
        ("Linear.end", lambda wrong: Linear(0.1, wrong, 10)),
        ("Cosine.start", lambda wrong: Cosine(wrong, 0.1, 10)),
        ("Cosine.end", lambda wrong: Cosine(0.1, wrong, 10)),
        ("Exponential.start", lambda wrong: Exponential(wrong, 0.1, 10)),
        ("Exponential.end", lambda wrong: Exponential(0.1, wrong, 10)),
        ("InverseSqrt.start", lambda wrong: InverseSqrt(wrong, 10)),
        ("InverseSqrt.end", lambda wrong: InverseSqrt(0.1, 10, wrong)),
        ("Steps.densities[7]", lambda wrong: Steps({0: 0.1, 7: wrong})),
    ],
)
def test_a_density_out_of_range_is_named(name, make, wrong):
    message = f"{name} must lie in (0, 1], got {wrong!r}; 0.01 keeps 1 % of the coefficients"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make(wrong)


@pytest.mark.parametrize("wrong", [0, -1, 10.0, 2.5, "10", None, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Linear.steps", lambda wrong: Linear(0.5, 0.1, wrong)),
        ("Cosine.steps", lambda wrong: Cosine(0.5, 0.1, wrong)),
        ("Exponential.steps", lambda wrong: Exponential(0.5, 0.1, wrong)),
        ("InverseSqrt.tau", lambda wrong: InverseSqrt(0.5, wrong)),
    ],
)
def test_a_count_of_steps_that_is_none_is_named(name, make, wrong):
    message = f"{name} must be a whole number from 1 up, got {wrong!r}; it counts exchanges"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make(wrong)


@pytest.mark.parametrize("wrong", [-1, 1.0, "0", None, True])
def test_a_first_step_that_is_none_is_named(wrong):
    message = f"a first step in Steps.densities must be a whole number from 0 up, got {wrong!r}"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Steps({0: 0.5, wrong: 0.1})


@pytest.mark.parametrize("given_densities", [{}, {5: 0.1, 3: 0.2}])
def test_steps_without_step_zero_are_refused(given_densities):
    message = f"the density at step 0, got steps {sorted(given_densities)}; add 0: 1.0"
    with pytest.raises(ValueError, match=re.escape(message)):
        Steps(given_densities)


def test_a_step_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"Steps.densities has step 3 twice; keep one of them"):
        Steps([(0, 1.0), (3, 0.5), (3, 0.1)])


@pytest.mark.parametrize("wrong", [0.1, None, "0: 0.1", [0.1, 0.2], [(0, 0.1, 0.2)]])
def test_steps_that_are_no_mapping_are_refused(wrong):
    with pytest.raises(TypeError, match=re.escape(f"got {wrong!r}; write Steps({{0: 1.0")):
        Steps(wrong)


@each("wrong", [-1, 0.5, "0", None, True])
@each("schedule", EXAMPLES)
def test_a_step_that_is_none_is_refused(schedule, wrong):
    message = f"step must be a whole number from 0 up, got {wrong!r}"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        schedule.at(wrong)


@pytest.mark.parametrize("schedule", EXAMPLES)
def test_schedules_cannot_be_changed(schedule):
    with pytest.raises(AttributeError, match="cannot assign"):
        schedule.density = 0.5
