"""Warning of the first NaN or Inf in gradients, with the tensors and the rank of origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.errors import PayloadError, listed, warn
from horovod_fftcomp.schemes import Round
from horovod_fftcomp.types import Array, Tensors

DENSE = "tensors that Horovod exchanges itself"


def bad_tensors(tensors: Tensors, sums: Sequence[Array], sent: Sequence[Round]) -> dict[str, bool]:
    """Return the tensors whose sum is not finite, and whether this rank's own values were not.

    ``sent``: the rounds in which this rank has sent its part of the bucket.
    """
    # Later rounds also contain values of the other ranks, so the first with flags counts.
    flags_by_round = (_own(round_, len(tensors)) for round_ in sent)
    own = next((flags for flags in flags_by_round if flags), [False] * len(tensors))
    return {
        tensor.name: own[number]
        for number, (tensor, total) in enumerate(zip(tensors, sums, strict=True))
        if isinstance(total, np.ndarray) and not np.isfinite(total).all()
    }


def _own(round_: Round, n_tensors: int) -> list[bool]:
    """Return for each tensor whether its sent values are not finite; [] if unknown."""
    data = round_.data
    if not isinstance(data, np.ndarray):
        return []
    if data.dtype != np.uint8:  # one array with the values of all tensors
        return [not bool(np.isfinite(data).all())] * n_tensors
    try:
        flags = [not header.finite for header, _ in wire.split_payloads(data)]
    except PayloadError:  # no payloads, for instance positions
        return []
    return flags if len(flags) in (0, n_tensors) else [any(flags)] * n_tensors


class NotFiniteWarning:
    """Single warning of gradients with NaN or Inf; none if a loss scaler handles them."""

    def __init__(self, has_scaler: bool) -> None:
        self._is_over = has_scaler

    def observe(self, bad: Mapping[str, bool], rank: int, ranks: Sequence[int]) -> None:
        """Process a step's result of ``bad_tensors``; warn if it is the first that is not empty.

        ``rank``: index of this rank in ``ranks``, the global ranks.
        """
        if self._is_over or not bad:
            return
        self._is_over = True
        own = [name for name, is_own in bad.items() if is_own]
        if not own and rank != 0:
            return  # only ranks of origin and the first rank warn
        names = own or list(bad)
        shown = listed([*map(repr, names)])
        origin = (
            f"rank {ranks[rank]} has NaN or Inf in the gradients of {shown}"
            if own
            else f"the sums of {shown} over the ranks have NaN or Inf, from the gradients of some "
            "rank or from an overflow of the sum"
        )
        warn(
            f"{origin}. Their gradients are NaN or Inf on all ranks in this step; no residual "
            "changes, but the optimizer applies them unless the script skips the step. Clip, or "
            "lower the learning rate; in mixed precision use a GradScaler and give it to the "
            "compressor (grad_scaler=). This warning is given once."
        )
