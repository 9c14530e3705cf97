"""Runs under a launcher, on every rank: the same tests on all, in the same order."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile

import horovod.torch as hvd
import pytest
import torch


def pytest_configure(config):
    # Ranks that shared a folder of temporary files would clean up under each other's hands.
    config.option.basetemp = tempfile.mkdtemp(prefix="pytest-of-a-rank-")


def pytest_unconfigure(config):
    shutil.rmtree(config.option.basetemp)


@pytest.fixture(scope="session", autouse=True)
def _horovod():
    hvd.init()
    torch.set_num_threads(1)
    # A test of two ranks that ran on one would prove nothing.
    assert hvd.size() == int(os.environ["FFTCOMP_TEST_RANKS"])
    yield
    hvd.shutdown()


@pytest.fixture
def same_everywhere():
    """Return a function that asserts that bytes of tensors or strings are equal on all ranks."""

    def check(*things: object) -> None:
        digest = hashlib.sha256()
        for thing in things:
            data = thing if isinstance(thing, str) else _bytes(thing)
            digest.update(data.encode() if isinstance(data, str) else data)
        digests = hvd.allgather_object(digest.hexdigest())
        assert len(set(digests)) == 1, f"ranks differ: {digests}"

    return check


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
