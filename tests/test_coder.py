"""Coders of buckets on the host: which are made anew."""

from horovod_fftcomp import get_codec
from horovod_fftcomp.kernels.host.ops import HostOps
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
    assert sum(map(len, ops._coders.values())) == 4
