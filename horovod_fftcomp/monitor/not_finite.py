"""A warning of the first NaN or Inf among gradients, with the tensors and the rank it came from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from horovod_fftcomp import wire
from horovod_fftcomp.errors import PayloadError
from horovod_fftcomp.schemes import Round, Tensor
from horovod_fftcomp.types import Array

_SHOWN = 8
DENSE = "tensors that Horovod exchanges itself"


def bad_tensors(
    tensors: Sequence[Tensor], sums: Sequence[Array], sent: Sequence[Round]
) -> dict[str, bool]:
    """Return, of each tensor whose sum is not finite, whether this rank's part was not either.

    ``sent``: the rounds in which this rank has sent its part of the bucket.
    """
    # What is sent later also has what came from the others.
    told = (_own(round_, len(tensors)) for round_ in sent)
    own = next((flags for flags in told if flags), [False] * len(tensors))
    return {
        tensor.name: own[number]
        for number, (tensor, total) in enumerate(zip(tensors, sums, strict=True))
        if isinstance(total, np.ndarray) and not np.isfinite(total).all()
    }


def _own(round_: Round, n_tensors: int) -> list[bool]:
    """Return for each tensor whether what was sent of it is not finite; [] if that is not seen."""
    data = round_.data
    if not isinstance(data, np.ndarray):
        return []
    if data.dtype != np.uint8:  # values of all tensors
        return [not bool(np.isfinite(data).all())] * n_tensors
    try:
        flags = [not header.finite for header, _ in wire.split_payloads(data)]
    except PayloadError:  # positions, say
        return []
    return flags if len(flags) == n_tensors else [any(flags)] * n_tensors


class NotFiniteWarning:
    """Warns once of gradients with NaN or Inf; never where a loss scaler deals with them."""

    def __init__(self, has_scaler: bool) -> None:
        self._is_over = has_scaler

    def observe(self, bad: Mapping[str, bool], rank: int, ranks: Sequence[int]) -> None:
        """Take a step's tensors that came out not finite, and whether this rank brought that in.

        ``rank``: its place among ``ranks``.
        """
        own = [name for name, is_own in bad.items() if is_own]
        if self._is_over or not bad:
            return
        self._is_over = True
        if not own and rank != 0:
            return  # who brought it says so, and the first rank
        names = own or list(bad)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        listed = ", ".join(map(repr, names[:_SHOWN])) + more
        origin = (
            f"rank {ranks[rank]} brought NaN or Inf in the gradients of {listed}"
            if own
            else f"the sums of {listed} over the ranks have NaN or Inf, which some rank "
            "brought, or an overflow of the sum"
        )
        warnings.warn(
            f"{origin}. Their gradients are NaN or Inf on all ranks in this step; no residual "
            "changes, but nothing keeps the optimizer from applying them: skip the step, clip, or "
            "lower the learning rate; in mixed precision use a GradScaler and give it to the "
            "compressor (grad_scaler=). This warning comes once.",
            RuntimeWarning,
            stacklevel=2,
        )
