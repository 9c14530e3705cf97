"""Allgather of payloads, decoded and summed on every rank: the scheme of most recipes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from horovod_fftcomp import wire
from horovod_fftcomp.codec.adaptive import Adaptive
from horovod_fftcomp.codec.methods.base import Method
from horovod_fftcomp.codec.methods.signs import SignMethod
from horovod_fftcomp.codec.quantizers import BFloat16, Float32
from horovod_fftcomp.codec.sparse import Codec
from horovod_fftcomp.codec.sparsifiers import TopK
from horovod_fftcomp.errors import check_share
from horovod_fftcomp.kernels.ops import AnyCodec, Codecs, Feedback
from horovod_fftcomp.schemes import Context, Exchange, Grads, Outcome, Round, Traits
from horovod_fftcomp.schemes.meter import measured_by
from horovod_fftcomp.schemes.shard_plan import are_votes
from horovod_fftcomp.schemes.shards import exchange_shards
from horovod_fftcomp.schemes.state import LowPass, low_passed, multiply, new_state
from horovod_fftcomp.schemes.state_array import StateArrays, coefficients
from horovod_fftcomp.types import Array, OldState, Tensor, Tensors
from horovod_fftcomp.wire.positions import Layout


def serves(codec: AnyCodec, tensors: Tensors, of_signs: bool = False) -> bool:
    """Return whether a GPU can encode and sum these tensors' payloads; the same on all ranks.

    Tensors must have fewer than 2^32 coefficients; with ``of_signs`` only sign methods are
    accepted. A tensor whose payload is its raw values may have a residual from an earlier density,
    which is sent with it: the host does that.
    """
    method = codec.sparsifier if isinstance(codec, Codec) else codec.method
    if isinstance(method, (Adaptive, Method)) and method.cuda is None:
        return False
    if of_signs and not isinstance(method, SignMethod):
        return False
    if not codec.has_fixed_size:
        return all(tensor.numel < 1 << 32 for tensor in tensors)
    plans = [codec.plan(tensor.shape) for tensor in tensors]
    return all(
        plan.n_bins < 1 << 32 and (plan.layout is not Layout.RAW or not plan.numel)
        for plan in plans
    )


_ROUNDS_TO_A_DTYPE = (BFloat16, Float32)
_ALL = TopK(1.0)


class Gathered(NamedTuple):
    """Outcome of a gather; ``EncodedBucket.left``, ``Summed.payloads``, None if it was sharded."""

    outcome: Outcome
    left: Callable[[], float] | None = None
    payloads: Callable[[], list[tuple[wire.Header, Array]]] | None = None


def gather(
    codecs: Codecs,
    tensors: Tensors,
    grads: Grads,
    state: OldState,
    context: Context,
    feedback: Feedback,
) -> Generator[Round, Any, Gathered]:
    """Allgather the payloads of a bucket's tensors and sum them; one codec for each tensor.

    ``codecs``: the same on all ranks. ``state``: residuals, and with a momentum velocities; of
    these kinds is the outcome's state. With ``context.second`` the exchange is sharded; with
    ``context.arriving`` there is one codec, and sums are of these tensors.
    """
    if context.second is not None:
        shards = exchange_shards(codecs, tensors, grads, state, context, feedback)
        return Gathered((yield from shards))
    ops = context.ops
    coder = ops.coder(codecs, tensors, context.world_size)
    # Votes have no relative error.
    counted = not are_votes(codecs, feedback) and not feedback.keeps_sent
    measure = context.measures and counted
    encoded = coder.encode(grads, state, (context.step, context.rank), feedback, measure)
    is_fixed = all(codec.has_fixed_size for codec in codecs)
    sizes = (len(encoded.message),) * context.world_size if is_fixed else ()
    gathered = yield Round("allgather", encoded.message, receives=sizes)
    if (arriving := context.arriving) is not None:
        coder = ops.coder([codecs[0]] * len(arriving), arriving, context.world_size)
    summed = coder.decode_sum(gathered, feedback.sign, context.into)
    residuals = low_passed(ops, tensors, state, encoded.residuals, feedback.beta)
    new: dict[str, Sequence[Any]] = {"residual": residuals} if feedback.keep else {}
    if feedback.momentum is not None:
        new["velocity"] = encoded.velocities
    kept = new_state(tensors, grads, state, new)
    outcome = Outcome(summed.sums, kept, summed.flags, measured_by(tensors, encoded.squares))
    left = encoded.left if feedback.beta == 1.0 else None  # it is of the residuals before
    return Gathered(outcome, left, summed.payloads)


@dataclass(frozen=True)
class Allgather(LowPass):
    """Allgather of one payload per tensor, summed on every rank, with optional error feedback.

    With ``error_feedback``, for every tensor: sent + residual == gradient + previous residual, to
    one float32 rounding. A codec with a transform keeps its residual as coefficients, which is
    exact and needs no inverse transform. Source: Seide et al. 2014; Karimireddy et al. 2019.

    ``decay`` below 1 turns the residual into a momentum: sent + residual == gradient + decay *
    previous residual. ``sign`` replaces each sum by its sign times the number of ranks, so that the
    mean is the sign. Source: Peng et al. 2024 (DeMo); of signs alone it is the majority's
    (Bernstein et al. 2019), or 0 in a tie.

    With ``momentum`` sent values stay in the residual: residual == gradient + decay * previous
    residual (Signum).
    """

    spec_name = "Gather"
    codec: AnyCodec
    error_feedback: bool = True
    decay: float = 1.0
    sign: bool = False
    momentum: bool = False
    rounds = ("allgather",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("decay", self.decay, "; 1 means no decay")
        if self.decay < 1.0 and not self.error_feedback:
            raise ValueError("decay is of the residual, so it needs error_feedback=True")
        object.__setattr__(self, "decay", float(self.decay))

    def exchange(
        self, tensors: Tensors, grads: Grads, state: OldState, context: Context
    ) -> Exchange:
        """Sum ``grads`` over all ranks; see ``Scheme.exchange``."""
        codecs = [self.codec.at_loss_scale(context.loss_scale)] * len(tensors)
        options = self.error_feedback, self.decay, self.momentum, self.sign
        feedback = Feedback(*options, beta=self.beta)
        made = (yield from gather(codecs, tensors, grads, state, context, feedback)).outcome
        if self.sign and context.loss_scale != 1:  # by which a loss scaler divides what it gets
            multiply(made.sums, context.loss_scale, context.device)
        return made

    @property
    def traits(self) -> Traits:
        """What optimizers and adapters need to know; see ``Scheme``."""
        codec, noisy = self.codec, False
        if isinstance(codec, Codec):
            is_exact = codec.sparsifier == _ALL and isinstance(codec.quantizer, _ROUNDS_TO_A_DTYPE)
        else:
            is_exact, noisy = codec.method.unbiased, codec.method.is_noisy
        return Traits(
            compresses=self.error_feedback or not is_exact,
            is_noisy=noisy,
            momentum=self.decay if self.decay < 1 or self.momentum else 0.0,
            sends_signs=self.sign,
            fits_differences=not (self.sign or self.momentum),
        )

    def runs_on_device(self, tensors: Tensors) -> bool:
        """Return whether a GPU can compute this step's exchange; see ``Scheme``."""
        return serves(self.codec, tensors, of_signs=self.momentum)

    def sent_nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of ``tensor`` in each step; an estimate where sizes depend on values."""
        return wire.align(self.codec.expected_nbytes(tensor.shape))

    def state_arrays(self, tensor: Tensor, state: OldState) -> StateArrays:
        """Return the residual, as coefficients; see ``Scheme``."""
        return {"residual": coefficients(self.codec, tensor, self.error_feedback)}
