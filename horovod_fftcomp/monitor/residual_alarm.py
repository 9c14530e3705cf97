"""Tells a residual that keeps growing: the sign of a density that is too low. Pure; no I/O."""

from __future__ import annotations

import math
from collections import deque

# Density d sends a coordinate about every 1/d steps. Where gradients of successive steps are
# unrelated a residual e settles at e^2 = (1 - d) (e^2 + g^2), that is at sqrt((1 - d) / d)
# gradients g; where they all agree it reaches at most about 1/d. Ten is the latter at density
# 0.1, the former at 0.01. Callers know the density and pass 1/d, times 1/(1-m) where momentum m is
# accumulated before compression: above that no healthy residual settles.
DEFAULT_THRESHOLD = 10.0

# A healthy residual grows too, from zero to where it settles, and measurements scatter: only a
# climb that does not pause counts. At one measurement in 53 steps five of them are 265 steps.
GROWTH = 1.1
MEASUREMENTS = 5


class ResidualAlarm:
    """Warn of tensors whose residual outgrows their gradient.

    A tensor is warned of when the ratio |residual| / |gradient| exceeds ``threshold`` and grew by
    more than 10 % at each of the last 5 measurements; then not again until it has calmed down,
    which is when the ratio is back at the threshold or has not grown so at any of the last 5. Only
    the last 6 ratios of each tensor are kept. Nothing here belongs in a checkpoint: after a
    restart the alarm measures anew.

    Parameters
    ----------
    threshold : float
        Ratio up to which no growth is warned of, positive and finite; 1 / density is sound.

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
                "1 / density is what a healthy residual settles below"
            )
        self.threshold = threshold
        self._history: dict[str, deque[float]] = {}
        self._warned: set[str] = set()

    def observe(self, name: str, gradient_norm: float, residual_norm: float) -> str | None:
        """Record one measurement of a tensor; return a warning if it is due, else None.

        Call it at every 53rd step or so. ``gradient_norm``, ``residual_norm``: Euclidean norms on
        this rank. A measurement with a norm that is zero or not finite is skipped, as if it had
        not been taken: such a step says nothing of the trend.
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
            "measurements: less is sent than comes in, so the model trains on stale gradients. "
            "Raise the density, lower the learning rate, begin with more dense steps (dense "
            "warm-up), or clip the momentum."
        )
