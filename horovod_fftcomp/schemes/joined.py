"""All tensors of a bucket exchanged as if they were one, so that they compete for the same k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from horovod_fftcomp.backends import Array, load_backend
from horovod_fftcomp.schemes import Context, Exchange, Grads, OldState, State, Tensor
from horovod_fftcomp.schemes.around import Around
from horovod_fftcomp.schemes.gather import Gather
from horovod_fftcomp.schemes.shared import Shared


@dataclass(frozen=True)
class Joined(Around):
    """Exchange a bucket's tensors by ``scheme`` as one tensor of all their elements.

    The positions of a step may all lie in a few layers; the others then get zeros. ``scope``:
    "bucket", or "model" if the bucket holds all tensors of the policy. State belongs to the
    tensors, so it fits the scheme by itself and other buckets as well.
    """

    scheme: Gather | Shared
    scope: str = "bucket"

    def exchange(
        self, tensors: Sequence[Tensor], grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        numels = [math.prod(tensor.shape) for tensor in tensors]
        whole = Tensor(f"{self.scope} from {tensors[0].name} on", (sum(numels),))
        # A frozen tensor sends zeros: its residual takes no part, and stays as it is.
        takes_part = {t.name for t, grad in zip(tensors, grads, strict=True) if grad is not None}
        before = {
            kind: {
                whole.name: _joined(
                    [arrays.get(t.name) if t.name in takes_part else None for t in tensors], numels
                )
            }
            for kind, arrays in state.items()
        }
        outcome = yield from self.scheme.exchange(
            [whole], [_joined(grads, numels)], before, context
        )
        ends = np.cumsum(numels)[:-1]
        after: State = {}
        for kind, arrays in outcome.state.items():
            kept = {n: a for n, a in state.get(kind, {}).items() if n not in takes_part}
            parts = np.split(arrays[whole.name], ends) if arrays else []
            new = zip(tensors, parts, strict=False)
            after[kind] = kept | {t.name: part for t, part in new if t.name in takes_part}
        return outcome._replace(sums=np.split(outcome.sums[0], ends), state=after)


def _joined(parts: Sequence[Array | None], numels: Sequence[int]) -> Array:
    """Return the flat float32 ``parts`` one after the other, zeros for those that are None."""
    filled = [
        np.zeros(numel, np.float32) if part is None else part
        for part, numel in zip(parts, numels, strict=True)
    ]
    return np.concatenate(filled, out=load_backend("cpu").empty(sum(numels)))
