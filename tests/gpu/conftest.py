"""Order of the tests that need a GPU, and who has it."""

from __future__ import annotations

import fcntl

import pytest

# Groups of ``xdist_group``: what wants the GPU alone, and all that comes last.
ALONE = ("little memory", "much memory")
LAST = (*ALONE, "memcheck", "racecheck", "synccheck")  # the tools take minutes


def _group(item):
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else ""


def pytest_collection_modifyitems(items):
    """Leave the groups of ``LAST`` for the end."""
    items.sort(key=lambda item: LAST.index(_group(item)) + 1 if _group(item) in LAST else 0)


@pytest.fixture(autouse=True)
def _gpu(request, tmp_path_factory):
    """Let a test of ``ALONE`` wait until no worker of this run uses the GPU."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    is_alone = _group(request.node) in ALONE
    with (tmp_path_factory.getbasetemp().parent / "gpu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        yield
