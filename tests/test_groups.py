"""Cases of one ``xdist_group`` run in one worker, with every pytest of the range in setup.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.more
def test_cases_of_a_group_share_a_worker():
    pytest.importorskip("xdist")
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup"]
    command += ["-p", "no:cacheprovider", "tests/scripts/grouped.py"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    found = {}
    for worker, group in re.findall(r"^\[(gw\d+)\].* PASSED .*\[([ab])-\d\]", ran.stdout, re.M):
        found.setdefault(group, []).append(worker)
    assert {group: len(workers) for group, workers in found.items()} == {"a": 6, "b": 6}
    assert all(len({*workers}) == 1 for workers in found.values()), found
