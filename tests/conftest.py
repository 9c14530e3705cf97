"""Settings of all tests."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import time
from collections import Counter

import pytest
from hypothesis import settings

from horovod_fftcomp.tools.run.launcher import RANK_VARIABLES

from . import loops

# The first example may compile a kernel.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# MPI waits busily. Ranks that share two cores keep each other from what they wait for, unless
# Horovod looks for work less often than each millisecond: steps of 3 ms may take 100 otherwise. At
# 8 ms the longest job takes a fifth less of the cores than at 3 ms, and is no slower.
os.environ.setdefault("HOROVOD_CYCLE_TIME", "8")

# So many tests start jobs at a time, of two or three busy ranks each; others run beside them.
LANES = 2

SAMPLE = 0.25  # the share of a ``sampled`` test's cases that make test runs


_n_cases = Counter()  # of each test so far


def pytest_addoption(parser):
    """Add an option that selects what concerns one recipe, and one on the emulated GPU."""
    parser.addoption("--recipe", default="", help="run the cases with this recipe in their names")
    parser.addoption(
        "--ptx",
        metavar="NVRTC:ARCH",
        help="emulated GPUs run kernels as NVRTC compiles them; for example 13:sm_90",
    )


def pytest_configure(config):
    """Let emulated GPUs run what ``--ptx`` says."""
    if target := config.getoption("--ptx"):
        from .gpu.ptx_report import PtxReport

        config.pluginmanager.register(PtxReport(target))


def pytest_itemcollected(item):
    """Choose the cases of ``sampled`` tests; let one worker have what imports TensorFlow."""
    if item.get_closest_marker("sampled"):
        law = item.nodeid.partition("[")[0]
        # Multiples of the golden ratio: no parameter's values keep step with them.
        if _n_cases[law] * 0.618034 % 1 > SAMPLE:
            item.add_marker(pytest.mark.more)
        _n_cases[law] += 1
    if item.get_closest_marker("tf") and not item.get_closest_marker("parallel"):
        item.add_marker(pytest.mark.xdist_group("tensorflow"))


def pytest_collection_finish():
    """Leave what has been imported out of garbage collections, which would search all of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Spread the tests that start jobs over a run, the longest first, but not over its end."""
    loops.recipe = config.getoption("--recipe")
    if loops.recipe:
        config.hook.pytest_deselected(items=[*itertools.filterfalse(_is_of_recipe, items)])
        items[:] = filter(_is_of_recipe, items)
    jobs = [item for item in items if item.get_closest_marker("parallel")]
    longest = "test_on_ranks[tensorflow-mpi-all]"
    jobs.sort(key=lambda item: (item.path.name != "test_parallel.py", item.name != longest))
    others = [item for item in items if not item.get_closest_marker("parallel")]
    between = int(0.8 * len(others) / max(len(jobs), 1))
    for number, job in enumerate(jobs):
        others.insert(number * (between + 1), job)
    items[:] = others
    for item in items:
        _name_group(item)


def _name_group(item):
    """End a test's id with the name of its group, where pytest-xdist looks for it.

    pytest-xdist 3.8 writes it where pytest 9.2 no longer reads it.
    """
    group = item.get_closest_marker("xdist_group")
    if group and hasattr(item, "_id") and getattr(item.config.option, "loadgroup", False):
        suffix = f"@{group.args[0]}"
        item._id = item._id.parse(item.nodeid.removesuffix(suffix) + suffix)


def _is_of_recipe(item):
    """Return whether a test, or one of the cases through which it goes, is of the recipe."""
    _, cases = getattr(getattr(item, "function", None), "looped", (None, ()))
    in_name = f"_{loops.recipe}_" in f"{item.name}_"
    return in_name or any(map(loops.is_of_recipe, [item.name, *map(loops.in_words, cases)]))


@pytest.fixture(params=[1, 3])
def n_threads(request):
    """Let kernels have one thread and, in another run of the test, three."""
    from horovod_fftcomp.kernels import threads

    before = threads.get_num_threads()
    threads.set_num_threads(request.param)
    yield request.param
    threads.set_num_threads(before)


@pytest.fixture
def no_launcher(monkeypatch):
    """Remove what says that this process, or one that it starts, is a rank of a job."""
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        os.unsetenv(name)  # MPI, once initialized, sets one that os.environ does not know of


@pytest.fixture(autouse=True)
def _lane(request, tmp_path_factory):
    """Let a test that starts a job wait while ``LANES`` of them run, whichever worker has them."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not is_worker or not request.node.get_closest_marker("parallel"):
        yield
        return
    with contextlib.ExitStack() as files:
        folder = tmp_path_factory.getbasetemp().parent  # of all workers of this run
        paths = [folder / f"lane-{lane}" for lane in range(LANES)]
        lanes = itertools.cycle([files.enter_context(path.open("w")) for path in paths])
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(next(lanes), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        yield  # closing the files gives the lane back
