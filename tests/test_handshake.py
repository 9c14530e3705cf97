"""Ranks that differ are told apart by the same message on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from horovod_fftcomp import ConfigMismatchError, handshake


def test_equal_facts_pass():
    message = handshake.pack({"recipe": "fft", "buckets": 3})
    assert message.nbytes == handshake.MESSAGE_NBYTES
    handshake.compare(np.concatenate([message] * 4))


def test_differences_are_named_with_their_ranks():
    same = handshake.pack({"recipe": "fft", "options": "density=0.15", "buckets": 3})
    other = handshake.pack({"recipe": "fft", "options": "density=0.1"})
    with pytest.raises(ConfigMismatchError) as caught:
        handshake.compare(np.concatenate([same, same, other]))
    assert "options is density=0.15 on ranks 0, 1 but density=0.1 on rank 2" in str(caught.value)
    assert "buckets is 3 on ranks 0, 1 but absent on rank 2" in str(caught.value)
    assert "recipe" not in str(caught.value)


def test_many_ranks_are_not_all_listed():
    messages = [handshake.pack({"seed": rank % 2}) for rank in range(64)]
    with pytest.raises(ConfigMismatchError, match="0, 2, 4, 6, 8, 10, 12, 14 and more"):
        handshake.compare(np.concatenate(messages))


def test_long_facts_are_cut_and_still_compared():
    messages = [handshake.pack({"options": "x" * 3000 + end}) for end in ("a", "b")]
    with pytest.raises(ConfigMismatchError, match=r"options is xxx.*hash"):
        handshake.compare(np.concatenate(messages))
    with pytest.raises(ValueError, match=r"take .* bytes"):
        handshake.pack({str(i): "x" * 100 for i in range(50)})
