"""Coders of buckets on the host: which are made anew, what they keep and refuse."""

import numpy as np
import pytest

from horovod_fftcomp import PayloadError, get_codec, get_scheme
from horovod_fftcomp.engine.buckets import Bucket
from horovod_fftcomp.engine.engine import Engine
from horovod_fftcomp.engine.policy import always
from horovod_fftcomp.kernels.host.ops import HostOps
from horovod_fftcomp.kernels.ops import Feedback, Into
from horovod_fftcomp.schemes import Tensor

TENSORS = (Tensor("a", (64, 64)), Tensor("b", (10, 30)))


def test_compressors_that_take_turns_with_the_same_tensors_keep_their_coders():
    ops, codecs = HostOps(), [[get_codec(r)] * 2 for r in ("topk", "fft", "qsgd", "dct")]
    coders = [ops.coder(own, TENSORS, 2) for own in codecs]
    assert len(set(map(id, coders))) == 4
    for own, coder in zip(codecs, coders, strict=True):
        assert ops.coder(list(own), list(TENSORS), 2) is coder
        assert ops.coder(own, TENSORS, 3) is not coder


def test_of_codecs_that_change_in_every_step_only_the_last_few_are_kept():
    ops = HostOps()
    for step in range(10):
        ops.coder([get_codec("topk", density=0.1 / (step + 1))] * 2, TENSORS, 1)
    assert sum(map(len, ops.coders.values())) == 4


@pytest.mark.parametrize("size", [100, 20_000])
def test_a_frozen_tensor_keeps_its_own_residual_alive_and_no_other(size):
    tensors = tuple(Tensor(f"t{n}", (10, size // 10)) for n in range(20))
    engine = Engine([Bucket(tensors, always(get_scheme("topk")))], 0, 1)
    rng, kept = np.random.default_rng(0), None
    for step in range(4):  # the first one measures, so it encodes tensor by tensor
        grads = [rng.standard_normal(size).astype(np.float32) for _ in tensors]
        if step > 1:
            grads[0], kept = None, engine.residual("t0")
        engine.resume(0, engine.resume(0, grads).data)
        engine.settle()
    frozen = engine.state[0]["residual"]["t0"]
    assert np.array_equal(frozen, kept.reshape(-1))
    assert frozen.base is None or frozen.base.nbytes <= 2 * frozen.nbytes


def test_payloads_of_other_shapes_are_refused():
    ops, codecs = HostOps(), [get_codec("topk")]
    sent = [Tensor("w", (500, size)) for size in (2, 1000)]
    for tensor in sent:
        grad = np.ones(tensor.shape[0] * tensor.shape[1], np.float32)
        coder = ops.coder(codecs, [tensor], 1)
        message = coder.encode([grad], {}, (0, 0), Feedback(), False).message
        other = ops.coder(codecs, [Tensor("w", tensor.shape[::-1])], 1)
        with pytest.raises(PayloadError, match=r"tensor 'w': header field 'shape' is \(500, "):
            other.decode_sum(message, False)


def test_sums_of_a_step_that_is_not_finite_are_new_arrays_without_a_factor():
    coder, rng, messages = HostOps().coder([get_codec("topk")] * 2, TENSORS, 2), np.random, []
    for worst in (1.0, np.nan):
        grads = [rng.standard_normal(t.numel).astype(np.float32) for t in TENSORS]
        grads[0][5] *= worst
        messages.append(coder.encode(grads, {}, (0, 0), Feedback(), False).message)
    gathered, into = np.concatenate(messages), Into(grads, 0.5)
    plain, found = coder.decode_sum(gathered, False), coder.decode_sum(gathered, False, into)
    assert not found.flags.finite
    for total, grad, expected in zip(found.sums, grads, plain.sums, strict=True):
        assert total is not grad
        assert total.tobytes() == expected.tobytes()
    gathered = np.concatenate(messages[:1] * 2)
    plain, found = coder.decode_sum(gathered, False), coder.decode_sum(gathered, False, into)
    for total, grad, expected in zip(found.sums, grads, plain.sums, strict=True):
        assert total is grad
        assert total.tobytes() == (expected * np.float32(0.5)).tobytes()
