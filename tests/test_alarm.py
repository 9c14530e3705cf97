"""A residual that climbs without pause is told of once; a healthy one never."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_fftcomp.monitor.residual_alarm import ResidualAlarm


def warned(alarm, ratios, name="w"):
    """Return the positions of the measurements that were warned of."""
    return [i for i, ratio in enumerate(ratios) if alarm.observe(name, 2.0, 2.0 * ratio)]


def test_five_growths_above_the_threshold_warn_once():
    assert warned(ResidualAlarm(), [11 * 1.2**i for i in range(12)]) == [5]


def test_growth_warns_only_once_it_is_above_the_threshold():
    assert warned(ResidualAlarm(), [2.0**i for i in range(-3, 8)]) == [7]  # 16
    assert warned(ResidualAlarm(100), [2.0**i for i in range(-3, 8)]) == [10]  # 128
    assert warned(ResidualAlarm(), [0.001 * 1.2**i for i in range(50)]) == []


@pytest.mark.parametrize("growth", [0.5, 0.99, 1.0, 1.05, 1.099])
def test_large_but_steady_ratios_do_not_warn(growth):
    assert warned(ResidualAlarm(), [1e6 * growth**i for i in range(40)]) == []


def test_one_pause_begins_the_count_anew():
    ratios = [20.0, 30, 45, 68, 100, 100, 150, 230, 350, 530, 800]
    assert warned(ResidualAlarm(), ratios) == [10]


def test_it_warns_anew_only_after_it_has_calmed_down():
    climb = [2.0**i for i in range(4, 11)]
    alarm = ResidualAlarm()
    assert warned(alarm, climb) == [5]
    assert warned(alarm, [climb[-1], *(climb[-1] * 2.0**i for i in range(1, 8))]) == []  # a pause
    assert warned(alarm, [1.0]) == []  # back below the threshold
    assert warned(alarm, climb) == [4]
    assert warned(alarm, [1000.0] * 5) == []  # five measurements without growth
    assert warned(alarm, climb[-1] * np.array(climb)) == [4]


def test_tensors_are_told_apart_and_named_with_ratio_and_mends():
    alarm = ResidualAlarm(threshold=20)
    texts = []
    for i in range(8):
        assert alarm.observe("calm", 1.0, 3.0) is None
        texts.append(alarm.observe("fc.weight", 0.5, 0.5 * 2.0**i))
    assert [text is not None for text in texts] == [False] * 5 + [True] + [False] * 2
    assert "'fc.weight' is 32 times its gradient (healthy: up to 20)" in texts[5]
    limit = "Learning rate * curvature should be below density * (1 - momentum of the optimizer)"
    assert limit in texts[5]
    for mend in (
        "raise the density",
        "lower the learning rate or the momentum",
        "filter the residual",
    ):
        assert mend in texts[5]
    assert alarm.ratios() == {"calm": 3.0, "fc.weight": 128.0}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("gradient", "residual"),
    [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF),
     (INF, INF), (-1.0, 1.0), (1.0, -1.0), (1e-200, 1e200), (1e200, 1e-200)],
)  # fmt: skip
@pytest.mark.parametrize("number", [float, np.float64])
def test_measurements_that_say_nothing_are_skipped(gradient, residual, number):
    alarm = ResidualAlarm()
    assert alarm.observe("w", number(gradient), number(residual)) is None
    assert alarm.ratios() == {}
    for ratio in [20.0, 30, 45, 68, 100]:
        assert alarm.observe("w", 1.0, ratio) is None
        assert alarm.observe("w", number(gradient), number(residual)) is None
    assert alarm.ratios() == {"w": 100.0}
    assert alarm.observe("w", 1.0, 150.0) is not None


@given(st.lists(st.floats(1e-6, 1e6), max_size=40), st.floats(0.01, 1e4))
def test_a_warning_always_ends_a_climb_above_the_threshold(ratios, threshold):
    alarm = ResidualAlarm(threshold)
    for end, ratio in enumerate(ratios, start=1):
        if alarm.observe("w", 1.0, ratio):
            last = ratios[max(0, end - 6) : end]
            assert len(last) == 6
            assert ratio > threshold
            assert all(new > 1.1 * old for old, new in itertools.pairwise(last))
        assert alarm.ratios() == {"w": ratio}


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("constant", [True, False])
def test_a_healthy_residual_settles_below_one_over_density(density, constant):
    rng = np.random.default_rng(0)
    alarm, n = ResidualAlarm(1 / density), 1000
    residual, grad = np.zeros(n), rng.standard_normal(n)
    for step in range(2000):
        if not constant:
            grad = rng.standard_normal(n)
        residual = residual + grad
        residual[np.argsort(-np.abs(residual))[: int(density * n)]] = 0
        norms = np.linalg.norm(grad), np.linalg.norm(residual)
        assert alarm.observe("w", *norms) is None or step % 5
    assert 0.1 / math.sqrt(density) < alarm.ratios()["w"] < 1 / density


@pytest.mark.parametrize("threshold", [0, -1, NAN, INF])
def test_impossible_thresholds_are_refused(threshold):
    with pytest.raises(ValueError, match="threshold"):
        ResidualAlarm(threshold)
