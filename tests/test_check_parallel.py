"""``horovod-fftcomp check`` under a launcher: sound jobs, unlike ranks, ranks that stay away."""

from __future__ import annotations

import re

import pytest

from tests.test_parallel import run_ranks

pytestmark = [pytest.mark.parallel, pytest.mark.torch]


@pytest.mark.parametrize("controller", ["mpi", pytest.param("gloo", marks=pytest.mark.more)])
def test_a_sound_job_is_told_once(controller):
    code, output = run_ranks(2, controller, "-m", "horovod_fftcomp", "check", "--timeout", "280")
    assert code == 0, output[-8000:]
    output = re.sub(r"^\[(1,)?0\]<stdout>:", "", output, flags=re.M)  # MPI's prefix, Gloo's
    joined = " ".join(output.split())  # cells are broken at spaces
    assert f"2 ranks over {'MPI' if controller == 'mpi' else 'Gloo'}" in output
    for found in (
        "the same bits on all ranks",
        "ms for an allreduce of one number",
        "ms for an allgather of 16.8 MB from each)",
        "Gbit/s received by a rank (",
        "none has failed",
        "0 failed, ",
    ):
        assert found in joined, output[-8000:]
    assert output.count("horovod.torch ") == 1
    assert "\x1b[" not in output


# Rank 1 claims another NumPy.
UNLIKE = """
import os
from horovod_fftcomp.tools import environment
from horovod_fftcomp.cli import main
rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank == "1":
    environment.versions = lambda: {"numpy": "1.0"}
main(["check", "--timeout", "280"])
"""


def test_ranks_with_other_versions_are_told_by_all():
    code, output = run_ranks(2, "gloo", "-c", UNLIKE)
    assert code != 0
    joined = " ".join(output.split())
    assert "but 1.0 on rank 1" in joined
    assert "rank 1: versions: ConfigMismatchError" not in joined
    assert "rank 1: versions: the ranks of this job" in joined
    assert "ranks 0, 1 failed" in joined, output[-8000:]
    assert "2 failed, " in joined


ABSENT = """
import os, time
from horovod_fftcomp.cli import main
rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank == "1":
    time.sleep(600)
main(["check", "--timeout", "15"])
"""


def test_a_rank_that_stays_away_ends_the_wait():
    code, output = run_ranks(2, "mpi", "-c", ABSENT, timeout_s=120)
    assert code != 0
    joined = " ".join(output.split())
    assert "waited 15 s for hvd.init()" in joined, output[-8000:]
    assert "look at the other ranks' output" in joined
