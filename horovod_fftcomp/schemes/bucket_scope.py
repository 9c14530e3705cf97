"""Bucket scope: the tensors of a bucket share one k, as one concatenated tensor."""

from __future__ import annotations

from dataclasses import dataclass

from horovod_fftcomp.kernels.plans import split
from horovod_fftcomp.schemes import Context, Exchange, Grads, State
from horovod_fftcomp.schemes.allgather import Allgather
from horovod_fftcomp.schemes.common_index import CommonIndex
from horovod_fftcomp.schemes.state import bucket_plan
from horovod_fftcomp.schemes.wrapper import Wrapper
from horovod_fftcomp.types import OldState, Tensor, Tensors


@dataclass(frozen=True)
class BucketScope(Wrapper):
    """Exchange a bucket's tensors by ``scheme`` as one concatenated tensor.

    All positions of a step may lie in a few layers; the others then get zeros. ``scope``: "bucket",
    or "model" if the bucket holds all tensors of the policy. State is kept for each tensor, so it
    can be loaded without this wrapper and with other buckets.
    """

    spec_name = "Joined"
    scheme: Allgather | CommonIndex
    scope: str = "bucket"

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        plan, whole, ops = bucket_plan(tensors), self._whole(tensors), context.ops
        # A frozen tensor sends zeros, and its residual stays as it is.
        takes_part = {t.name for t, grad in zip(tensors, grads, strict=True) if grad is not None}
        before = {
            kind: {
                whole.name: ops.join(
                    [arrays.get(t.name) if t.name in takes_part else None for t in tensors],
                    plan.numels,
                )
            }
            for kind, arrays in state.items()
        }
        outcome = yield from self.scheme.exchange(
            [whole], [ops.join(grads, plan.numels)], before, context._replace(into=None)
        )
        after: State = {}
        for kind, arrays in outcome.state.items():
            kept = {n: a for n, a in state.get(kind, {}).items() if n not in takes_part}
            parts = split(arrays[whole.name], plan.offsets) if arrays else []
            new = zip(tensors, parts, strict=False)
            after[kind] = kept | {t.name: part for t, part in new if t.name in takes_part}
        return outcome._replace(sums=split(outcome.sums[0], plan.offsets), state=after)

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return self.scheme.runs_on_device([self._whole(tensors)])

    def _whole(self, tensors: Tensors) -> Tensor:
        return Tensor(
            f"{self.scope} from {tensors[0].name} on", (bucket_plan(tensors).offsets[-1],)
        )
