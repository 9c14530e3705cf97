"""Density recovery: decides from a reported metric when to raise the density.

A higher density (a lower drop ratio theta = 1 - density) recovers the accuracy lost by compression:
Wang et al., HPDC 2020. The decision rule is this package's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

from horovod_fftcomp.errors import check_share, is_integer, is_number

FORMAT = 1


@dataclass(frozen=True)
class Recover:
    """Recovery options: the density is multiplied by ``factor`` while a metric stays worse.

    Parameters
    ----------
    factor
        Factor by which the density grows each time, greater than 1.
    patience
        Number of consecutive worse reports after which the density grows, at least 1.
    tolerance
        A report is worse if it is worse than the best by more than this, in units of the metric. If
        negative, a report is worse unless it improves on the best by at least as much, so that the
        density also grows when training stalls.
    max_density
        Upper limit of the density, in (0, 1].
    better
        ``"lower"`` for a loss or an error, ``"higher"`` for an accuracy.
    """

    factor: float = 2.0
    patience: int = 1
    tolerance: float = 0.0
    max_density: float = 1.0
    better: Literal["lower", "higher"] = "lower"

    def __post_init__(self) -> None:
        if not is_number(self.factor) or not 1 < self.factor < math.inf:
            raise ValueError(
                f"Recover.factor must be greater than 1, got {self.factor!r}; 2.0 doubles the "
                "density"
            )
        if not is_integer(self.patience) or self.patience < 1:
            raise ValueError(
                f"Recover.patience must be a whole number from 1 up, got {self.patience!r}; "
                "1 acts on the first worse report"
            )
        if not is_number(self.tolerance) or not math.isfinite(self.tolerance):
            raise ValueError(
                f"Recover.tolerance must be a finite number, got {self.tolerance!r}; it is the "
                "loss or accuracy by which a report may be worse; negative: what it has to gain"
            )
        hint = "; 1.0 lets the density grow until everything is sent"
        check_share("Recover.max_density", self.max_density, hint)
        if self.better not in ("lower", "higher"):
            raise ValueError(
                f"Recover.better must be 'lower' or 'higher', got {self.better!r}; "
                "'lower' for a loss, 'higher' for an accuracy"
            )


class Recovery:
    """Decision, from a metric that is reported now and then, when the density must grow.

    Reports of ranks may differ (each rank's own loss), and so might decisions made from them. So
    the caller broadcasts the first rank's report, and all ranks ``observe`` that one: they decide
    alike and keep the same state.

    >>> recovery = Recovery(Recover(factor=2.0, tolerance=0.1))
    >>> recovery.observe(1.0), recovery.observe(1.05), recovery.observe(1.2)
    (False, False, True)
    >>> recovery.raised(0.1)
    0.2
    """

    def __init__(self, options: Recover) -> None:
        if not isinstance(options, Recover):
            raise TypeError(f"options must be a Recover, got {options!r}; Recover() has defaults")
        self.options = options
        self._best: float | None = None
        self._worse_reports = 0

    def observe(self, metric: float) -> bool:
        """Process a report; return whether the density must grow now.

        True if ``metric`` was worse than the best so far, by more than the tolerance, in
        ``patience`` consecutive reports. The count restarts then, and after a report that is not
        worse. NaN is worse than any number and never the best; the first number reported is the
        first best. The best is kept when the density grows.

        ``metric``: a number, or an object that ``float`` converts, such as a 0-d array or tensor.
        """
        if not isinstance(metric, SupportsFloat):
            raise TypeError(f"metric must be a number, got {metric!r}; report a loss or accuracy")
        value = float(metric)
        self._worse_reports = self._worse_reports + 1 if self._is_worse(value) else 0
        if not math.isnan(value):
            choose = min if self.options.better == "lower" else max
            self._best = value if self._best is None else choose(self._best, value)
        if self._worse_reports < self.options.patience:
            return False
        self._worse_reports = 0
        return True

    def raised(self, density: float) -> float:
        """Return the raised density, min(max_density, density * factor).

        A density above ``max_density`` is returned unchanged: recovery never lowers it. Raises
        ValueError for a ``density`` outside (0, 1].
        """
        check_share("density", density, "; 1.0 sends everything")
        return float(max(density, min(self.options.max_density, density * self.options.factor)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as built-in numbers and strings, without the options."""
        return {
            "version": FORMAT,
            "better": self.options.better,
            "best": self._best,
            "worse_reports": self._worse_reports,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``; ValueError, and no change, for an invalid one."""
        if state.get("version") != FORMAT:
            raise ValueError(f"state_dict version is {state.get('version')!r}, expected {FORMAT}")
        if state["better"] != self.options.better:
            raise ValueError(
                f"state_dict is of a metric where {state['better']} is better, but Recover.better "
                f"is {self.options.better!r}; use the options that it was saved with"
            )
        best, worse_reports = state["best"], state["worse_reports"]
        if best is not None and (not isinstance(best, float) or math.isnan(best)):
            raise ValueError(f"state_dict['best'] must be None or a number, got {best!r}")
        if not is_integer(worse_reports) or worse_reports < 0:
            raise ValueError(
                f"state_dict['worse_reports'] must be a whole number, got {worse_reports!r}"
            )
        self._best, self._worse_reports = best, worse_reports

    def _is_worse(self, value: float) -> bool:
        if math.isnan(value):
            return True
        if self._best is None:
            return False
        if self.options.better == "lower":
            return value > self._best + self.options.tolerance
        return value < self._best - self.options.tolerance
