"""Runs under a launcher, on every rank: the same tests on all, in the same order.

Files of TensorFlow's cases begin with "tensorflow_" and never load PyTorch, nor the others
TensorFlow.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
import tempfile

import numpy as np
import pytest

FRAMEWORK = os.environ["FFTCOMP_TEST_FRAMEWORK"]
if FRAMEWORK == "tensorflow":
    # Read when TensorFlow is imported.
    is_keras_3 = any("keras3" in argument for argument in sys.argv)
    os.environ["TF_USE_LEGACY_KERAS"] = "0" if is_keras_3 else "1"
framework = importlib.import_module(FRAMEWORK)
hvd = importlib.import_module(f"horovod.{FRAMEWORK}")


def pytest_configure(config):
    # Ranks that shared a folder of temporary files would clean up under each other's hands.
    config.option.basetemp = tempfile.mkdtemp(prefix="pytest-of-a-rank-")


def pytest_unconfigure(config):
    shutil.rmtree(config.option.basetemp)


@pytest.fixture(scope="session", autouse=True)
def _horovod():
    hvd.init()
    if FRAMEWORK == "torch":
        framework.set_num_threads(1)
    else:
        framework.config.threading.set_intra_op_parallelism_threads(1)
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


def _bytes(tensor) -> bytes:
    if FRAMEWORK == "torch":
        return tensor.detach().cpu().contiguous().view(framework.uint8).numpy().tobytes()
    return np.asarray(tensor).tobytes()
