"""Density schedules: density as a function of the step.

The step counts exchanges from 0 and is equal on all ranks, so all ranks use the same density, and
with it the same message size, without communication.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from horovod_fftcomp.errors import is_integer, is_number

# The C libraries of two machines may differ in the last of 16 digits of cos or pow, but ranks must
# agree, so six digits are kept. A schedule near its end then repeats a value for many steps, for
# which the scheme is made only once.
SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True)
class _Schedule:
    """Checks the fields of a schedule, and the step whose density it is asked for."""

    def __post_init__(self) -> None:
        for field in fields(self):
            name, given = f"{type(self).__name__}.{field.name}", getattr(self, field.name)
            is_count = field.name in ("steps", "tau")
            checked = _whole_number(name, given, 1) if is_count else _density(name, given)
            # As a built-in number, so that repr rebuilds the schedule.
            object.__setattr__(self, field.name, checked)

    def at(self, step: int) -> float:
        """Return the density at exchange ``step``, counted from 0."""
        return float(f"{self._at(_whole_number('step', step, 0)):.{SIGNIFICANT_DIGITS}g}")

    def _at(self, step: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(_Schedule):
    """The same density at every step."""

    density: float

    def _at(self, step: int) -> float:
        return self.density


@dataclass(frozen=True, init=False)
class Steps(_Schedule):
    """Piecewise constant density: the mapping {first step: density}.

    Stored as pairs sorted by step, so the schedule is hashable. Pairs are accepted, too.

    >>> Steps({0: 1.0, 500: 0.1}).at(499)  # 500 dense steps
    1.0
    """

    densities: tuple[tuple[int, float], ...]

    def __init__(self, densities: Mapping[int, float] | Iterable[tuple[int, float]]) -> None:
        object.__setattr__(self, "densities", _sorted_pairs(densities))

    def _at(self, step: int) -> float:
        return self.densities[bisect.bisect_right(self.densities, (step, math.inf)) - 1][1]


@dataclass(frozen=True)
class _Ramp(_Schedule):
    start: float
    end: float
    steps: int

    def _at(self, step: int) -> float:
        return self._between(min(step, self.steps) / self.steps)

    def _between(self, progress: float) -> float:
        """Return the density at ``progress`` from 0 to 1."""
        return _interpolated(self.start, self.end, progress)


@dataclass(frozen=True)
class Linear(_Ramp):
    """Linear ramp from ``start`` at step 0 to ``end`` at step ``steps``, constant afterwards."""


@dataclass(frozen=True)
class Cosine(_Ramp):
    """Cosine ramp from ``start`` at step 0 to ``end`` at step ``steps``, constant afterwards.

    density(t) = end + (start - end) * (1 + cos(pi * t / steps)) / 2.
    """

    def _between(self, progress: float) -> float:
        return super()._between((1.0 - math.cos(math.pi * progress)) / 2.0)


@dataclass(frozen=True)
class Exponential(_Ramp):
    """Exponential ramp from ``start`` at step 0 to ``end`` at step ``steps``, constant afterwards.

    density(t) = start ** (1 - t / steps) * end ** (t / steps).
    """

    def _between(self, progress: float) -> float:
        return _clipped(self.start ** (1.0 - progress) * self.end**progress, self.start, self.end)


@dataclass(frozen=True)
class InverseSqrt(_Schedule):
    """Inverse square root decay: density(t) = end - (end - start) / sqrt(1 + t / tau).

    With ``end`` = 1 the drop ratio theta = 1 - density falls as 1 / sqrt(t), after about ``tau``
    steps. A diminishing theta is the condition under which Wang et al., HPDC 2020, prove that
    training converges; it matters when recipes run without error feedback. There, a constant
    theta leaves an error floor proportional to its mean over the steps (times the variance of the
    gradients), and this rate lets the floor fall as fast as the error of dense SGD. With ``end``
    < 1 the floor of theta = 1 - end stays. Rate and ``tau`` are this package's choice.
    """

    start: float
    tau: int
    end: float = 1.0

    def _at(self, step: int) -> float:
        return _interpolated(self.start, self.end, 1.0 - 1.0 / math.sqrt(1.0 + step / self.tau))


Schedule: TypeAlias = Constant | Steps | Linear | Cosine | Exponential | InverseSqrt


def as_schedule(value: object) -> Schedule:
    """Return ``value`` as a schedule.

    A number gives ``Constant``, a mapping {first step: density} gives ``Steps``, and a schedule
    is returned unchanged. Raises ValueError for a density or step out of range, TypeError for
    anything else.

    >>> as_schedule({0: 1.0, 500: 0.1})
    Steps(densities=((0, 1.0), (500, 0.1)))
    """
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return Steps(value)
    if is_number(value):
        return Constant(value)
    raise TypeError(
        "a density schedule is a number, a mapping {first step: density} or an object such as "
        f"Linear(1.0, 0.1, 500), got {value!r}"
    )


def _interpolated(start: float, end: float, weight: float) -> float:
    """Interpolate linearly with ``weight`` from 0 to 1; exact at both ends and monotonic."""
    return end if weight >= 1.0 else _clipped(start + (end - start) * weight, start, end)


def _clipped(density: float, start: float, end: float) -> float:
    """Return ``density`` clipped to [start, end], which rounding errors may exceed."""
    return min(max(density, min(start, end)), max(start, end))


def _sorted_pairs(
    densities: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    given = densities.items() if isinstance(densities, Mapping) else densities
    try:
        pairs = [(first_step, density) for first_step, density in given]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Steps.densities must map first steps to densities, got {densities!r}; "
            "write Steps({0: 1.0, 500: 0.1})"
        ) from error
    checked: dict[int, float] = {}
    for first_step, density in pairs:
        key = _whole_number("a first step in Steps.densities", first_step, 0)
        if key in checked:
            raise ValueError(f"Steps.densities has step {key} twice; keep one of them")
        checked[key] = _density(f"Steps.densities[{key}]", density)
    if 0 not in checked:
        raise ValueError(
            f"Steps.densities must say the density at step 0, got steps {sorted(checked)}; "
            "add 0: 1.0 to begin dense"
        )
    return tuple(sorted(checked.items()))


def _density(name: str, value: Any) -> float:
    is_real = is_number(value)
    if not is_real or not 0.0 < value <= 1.0 or float(value) == 0.0:
        of_type = "" if is_real else f"; it has to be a number, not a {type(value).__name__}"
        raise ValueError(
            f"{name} must lie in (0, 1], got {value!r}; "
            f"0.01 keeps 1 % of the coefficients, 1.0 all of them{of_type}"
        )
    return float(value)


def _whole_number(name: str, value: Any, least: int) -> int:
    if not is_integer(value) or value < least:
        raise ValueError(
            f"{name} must be a whole number from {least} up, got {value!r}; "
            "it counts exchanges, write 1000 and not 1e3"
        )
    return int(value)
