"""When the density must grow: scenarios of reports, the growth, saving, and what is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_fftcomp.monitor.density_recovery import Recover, Recovery

NAN, INF = math.nan, math.inf


def decisions(options, reports):
    recovery = Recovery(options)
    return [recovery.observe(report) for report in reports]


@pytest.mark.parametrize(
    ("options", "reports", "acts_on"),
    [
        pytest.param(Recover(), [3, 2, 2, 1], [], id="better-or-equal-never-acts"),
        pytest.param(Recover(), [1, 2], [1], id="acts-on-the-first-worse-report"),
        pytest.param(Recover(), [3, 1, 2], [2], id="compares-with-the-best-not-the-last"),
        pytest.param(Recover(), [3, 1, 2, 2, 1], [2, 3], id="the-best-stays-after-acting"),
        pytest.param(Recover(), [1000.0], [], id="the-first-report-is-the-best"),
        pytest.param(Recover(tolerance=0.5), [1, 1.5, 1.25, 1.75], [3], id="tolerates"),
        pytest.param(Recover(tolerance=0.5), [1, 1.25, 1.5, 1.75], [3], id="best-does-not-creep"),
        pytest.param(Recover(tolerance=-0.5), [3, 2, 1.5, 1.25], [3], id="stands-still"),
        pytest.param(Recover(tolerance=-0.5), [3, 2.75, 2.5], [1, 2], id="gains-too-little"),
        pytest.param(Recover(patience=3), [1, 2, 2, 2, 2, 2, 2, 2], [3, 6], id="counts-anew"),
        pytest.param(Recover(patience=2), [1, 2, 1, 2, 1, 2, 2], [6], id="in-a-row-only"),
        pytest.param(Recover(better="higher"), [0.5, 0.75, 0.5, 0.75], [2], id="accuracy"),
        pytest.param(
            Recover(better="higher", tolerance=0.25), [0.75, 0.5, 0.25], [2], id="accuracy-misses"
        ),
        pytest.param(Recover(tolerance=9.0), [1, NAN, 1], [1], id="nan-is-worse"),
        pytest.param(Recover(better="higher"), [1, NAN, 1], [1], id="nan-is-worse-than-accuracy"),
        pytest.param(Recover(), [NAN, 5, 6], [0, 2], id="nan-is-never-the-best"),
        pytest.param(Recover(patience=2), [1, NAN, 2], [2], id="nan-and-worse-add-up"),
        pytest.param(Recover(tolerance=9.0), [1, INF, 1], [1], id="infinite-loss-is-worse"),
        pytest.param(Recover(), [INF, INF, 1], [], id="infinity-equals-infinity"),
    ],
)
def test_recovery_acts_on_these_reports(options, reports, acts_on):
    acted = decisions(options, reports)
    assert [index for index, decision in enumerate(acted) if decision] == acts_on
    assert all(type(decision) is bool for decision in acted)


@given(st.lists(st.floats(allow_nan=True)), st.integers(1, 4), st.floats(0, 1e6))
def test_lower_and_higher_mirror_each_other(reports, patience, tolerance):
    lower = Recover(patience=patience, tolerance=tolerance)
    mirrored = [-report for report in reports]
    assert decisions(lower, reports) == decisions(replace(lower, better="higher"), mirrored)


@given(st.lists(st.floats(allow_nan=True), max_size=30), st.integers(1, 4))
def test_recovery_acts_at_most_once_in_patience_reports(reports, patience):
    acted = decisions(Recover(patience=patience), reports)
    for begin in range(len(acted)):
        assert sum(acted[begin : begin + patience]) <= 1


@pytest.mark.parametrize("kind", [np.float32, np.array, Decimal])
def test_whatever_converts_to_a_float_is_a_metric(kind):
    recovery = Recovery(Recover())
    assert recovery.observe(kind(1.0)) is False
    assert recovery.observe(kind(2.0)) is True


@pytest.mark.parametrize(
    ("options", "density", "raised"),
    [
        (Recover(), 0.1, 0.2),
        (Recover(), 0.75, 1.0),
        (Recover(), 1.0, 1.0),
        (Recover(factor=4), 0.125, 0.5),
        (Recover(max_density=0.5), 0.2, 0.4),
        (Recover(max_density=0.5), 0.4, 0.5),
        (Recover(max_density=0.5), 0.8, 0.8),
    ],
)
def test_the_density_grows_up_to_its_maximum(options, density, raised):
    assert Recovery(options).raised(density) == raised


@given(
    st.floats(1, exclude_min=True, allow_infinity=False),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1, exclude_min=True),
)
def test_the_raised_density_is_legal_and_never_lower(factor, max_density, density):
    raised = Recovery(Recover(factor=factor, max_density=max_density)).raised(density)
    assert density <= raised <= max(density, max_density) <= 1.0


@given(st.lists(st.floats(allow_nan=True), max_size=20), st.integers(0, 20), st.integers(1, 4))
def test_a_loaded_state_goes_on_where_it_was_saved(reports, cut, patience):
    options = Recover(patience=patience)
    before, after = Recovery(options), Recovery(options)
    first = [before.observe(report) for report in reports[:cut]]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert first + [after.observe(report) for report in reports[cut:]] == decisions(
        options, reports
    )


def test_the_state_is_plain_and_versioned():
    recovery = Recovery(Recover(patience=2))
    for metric in (np.float32(1.5), 2.0):
        recovery.observe(metric)
    expected = {"version": 1, "better": "lower", "best": 1.5, "worse_reports": 1}
    assert recovery.state_dict() == expected
    assert type(recovery.state_dict()["best"]) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "state_dict version is 2, expected 1"),
        ({"version": None}, "state_dict version is None, expected 1"),
        ({"better": "higher"}, "where higher is better, but Recover.better is 'lower'; use the"),
        ({"best": NAN}, "state_dict['best'] must be None or a number, got nan"),
        ({"best": "1"}, "state_dict['best'] must be None or a number, got '1'"),
        ({"worse_reports": -1}, "state_dict['worse_reports'] must be a whole number, got -1"),
        ({"worse_reports": 0.5}, "state_dict['worse_reports'] must be a whole number, got 0.5"),
    ],
)
def test_a_state_that_cannot_serve_changes_nothing(change, message):
    recovery = Recovery(Recover(patience=2))
    recovery.observe(1.0)
    recovery.observe(2.0)
    saved = recovery.state_dict()
    with pytest.raises(ValueError, match=re.escape(message)):
        recovery.load_state_dict({**saved, "best": 7.0, **change})
    assert recovery.state_dict() == saved


@pytest.mark.parametrize(
    "options", [Recover(), Recover(1.5, 3, 0.25, 0.5, "higher"), Recover(factor=3)]
)
def test_repr_rebuilds_the_options(options):
    assert eval(repr(options)) == options
    assert hash(eval(repr(options))) == hash(options)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        *(
            ("factor", wrong, "must be greater than 1, got {!r}; 2.0 doubles")
            for wrong in (1.0, 0.5, -2, NAN, INF, "2", None, True)
        ),
        *(
            ("patience", wrong, "must be a whole number from 1 up, got {!r}; 1 acts on the first")
            for wrong in (0, -1, 1.0, NAN, "1", None, True)
        ),
        *(
            ("tolerance", wrong, "must be a finite number, got {!r}; it is the loss or")
            for wrong in (NAN, INF, "0", None, False)
        ),
        *(
            ("max_density", wrong, "must lie in (0, 1], got {!r}; 1.0 lets the density grow")
            for wrong in (0.0, -0.5, 1.1, NAN, INF, "1", None, True)
        ),
        *(
            ("better", wrong, "must be 'lower' or 'higher', got {!r}; 'lower' for a loss")
            for wrong in ("min", "Lower", "", None, True)
        ),
    ],
)
def test_a_wrong_option_is_named(name, wrong, message):
    with pytest.raises(
        ValueError, match="^" + re.escape(f"Recover.{name} {message}".format(wrong))
    ):
        Recover(**{name: wrong})


@pytest.mark.parametrize("wrong", [None, {"factor": 2.0}, Recover])
def test_options_that_are_none_are_refused(wrong):
    with pytest.raises(TypeError, match=re.escape(f"options must be a Recover, got {wrong!r}")):
        Recovery(wrong)


@pytest.mark.parametrize("wrong", [None, "0.5", [1.0], 1j])
def test_a_metric_that_is_no_number_is_refused(wrong):
    recovery = Recovery(Recover())
    with pytest.raises(TypeError, match=re.escape(f"metric must be a number, got {wrong!r}")):
        recovery.observe(wrong)


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.5, NAN, INF, None, "0.1", True])
def test_a_density_out_of_range_cannot_be_raised(wrong):
    with pytest.raises(ValueError, match=re.escape(f"density must lie in (0, 1], got {wrong!r};")):
        Recovery(Recover()).raised(wrong)
