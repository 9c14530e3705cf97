"""Residual alarm: detects residuals that keep growing, the sign of a density that is too low."""

from __future__ import annotations

import math
from collections import deque

# At density d a coordinate is sent about every 1/d steps. If gradients g of successive steps are
# unrelated, a residual e settles where e^2 = (1 - d) (e^2 + g^2), at e = sqrt((1 - d) / d) g; if
# they are all equal, it reaches about g / d. The ratio e / g is 10 at density 0.01 in the first
# case, at 0.1 in the second. Callers know the density and pass 1/d, times 1/(1-m) if momentum m is
# accumulated before compression: no healthy residual settles above that.
DEFAULT_THRESHOLD = 10.0

# A healthy residual also grows at first, from zero to its limit, and measurements scatter, so only
# uninterrupted growth counts. With one measurement every 53 steps, 5 of them span 265 steps.
GROWTH = 1.1
MEASUREMENTS = 5


class ResidualAlarm:
    """Warning of tensors whose residual keeps growing relative to their gradient.

    A tensor causes a warning when the ratio |residual| / |gradient| exceeds ``threshold`` and grew
    by more than 10 % at each of the last 5 measurements. There is no second warning until the ratio
    is at most ``threshold`` again, or none of the last 5 measurements grew that much. Only the last
    6 ratios of each tensor are kept. They are not saved in checkpoints: after a restart the alarm
    starts anew.

    Parameters
    ----------
    threshold : float
        Ratio up to which there are no warnings, positive and finite; 1 / density is suitable.

    Raises
    ------
    ValueError
        If ``threshold`` is out of its range.

    Examples
    --------
    >>> alarm = ResidualAlarm(threshold=1 / 0.1)
    >>> warnings = [alarm.observe("fc.weight", 1.0, 2.0**i) for i in range(7)]
    >>> [warning is not None for warning in warnings]
    [False, False, False, False, False, True, False]
    >>> alarm.ratios()
    {'fc.weight': 64.0}
    """

    def __init__(self, threshold: float = DEFAULT_THRESHOLD) -> None:
        if not 0 < threshold < math.inf:
            raise ValueError(
                f"threshold must be positive and finite, got {threshold!r}; "
                "1 / density suits: a healthy residual stays below it"
            )
        self.threshold = threshold
        self._history: dict[str, deque[float]] = {}
        self._warned: set[str] = set()

    def observe(self, name: str, gradient_norm: float, residual_norm: float) -> str | None:
        """Record one measurement of a tensor; return a warning message, or None.

        Call it at every 53rd step or so. ``gradient_norm``, ``residual_norm``: Euclidean norms on
        this rank. A measurement with a norm that is zero or not finite is ignored, since
        such a step says nothing about the trend.
        """
        if not (0 < gradient_norm < math.inf and 0 < residual_norm < math.inf):
            return None
        ratio = float(residual_norm) / float(gradient_norm)
        if not 0 < ratio < math.inf:  # the quotient of finite norms may overflow or underflow
            return None
        history = self._history.setdefault(name, deque(maxlen=MEASUREMENTS + 1))
        history.append(ratio)
        grew = [new > GROWTH * old for old, new in zip(history, list(history)[1:], strict=False)]
        if ratio <= self.threshold or not any(grew):
            self._warned.discard(name)
        elif len(grew) == MEASUREMENTS and all(grew) and name not in self._warned:
            self._warned.add(name)
            return self._warning(name, ratio)
        return None

    def ratios(self) -> dict[str, float]:
        """Return the latest ratio |residual| / |gradient| of every tensor measured so far."""
        return {name: history[-1] for name, history in self._history.items()}

    def _warning(self, name: str, ratio: float) -> str:
        return (
            f"the residual of {name!r} is {ratio:.3g} times its gradient (healthy: up to "
            f"{self.threshold:.3g}) and grew by more than 10 % at each of the last {MEASUREMENTS} "
            "measurements: less is sent than is added, so the model trains on stale gradients. "
            "Learning rate * curvature should be below density * (1 - momentum of the optimizer): "
            "raise the density, lower the learning rate or the momentum, or filter the residual, "
            "where the recipe has beta, by a smaller one."
        )
