"""Runs every case on all ranks: under a launcher this is one of them, else ranks are threads.

Files of TensorFlow's cases begin with "tensorflow_" and never load PyTorch, nor the others
TensorFlow. TensorFlow's cases run under a launcher only.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile

import numpy as np
import pytest

from tests.parallel import JOBS

FRAMEWORK = os.environ.get("FFTCOMP_TEST_FRAMEWORK", "torch")
IS_RANK = "FFTCOMP_TEST_FRAMEWORK" in os.environ
IS_INSTALLED = importlib.util.find_spec("horovod") and importlib.util.find_spec(FRAMEWORK)
N_RANKS = {
    file: ranks
    for job, (ranks, files) in JOBS.items()
    if job.startswith("torch")
    for file in files.split()
}
if IS_RANK and FRAMEWORK == "tensorflow":
    # Read when TensorFlow is imported.
    is_keras_3 = any("keras3" in argument for argument in sys.argv)
    os.environ["TF_USE_LEGACY_KERAS"] = "0" if is_keras_3 else "1"
if IS_RANK:
    framework = importlib.import_module(FRAMEWORK)
    hvd = importlib.import_module(f"horovod.{FRAMEWORK}")


def pytest_configure(config):
    if IS_RANK:
        # Ranks that shared a folder of temporary files would clean up under each other's hands.
        config.option.basetemp = tempfile.mkdtemp(prefix="pytest-of-a-rank-")


def pytest_unconfigure(config):
    if IS_RANK:
        shutil.rmtree(config.option.basetemp)


def pytest_collect_file(file_path, parent):
    """Collect PyTorch's cases for fake jobs; a launcher's command line names what it runs."""
    if IS_RANK or not IS_INSTALLED or parent.session.isinitpath(file_path):
        return None
    return pytest.Module.from_parent(parent, path=file_path) if file_path.stem in N_RANKS else None


def pytest_itemcollected(item):
    if not IS_RANK:
        item.add_marker("torch")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if not IS_RANK:
        left_out = [item for item in items if item.get_closest_marker("processes")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_pyfunc_call(pyfuncitem):
    """Run a case on threads, each with a folder and a monkeypatch of its own."""
    if IS_RANK:
        return None
    from tests import fakes, rank_threads

    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}

    def case(rank):
        own = dict(given)
        if "tmp_path" in own:
            own["tmp_path"] = given["tmp_path"] / f"rank{rank}"
            own["tmp_path"].mkdir()
        if "monkeypatch" not in own:
            return pyfuncitem.obj(**own)
        with rank_threads.RankPatch(fake.ranks) as own["monkeypatch"]:
            return pyfuncitem.obj(**own)

    with fakes.FakeHorovod(N_RANKS[pyfuncitem.path.stem]) as fake:
        fake.ranks.run(case)
    return True


@pytest.fixture(scope="session", autouse=True)
def _horovod():
    if not IS_RANK:
        yield
        return
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
    gather = importlib.import_module(f"horovod.{FRAMEWORK}").allgather_object

    def check(*things: object) -> None:
        digest = hashlib.sha256()
        for thing in things:
            data = thing if isinstance(thing, str) else _bytes(thing)
            digest.update(data.encode() if isinstance(data, str) else data)
        digests = gather(digest.hexdigest())
        assert len(set(digests)) == 1, f"ranks differ: {digests}"

    return check


def _bytes(tensor) -> bytes:
    if FRAMEWORK == "torch":
        import torch

        return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return np.asarray(tensor).tobytes()
